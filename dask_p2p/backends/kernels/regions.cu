// Copies of many small strided regions in one launch, each in words of 1, 2, 4, 8 or 16 bytes.
//
// The rows of thread blocks of the grid are regions; the threads of a row copy the region's words in
// the order of the destination. The host plans: see batch.py, which fills the struct Batch, field by
// field. The source of a region may be the memory of another GPU, or one item with strides of 0.
//
// The file includes no headers, so that NVRTC, nvcc and (for tests) a C++ compiler accept it.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

const int MAX_AXES = 4;
const int MAX_REGIONS = 38;  // kernels take arguments of 4 KiB

struct alignas(16) Bits {
    u64 low, high;
};

struct Region {
    const char *src;  // first word
    char *dst;
    u32 words;       // number of words
    u32 word_bytes;
    u32 extents[MAX_AXES];  // in words, the slowest axis first; 1 for axes that do not exist
    i64 src_strides[MAX_AXES];  // bytes
    i64 dst_strides[MAX_AXES];
};

struct Batch {
    Region regions[MAX_REGIONS];
};

template <typename Word> __device__ __forceinline__ void copy_words(const Region &region)
{
    for (u32 n = blockIdx.x * blockDim.x + threadIdx.x; n < region.words;
         n += gridDim.x * blockDim.x) {
        const char *src = region.src;
        char *dst = region.dst;
        u32 rest = n;
#pragma unroll
        for (int axis = MAX_AXES - 1; axis >= 0; --axis) {
            const u32 outer = rest / region.extents[axis];
            const u32 at = rest - outer * region.extents[axis];
            src += at * region.src_strides[axis];
            dst += at * region.dst_strides[axis];
            rest = outer;
        }
        *reinterpret_cast<Word *>(dst) = *reinterpret_cast<const Word *>(src);
    }
}

extern "C" __global__ void copy_regions(const __grid_constant__ Batch batch)
{
    const Region &region = batch.regions[blockIdx.y];
    switch (region.word_bytes) {
    case 1: copy_words<u8>(region); break;
    case 2: copy_words<u16>(region); break;
    case 4: copy_words<u32>(region); break;
    case 8: copy_words<u64>(region); break;
    default: copy_words<Bits>(region);
    }
}
