// The checksum of cuda.py: a sum modulo 2**64 of words, each mixed with its position.
//
// The threads of the grid take words in turn, and each thread adds its sum to the total. The file
// includes no headers, so that NVRTC, nvcc and (for tests) a C++ compiler accept it.

typedef unsigned char u8;
typedef unsigned long long u64;

const u64 WORD_BYTES = 8;
const u64 STEP = 0x9E3779B97F4A7C15;

__device__ __forceinline__ u64 mixed(u64 word, u64 position)
{
    word += (position + 1) * STEP;
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9;
    word = (word ^ word >> 27) * 0x94D049BB133111EB;
    return word ^ word >> 31;
}

// `data` starts at a multiple of 8 bytes. Bytes after the last whole word are a word with zeros.
extern "C" __global__ void add_mixed(const u8 *data, u64 size_bytes, u64 *total)
{
    const u64 words = size_bytes / WORD_BYTES, threads = (u64)gridDim.x * blockDim.x;
    const u64 first = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    u64 sum = 0;
#pragma unroll 4
    for (u64 n = first; n < words; n += threads)
        sum += mixed(reinterpret_cast<const u64 *>(data)[n], n);
    if (first == words % threads && size_bytes % WORD_BYTES) {
        u64 last = 0;
        for (u64 n = words * WORD_BYTES; n < size_bytes; ++n)
            last |= (u64)data[n] << n % WORD_BYTES * 8;
        sum += mixed(last, words);
    }
    if (sum)
        atomicAdd(total, sum);
}
