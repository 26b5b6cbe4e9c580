// Permuted copies of any strided box, for words of 1, 2, 4, 8 and 16 bytes.
//
//        k, source-fastest ->                    i, destination-fastest ->
//      +---------+---------+                   +---------+---------+
//   i  | a b c d |         |                k  | a e i m |         |
//   |  | e f g h |  tile   |   -- shared -->|  | b f j n |         |
//   v  | i j k l |         |      memory    v  | c g k o |         |
//      | m n o p |         |                   | d h l p |         |
//      +---------+---------+                   +---------+---------+
//
// A block reads a tile along k and writes it along i, so that the accesses to global memory are
// contiguous on both sides. All other axes of the copy are a batch around the tiles. The idea is
// from G. Ruetsch and P. Micikevicius, "Optimizing Matrix Transpose in CUDA" (NVIDIA, 2009).
//
// The host plans: see _launch.py, whose `Launch.pack` fills the struct Work below, field by field.
//
// - The file includes no headers, so that NVRTC, nvcc and (for tests) a C++ compiler accept it.
// - Strides are in bytes, offsets have 64 bits, and the grid has one dimension: a block for a tile.
// - The source may be the memory of another GPU: each thread issues all its reads of a tile before
//   it uses the first.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

static_assert(sizeof(u16) == 2 && sizeof(u32) == 4 && sizeof(u64) == 8, "unexpected integers");

struct Axis {
    i64 extent;
    i64 src_stride;  // bytes
    i64 dst_stride;  // bytes
};

const int MAX_OUTER = 6;

struct Work {
    const char *src;  // first item of the box
    char *dst;
    Axis k;       // source-fastest axis
    Axis i;       // destination-fastest axis
    Axis j;       // third axis of a cell, or of the copy kernel's boxes: outer[0] walks it by step_j
    i64 head_k;   // items by which the first tile starts before the box
    i64 head_i;
    i64 step_k;   // items from tile to tile
    i64 step_i;
    i64 step_j;
    i64 tiles_k;  // number of tiles
    i64 tiles_i;
    i64 first_tile;  // of this launch: a grid can be too small for all tiles
    i64 cells;    // cell kernel: number of cells; outer[0] walks step_j of them at a time
    i64 outer_count;
    Axis outer[MAX_OUTER];  // the axes around the tiles, the fastest first
};

static_assert(sizeof(Work) == 8 * (2 + 9 + 10 + 3 * MAX_OUTER), "_WORK in _launch.py differs");

// ---------------------------------------------------------------------------------------------
// Which tile
// ---------------------------------------------------------------------------------------------

struct Tile {
    const char *src;  // item (k, i) of the tile's batch; outside of the box where k or i is < 0
    char *dst;
    i64 k;  // first item of the tile, counted from the box's
    i64 i;
    i64 j;
};

// value / by, leaving the remainder in value. A division of 64 bits takes several times as long as
// one of 32 bits, and these divisions delay the first read.
__device__ __forceinline__ i64 divide(i64 &value, i64 by)
{
    i64 quotient;
    if (((u64)value | (u64)by) >> 32) {
        quotient = value / by;
        value -= quotient * by;
    } else {
        const u32 small = (u32)value / (u32)by;
        value = (u32)value - small * (u32)by;
        quotient = small;
    }
    return quotient;
}

// Tiles are numbered along k, then along i, then by batch: concurrent blocks share rows.
__device__ __forceinline__ Tile locate(const Work &work)
{
    i64 index = work.first_tile + blockIdx.x;
    i64 batch = divide(index, work.tiles_k * work.tiles_i);
    const i64 tile_i = divide(index, work.tiles_k);

    Tile tile;
    tile.k = index * work.step_k - work.head_k;
    tile.i = tile_i * work.step_i - work.head_i;
    tile.j = 0;
    tile.src = work.src + tile.k * work.k.src_stride + tile.i * work.i.src_stride;
    tile.dst = work.dst + tile.k * work.k.dst_stride + tile.i * work.i.dst_stride;
#pragma unroll
    for (int axis = 0; axis < MAX_OUTER; ++axis) {  // unrolled, or `outer` is copied to the stack
        if (axis < work.outer_count) {
            const i64 further = divide(batch, work.outer[axis].extent);
            if (axis == 0)
                tile.j = batch * work.step_j;
            tile.src += batch * work.outer[axis].src_stride;
            tile.dst += batch * work.outer[axis].dst_stride;
            batch = further;
        }
    }
    return tile;
}

__device__ __forceinline__ bool contains(const Work &work, i64 k, i64 i)
{
    return k >= 0 && k < work.k.extent && i >= 0 && i < work.i.extent;
}

// ---------------------------------------------------------------------------------------------
// Vector kernel: 16-byte accesses everywhere
// ---------------------------------------------------------------------------------------------

struct Bits {  // 16 bytes in registers
    u32 part[4];
};

__device__ __forceinline__ Bits load_bits(const char *address)
{
    const uint4 raw = *reinterpret_cast<const uint4 *>(address);
    Bits bits;
    bits.part[0] = raw.x;
    bits.part[1] = raw.y;
    bits.part[2] = raw.z;
    bits.part[3] = raw.w;
    return bits;
}

__device__ __forceinline__ uint4 raw_bits(const Bits &bits)
{
    return make_uint4(bits.part[0], bits.part[1], bits.part[2], bits.part[3]);
}

// Words `k` of V vectors, each of V words, as one vector. For constant `k`, once inlined.
template <int WORD_BYTES> struct Gather;

template <> struct Gather<16> {
    static __device__ __forceinline__ Bits words(const Bits *rows, int)
    {
        return rows[0];
    }
};

template <> struct Gather<8> {
    static __device__ __forceinline__ Bits words(const Bits *rows, int k)
    {
        Bits out;
#pragma unroll
        for (int n = 0; n < 4; ++n)
            out.part[n] = rows[n / 2].part[2 * k + n % 2];
        return out;
    }
};

template <> struct Gather<4> {
    static __device__ __forceinline__ Bits words(const Bits *rows, int k)
    {
        Bits out;
#pragma unroll
        for (int n = 0; n < 4; ++n)
            out.part[n] = rows[n].part[k];
        return out;
    }
};

template <> struct Gather<2> {
    static __device__ __forceinline__ Bits words(const Bits *rows, int k)
    {
        const u32 halves = k % 2 ? 0x7632 : 0x5410;  // the upper, or the lower halves of two parts
        Bits out;
#pragma unroll
        for (int n = 0; n < 4; ++n)
            out.part[n] =
                __byte_perm(rows[2 * n].part[k / 2], rows[2 * n + 1].part[k / 2], halves);
        return out;
    }
};

template <> struct Gather<1> {
    static __device__ __forceinline__ Bits words(const Bits *rows, int k)
    {
        const u32 bytes = (u32)(k % 4) * 0x11 + 0x40;  // byte k % 4 of either of two parts
        Bits out;
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            const Bits *four = rows + 4 * n;
            const u32 low = __byte_perm(four[0].part[k / 4], four[1].part[k / 4], bytes);
            const u32 high = __byte_perm(four[2].part[k / 4], four[3].part[k / 4], bytes);
            out.part[n] = __byte_perm(low, high, 0x5410);
        }
        return out;
    }
};

// A tile of SIDE x SIDE words goes through shared memory as `row k, vector of V words along i`.
//
// Read: a thread takes V vectors below each other, V x V words, transposes them in its registers
// and stores V vectors. Write: the vectors are written unchanged. So all accesses have 16 bytes.
//
// Eight neighbouring threads access shared memory at a time, and must use eight different vectors
// of a 128-byte line. When they write, they use neighbouring columns of a row; when they read, the
// same column of every Vth row. Rows fill whole lines, so the column is xor-ed with the row's
// number / V.
template <typename Word, int SIDE, int THREADS> struct VectorTile {
    static const int WORD_BYTES = sizeof(Word);
    static const int V = 16 / WORD_BYTES;
    static const int ROW = SIDE / V;  // vectors
    static const int PATCHES = ROW * ROW / THREADS;  // patches of V x V words for each thread
    static const int DOWN = THREADS / ROW;  // rows that all threads take at a time

    static_assert(ROW % 8 == 0, "the swizzle needs rows of whole 128-byte lines");
    static_assert(DOWN * ROW == THREADS, "the threads do not fill whole rows");
    static_assert(PATCHES * THREADS == ROW * ROW, "the threads do not fill the tile");

    static __device__ __forceinline__ int place(int row, int column)
    {
        return row * ROW + (column ^ (row / V % 8));
    }

    static __device__ __forceinline__ void load(uint4 *shared, const Tile &tile, i64 src_stride)
    {
        const int x = threadIdx.x % ROW, y = threadIdx.x / ROW;  // patch of the thread
        const char *corner = tile.src + y * V * src_stride + x * 16;
        Bits rows[PATCHES][V];
#pragma unroll
        for (int patch = 0; patch < PATCHES; ++patch) {
            const char *address = corner;
#pragma unroll
            for (int row = 0; row < V; ++row) {
                rows[patch][row] = load_bits(address);
                address += src_stride;
            }
            corner += DOWN * V * src_stride;
        }
#pragma unroll
        for (int patch = 0; patch < PATCHES; ++patch)
#pragma unroll
            for (int k = 0; k < V; ++k)
                shared[place(x * V + k, y + patch * DOWN)] =
                    raw_bits(Gather<WORD_BYTES>::words(rows[patch], k));
    }

    static __device__ __forceinline__ void store(
        const uint4 *shared, const Tile &tile, i64 dst_stride)
    {
        const int x = threadIdx.x % ROW, y = threadIdx.x / ROW;
        char *address = tile.dst + y * dst_stride + x * 16;
#pragma unroll
        for (int round = 0; round < PATCHES * V; ++round) {
            *reinterpret_cast<uint4 *>(address) = shared[place(y + round * DOWN, x)];
            address += DOWN * dst_stride;
        }
    }

    // Tiles that reach out of the box are moved word by word.

    static __device__ __forceinline__ Word *word_at(uint4 *shared, int k, int i)
    {
        return reinterpret_cast<Word *>(shared + place(k, i / V)) + i % V;
    }

    static __device__ __forceinline__ void load_edge(
        uint4 *shared, const Tile &tile, const Work &work)
    {
#pragma unroll 4
        for (int n = threadIdx.x; n < SIDE * SIDE; n += THREADS) {
            const int k = n % SIDE, i = n / SIDE;
            if (contains(work, tile.k + k, tile.i + i))
                *word_at(shared, k, i) = *reinterpret_cast<const Word *>(
                    tile.src + i * work.i.src_stride + k * WORD_BYTES);
        }
    }

    static __device__ __forceinline__ void store_edge(
        uint4 *shared, const Tile &tile, const Work &work)
    {
#pragma unroll 1
        for (int n = threadIdx.x; n < SIDE * SIDE; n += THREADS) {
            const int k = n / SIDE, i = n % SIDE;
            if (contains(work, tile.k + k, tile.i + i))
                *reinterpret_cast<Word *>(
                    tile.dst + k * work.k.dst_stride + i * WORD_BYTES) = *word_at(shared, k, i);
        }
    }
};

template <typename Word, int SIDE, int THREADS>
__device__ __forceinline__ void permute_vector(const Work &work)
{
    typedef VectorTile<Word, SIDE, THREADS> Vectors;
    __shared__ uint4 shared[SIDE * Vectors::ROW];
    const Tile tile = locate(work);
    if (contains(work, tile.k, tile.i) && contains(work, tile.k + SIDE - 1, tile.i + SIDE - 1)) {
        Vectors::load(shared, tile, work.i.src_stride);
        __syncthreads();
        Vectors::store(shared, tile, work.k.dst_stride);
    } else {
        Vectors::load_edge(shared, tile, work);
        __syncthreads();
        Vectors::store_edge(shared, tile, work);
    }
}

// ---------------------------------------------------------------------------------------------
// Tile kernel: any strides
// ---------------------------------------------------------------------------------------------

// The classic kernel: 32 x 32 words, 32 x 8 threads, and one extra column, so that the words of a
// column lie in different banks.
template <typename Word> __device__ __forceinline__ void permute_tile(const Work &work)
{
    const int SIDE = 32, ROWS = 8, ROUNDS = SIDE / ROWS;
    __shared__ Word shared[SIDE][SIDE + 1];
    const int x = threadIdx.x, y = threadIdx.y;
    const Tile tile = locate(work);

    const char *src = tile.src + y * work.i.src_stride + x * work.k.src_stride;
    Word words[ROUNDS];
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {
        if (contains(work, tile.k + x, tile.i + y + round * ROWS))
            words[round] = *reinterpret_cast<const Word *>(src);
        src += ROWS * work.i.src_stride;
    }
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round)
        shared[y + round * ROWS][x] = words[round];
    __syncthreads();

    char *dst = tile.dst + y * work.k.dst_stride + x * work.i.dst_stride;
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {
        if (contains(work, tile.k + y + round * ROWS, tile.i + x))
            *reinterpret_cast<Word *>(dst) = shared[x][y + round * ROWS];
        dst += ROWS * work.k.dst_stride;
    }
}

// ---------------------------------------------------------------------------------------------
// Copy kernel: the same axis is fastest on both sides, or one side is very short
// ---------------------------------------------------------------------------------------------

// A block copies a box of step_j x step_k x step_i words, at most THREADS * ROUNDS. Neighbouring
// threads take neighbouring words of i, then of k; a third axis fills boxes where both are short.
template <typename Word> __device__ __forceinline__ void permute_copy(const Work &work)
{
    const int THREADS = 256, ROUNDS = 8;
    const u32 step_i = (u32)work.step_i, step_k = (u32)work.step_k, step_j = (u32)work.step_j;
    const Tile tile = locate(work);
    Word words[ROUNDS];
    i64 dst_offset[ROUNDS];  // bytes; -1: not in the box
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {
        const u32 n = threadIdx.x + round * THREADS;
        const u32 row = n / step_i, i = n - row * step_i;
        const u32 j = row / step_k, k = row - j * step_k;
        dst_offset[round] = -1;
        if (j < step_j && tile.j + j < work.j.extent && contains(work, tile.k + k, tile.i + i)) {
            dst_offset[round] =
                i * work.i.dst_stride + k * work.k.dst_stride + j * work.j.dst_stride;
            words[round] = *reinterpret_cast<const Word *>(tile.src + i * work.i.src_stride
                + k * work.k.src_stride + j * work.j.src_stride);
        }
    }
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round)
        if (dst_offset[round] >= 0)
            *reinterpret_cast<Word *>(tile.dst + dst_offset[round]) = words[round];
}

// ---------------------------------------------------------------------------------------------
// Cell kernel: batches of small matrices
// ---------------------------------------------------------------------------------------------

// Word number `index` of a vector.
template <typename Word> __device__ __forceinline__ void set_word(Bits &bits, int index, Word word)
{
    const int bit = index * sizeof(Word) * 8;
    bits.part[bit / 32] |= (u32)word << bit % 32;
}

template <> __device__ __forceinline__ void set_word<u64>(Bits &bits, int index, u64 word)
{
    bits.part[2 * index] = (u32)word;
    bits.part[2 * index + 1] = (u32)(word >> 32);
}

template <> __device__ __forceinline__ void set_word<uint4>(Bits &bits, int, uint4 word)
{
    bits.part[0] = word.x;
    bits.part[1] = word.y;
    bits.part[2] = word.z;
    bits.part[3] = word.w;
}

// A cell is the same run of bytes in both arrays, with its words in another order: a small matrix.
// A block moves a chunk: step_j consecutive cells. It reads and writes global memory in order, 16
// bytes at a time; only its reads of shared memory in between are permuted. A chunk starts at the
// same offset modulo 16 bytes in both arrays. The first `head` words of its first vector belong to
// other chunks, so the first and last vectors are moved word by word.
//
// After every 128 bytes of shared memory, 16 bytes are unused. Otherwise the words of a column would
// lie in the same bank if a row has a power of two of them.
template <typename Word> struct Cells {
    static const int THREADS = 256, V = 16 / sizeof(Word);
    static const int VECTORS = 2048;  // CELLS_BYTES in _launch.py
    static const int ROUNDS = VECTORS / THREADS;

    uint4 *shared;
    char *dst;        // the first vector of the chunk, in either array
    const char *src;
    u32 head;         // words of the first vector before the chunk
    u32 end;          // words from the first vector to the end of the chunk
    u32 first, last;  // vectors that lie within the chunk: from the first, up to the last

    __device__ __forceinline__ Cells(uint4 *shared, const Tile &tile, u32 words) : shared(shared)
    {
        head = (u32)((u64)tile.src % 16) / (u32)sizeof(Word);
        end = head + words;
        src = tile.src - head * sizeof(Word);
        dst = tile.dst - head * sizeof(Word);
        first = head ? 1 : 0;
        last = end / V;
    }

    static __device__ __forceinline__ u32 place(u32 vector)
    {
        return vector + vector / 8;
    }

    __device__ __forceinline__ Word &word_at(u32 word) const
    {
        return reinterpret_cast<Word *>(shared + place(word / V))[word % V];
    }

    __device__ __forceinline__ bool contains(u32 word) const
    {
        return word >= head && word < end;
    }

    __device__ __forceinline__ void load() const
    {
        Bits vectors[ROUNDS];
#pragma unroll
        for (int round = 0; round < ROUNDS; ++round) {
            const u32 n = first + threadIdx.x + round * THREADS;
            if (n < last)
                vectors[round] = load_bits(src + n * 16);
        }
#pragma unroll
        for (int round = 0; round < ROUNDS; ++round) {
            const u32 n = first + threadIdx.x + round * THREADS;
            if (n < last)
                shared[place(n)] = raw_bits(vectors[round]);
        }
        if (threadIdx.x < V) {
            load_word(threadIdx.x);
            load_word(last * V + threadIdx.x);
        }
    }

    __device__ __forceinline__ void load_word(u32 word) const
    {
        if (contains(word))
            word_at(word) = reinterpret_cast<const Word *>(src)[word];
    }

    __device__ __forceinline__ void store(const Work &work) const
    {
#pragma unroll 1
        for (u32 n = first + threadIdx.x; n < last; n += THREADS) {
            Walk walk(work, n * V - head);
            Bits bits = {{0, 0, 0, 0}};
#pragma unroll
            for (int word = 0; word < V; ++word) {
                set_word<Word>(bits, word, word_at(head + walk.source));
                walk.step(work);
            }
            *reinterpret_cast<uint4 *>(dst + n * 16) = raw_bits(bits);
        }
        if (threadIdx.x < V) {
            store_word(work, threadIdx.x);
            store_word(work, last * V + threadIdx.x);
        }
    }

    __device__ __forceinline__ void store_word(const Work &work, u32 word) const
    {
        if (contains(word))
            reinterpret_cast<Word *>(dst)[word] = word_at(head + Walk(work, word - head).source);
    }

    // Position in the source of a word of the destination: steps along its axes i, k, j, and to the
    // next cell.
    struct Walk {
        u32 i, k, j, source;

        __device__ __forceinline__ Walk(const Work &work, u32 word)
        {
            const u32 extent_i = (u32)work.i.extent, extent_k = (u32)work.k.extent;
            const u32 cell_words = extent_i * extent_k * (u32)work.j.extent;
            const u32 cell = word / cell_words, in_cell = word - cell * cell_words;
            const u32 row = in_cell / extent_i;
            i = in_cell - row * extent_i;
            j = row / extent_k;
            k = row - j * extent_k;
            source = cell * cell_words + i * stride(work.i) + k * stride(work.k) + j * stride(work.j);
        }

        static __device__ __forceinline__ u32 stride(const Axis &axis)
        {
            return (u32)axis.src_stride / (u32)sizeof(Word);
        }

        __device__ __forceinline__ void step(const Work &work)
        {
            source += stride(work.i);
            if (++i < (u32)work.i.extent)
                return;
            i = 0;
            source += stride(work.k) - (u32)work.i.extent * stride(work.i);
            if (++k < (u32)work.k.extent)
                return;
            k = 0;
            source += stride(work.j) - (u32)work.k.extent * stride(work.k);
            if (++j < (u32)work.j.extent)
                return;
            j = 0;
            source += (u32)work.i.extent * (u32)work.k.extent * (u32)work.j.extent
                - (u32)work.j.extent * stride(work.j);
        }
    };
};

template <typename Word> __device__ __forceinline__ void permute_cells(const Work &work)
{
    __shared__ uint4 shared[Cells<Word>::VECTORS / 8 * 9 + 1];  // one more, if there is a head
    const Tile tile = locate(work);
    const i64 left = work.cells - tile.j;
    const u32 cells = (u32)(left < work.step_j ? left : work.step_j);
    const u32 words = cells * (u32)(work.i.extent * work.k.extent * work.j.extent);
    const Cells<Word> chunk(shared, tile, words);
    chunk.load();
    __syncthreads();
    chunk.store(work);
}

// ---------------------------------------------------------------------------------------------
// Entries: SIDE and THREADS as VECTOR_TILE and VECTOR_THREADS in _launch.py
// ---------------------------------------------------------------------------------------------

// BLOCKS, the number of blocks on a multiprocessor at a time, limits the registers: while one block
// waits at its barrier, others must have reads in transit. These values avoid spills, from Turing to
// Blackwell.
#define ENTRIES(BYTES, WORD, SIDE, THREADS, BLOCKS)                                                \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)                                  \
        permute_vector_##BYTES(const Work work)                                                    \
    {                                                                                              \
        permute_vector<WORD, SIDE, THREADS>(work);                                                 \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(256, 4) permute_tile_##BYTES(const Work work)     \
    {                                                                                              \
        permute_tile<WORD>(work);                                                                  \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(256, 4) permute_copy_##BYTES(const Work work)     \
    {                                                                                              \
        permute_copy<WORD>(work);                                                                  \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(256, 4) permute_cells_##BYTES(const Work work)    \
    {                                                                                              \
        permute_cells<WORD>(work);                                                                 \
    }

// All entries together take the compiler seconds. Define ONLY_WORD_BYTES to compile one word size.
#ifndef ONLY_WORD_BYTES
#define ONLY_WORD_BYTES 0
#endif
#if ONLY_WORD_BYTES == 0 || ONLY_WORD_BYTES == 1
ENTRIES(1, u8, 128, 64, 8)
#endif
#if ONLY_WORD_BYTES == 0 || ONLY_WORD_BYTES == 2
ENTRIES(2, u16, 128, 256, 4)
#endif
#if ONLY_WORD_BYTES == 0 || ONLY_WORD_BYTES == 4
ENTRIES(4, u32, 64, 256, 4)
#endif
#if ONLY_WORD_BYTES == 0 || ONLY_WORD_BYTES == 8
ENTRIES(8, u64, 64, 256, 4)
#endif
#if ONLY_WORD_BYTES == 0 || ONLY_WORD_BYTES == 16
ENTRIES(16, uint4, 32, 256, 4)
#endif
