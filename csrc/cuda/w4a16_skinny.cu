// W4A16 GEMM for few tokens, sm80 and later: out[M,N] = x[M,K] @ ((Q - Z) * S)[N,K]^T + bias
//   x, out  fp16 or bf16, row-major, rows strided        Q  4 bits, layout k8x (k8x_mma.h), rows padded to 16 bytes
//   S       dtype of x [N, num_groups]                   Z  like S, any real value; without ZEROS it is 8
// Grid (CLUSTER * min(ceil(N / ROWS), clusters at once), ceil(M / TOKENS)), ROWS = 16 * TILES * WARPS_N;
// block 32 * WARPS_N * WARPS_K threads; shared memory, dynamic, in bytes:
//   WARPS_N * WARPS_K * DEPTH * SLOT_BYTES                                        a ring of weights per warp
//   + 4 * BUFFERS * CLUSTER * WARPS_K * TOKENS * (ROWS / CLUSTER + 4)             the sums of all warps
//   + 256 * ceil(ceil(K / 128) / CLUSTER) * (TOKENS == 8 ? min(M, 8) : TOKENS)    the activations of one slice of K
// Needs K % 32 == 0, so that no 16-byte copy of weights passes the end of a row, and 16-byte aligned x and Q. Groups:
// one, or with SPAN 128 a power of two from 128 on, with SPAN 64 or 32 a multiple of SPAN, and then K < 2^20.
//
// Weights are operand A of mma.m16n8k16 and tokens operand B: 16 output features are as many as one mma takes, 8 tokens
// as few. The order of k inside a sum is free as long as both operands agree, and k8x lets a lane feed itself: 16 bytes
// are 32 neighbours in k of one row, already in the pairs that the mma wants. So unpacking needs no shuffle. A group of
// 128 or more spans all lanes of a row: its scale is applied to the float32 sum of a chunk. Narrower groups scale the
// unpacked weights, which rounds once more.
//
// What binds at M <= 8 is memory, if three things are seen to (figures: NVIDIA H200, K 4096, N 28672, M 8, 21 us):
//   - Weights are on their way all the time. Each warp copies its own, DEPTH - 1 chunks ahead and over the end of a
//     tile of rows, into a ring that no other warp reads: no barrier.
//   - x reaches shared memory through registers. cp.async to a place of its own for each 16 bytes took 9 us more.
//   - The next kernel starts while this one ends (sm90, "early start" below): 1.5 us.
// 2048 weights (16 rows of 128 k) may take 233 cycles of one of 528 schedulers. The loop, as disassembled for sm90 with
// two tiles a warp, has 150 instructions for them (bfloat16 166, with zero points 196), the turn to another tile, which
// is rarely taken, included. Unpacking is 72 (bfloat16 88; with zero points 104 and 120; narrow groups 32 more), mma 8.
#include "k8x_mma.h"
#include "ptx.h"

constexpr int CHUNK = 128;                     // k per step of a warp: four lanes of 32
constexpr int SPANS = CHUNK / SPAN;            // scales of a row per chunk
constexpr int THREADS = 32 * WARPS_N * WARPS_K;
constexpr int WARP_ROWS = 16 * TILES;
constexpr int ROWS = WARP_ROWS * WARPS_N;      // output features per block and turn
constexpr int OWN_ROWS = ROWS / CLUSTER;       // of which this block writes
constexpr int PITCH = OWN_ROWS + 4;            // floats; 2 * PITCH % 32 == 8 spreads the sums of a warp over all banks
constexpr int SOURCES = CLUSTER * WARPS_K;     // sums per output
constexpr int SUMS = SOURCES * TOKENS * PITCH;
constexpr int BUFFERS = TOKENS == 8 ? 2 : 1;   // of sums: with two, a turn ends with one barrier
constexpr int COLUMNS = TOKENS / 8;            // n-tiles of the mma

// A slot of a warp's ring: weights [WARP_ROWS][64 bytes], scales [WARP_ROWS][SPANS], zero points likewise. A scale
// takes 4 bytes, the aligned ones that it was copied with.
constexpr int LINE = CHUNK / 2;
constexpr int SCALES_AT = LINE * WARP_ROWS;
constexpr int SCALES_BYTES = 4 * WARP_ROWS * SPANS;
constexpr int SLOT_BYTES = SCALES_AT + (1 + ZEROS) * SCALES_BYTES;

// Words of a row that are unpacked at a time: where all four do not fit beside the sums (ptxas spills), two.
constexpr int PASS = TILES * COLUMNS == 1 ? 4 : 2;
// A dependent mma waits about 33 cycles, an independent one 8: at least four sums should be open at a time. Many
// columns give them by themselves; few columns get a second accumulator for every other mma.
constexpr int BLOCK = COLUMNS % 4 == 0 ? 4 : COLUMNS % 3 == 0 ? 3 : COLUMNS;
constexpr int SPLIT = SPAN == 128 && BLOCK * TILES < 4 ? 2 : 1;

static_assert(TOKENS % 8 == 0 && ROWS % CLUSTER == 0 && THREADS % OWN_ROWS == 0 && DEPTH >= 2);
static_assert(SPAN == 128 || SPAN == 64 || SPAN == 32);
static_assert(TILES == 1 || TILES == 2);

struct Weight {
    const u32 *words;
    const u16 *scales;
    long long zeros_from_scales;  // in elements
    u32 word_stride, scale_stride;
    int N, K;
    u32 groups;  // log2 of the chunks in a group; else the next whole number above 2^31 / (group_size / 32), 0 for one

    __device__ __forceinline__ int group(int k) const {
        return SPAN == 128 ? k / CHUNK >> groups : int((u64(u32(k) / 32) * groups) >> 31);
    }
};

// Where a lane copies from in one tile of rows. The lanes of a row's scales in a chunk are neighbours: a warp's copy
// then touches no more rows than it must, each of which takes the copy unit a cycle.
struct Source {
    const u32 *words;
    const u16 *scales;
    int rows, scale_rows;  // that the weight still has, from the lane's first on
};

constexpr int SCALE_ROWS = 32 / SPANS;  // per copy of a warp

__device__ __forceinline__ Source source_of(const Weight &w, int first_row) {
    const int lane = threadIdx.x % 32;
    const u32 row = first_row + lane / 4, scale_row = first_row + lane / SPANS;
    return {
        w.words + u64(row) * w.word_stride + 4 * (lane % 4),
        w.scales + u64(scale_row) * w.scale_stride,
        w.N - int(row),
        w.N - int(scale_row),
    };
}

// Start the copies of one chunk into a slot. What lies past N or K becomes zero.
__device__ __forceinline__ void copy_chunk(u32 slot, const Source &s, const Weight &w, int chunk) {
    const int lane = threadIdx.x % 32;
    const int k0 = chunk * CHUNK;
    const int rows = k0 + 32 * (lane % 4) < w.K ? s.rows : 0;
#pragma unroll
    for (int first = 0; first < WARP_ROWS; first += 8)
        copy_16_bytes_async(slot + first * LINE + 16 * lane, s.words + k0 / 8 + u64(first) * w.word_stride,
                            first < rows ? 16 : 0);
    // A copy has at least 4 bytes, aligned: of those, the two of the scale, and of a scale in the upper half all four.
    const int k = k0 + lane % SPANS * SPAN;
    const u64 of_group = u64(s.scales + w.group(k));
    const int scale_rows = k < w.K ? s.scale_rows : 0;
#pragma unroll
    for (int first = 0; first < WARP_ROWS; first += SCALE_ROWS)
#pragma unroll
        for (int z = 0; z <= ZEROS; ++z) {
            const u64 from = of_group + 2 * (u64(first) * w.scale_stride + z * w.zeros_from_scales);
            if (SCALE_ROWS <= WARP_ROWS || lane < WARP_ROWS)
                copy_4_bytes_async(slot + SCALES_AT + z * SCALES_BYTES + 4 * (first * SPANS + lane), from & ~u64(3),
                                   first < scale_rows ? 2 + (from & 2) : 0);
        }
}

// acc += scale * (weights of the chunk in `slot` * x of the chunk). `x` is the lane's place in the chunk in shared
// memory: 256 bytes a token, in which word j of the lane with this quad lies at 64 * j + 16 * quad, and 64 * (j ^ 1) +
// 16 * quad for odd tokens: eight lanes, two tokens of four quads, then read 128 bytes from all banks. Bit 0 of
// `parity` says which half of its 4 bytes the scale of group 0 has, bit 1 the same of the zero point.
__device__ __forceinline__ void multiply_chunk(
    float acc[TILES][COLUMNS][4], const unsigned char *slot, const unsigned char *x, const unsigned char *x_odd,
    const Weight &w, int chunk, u32 parity) {
    const u32 row = threadIdx.x % 32 / 4, quad = threadIdx.x % 4;
    const u32 span = 32 * quad / SPAN;
    const u32 group = w.group(chunk * CHUNK + span * SPAN);
    u32 words[TILES][2][4];
#pragma unroll
    for (int t = 0; t < TILES; ++t)
#pragma unroll
        for (int h = 0; h < 2; ++h) load_shared(words[t][h], slot + (16 * t + 8 * h + row) * LINE + 16 * quad);
#pragma unroll
    for (int first = 0; first < 4; first += PASS) {
        u32 a[TILES][2 * PASS][4];
        float scale[TILES][2];
#pragma unroll
        for (int t = 0; t < TILES; ++t)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const u32 r = 16 * t + 8 * h + row;
                const unsigned char *scales = slot + SCALES_AT + 4 * (r * SPANS + span);
                const u32 scale_bits = *reinterpret_cast<const u16 *>(scales + 2 * ((parity ^ group) & 1));
                scale[t][h] = to_float(scale_bits);
#if ZEROS
                const unsigned char *zeros = scales + SCALES_BYTES;
                const u32 zero_bits = *reinterpret_cast<const u16 *>(zeros + 2 * ((parity >> 1 ^ group) & 1));
                const u32 minus_zero = negate2(twice(zero_bits));
#endif
#pragma unroll
                for (int j = 0; j < PASS; ++j) {
                    u32 pair[4];
#if ZEROS
                    unpack(words[t][h][first + j], minus_zero, pair);
#else
                    unpack(words[t][h][first + j], pair);
#endif
#pragma unroll
                    for (int p = 0; p < 4; ++p)
                        a[t][2 * j + p / 2][2 * (p % 2) + h] =
                            SPAN == 128 ? pair[p] : multiply2(pair[p], twice(scale_bits));
                }
            }
#pragma unroll
        for (int c0 = 0; c0 < COLUMNS; c0 += BLOCK) {
            float sum[SPLIT][BLOCK][TILES][4] = {};
            auto open = [&](int s, int c, int t) { return SPAN == 128 ? sum[s][c][t] : acc[t][c0 + c]; };
#pragma unroll
            for (int j = 0; j < PASS; ++j) {
                uint4 b[BLOCK];  // of eight tokens: k 0..7 of word `first + j`
#pragma unroll
                for (int c = 0; c < BLOCK; ++c)
                    b[c] = *reinterpret_cast<const uint4 *>(
                        ((first + j) % 2 ? x_odd : x) + (c0 + c) * 8 * 256 + (first + j) / 2 * 128);
#pragma unroll
                for (int c = 0; c < BLOCK; ++c)
#pragma unroll
                    for (int t = 0; t < TILES; ++t) mma_16x8x16(open(0, c, t), a[t][2 * j], b[c].x, b[c].y);
#pragma unroll
                for (int c = 0; c < BLOCK; ++c)
#pragma unroll
                    for (int t = 0; t < TILES; ++t) mma_16x8x16(open(SPLIT - 1, c, t), a[t][2 * j + 1], b[c].z, b[c].w);
            }
            if constexpr (SPAN == 128)
#pragma unroll
                for (int c = 0; c < BLOCK; ++c)
#pragma unroll
                    for (int t = 0; t < TILES; ++t)
#pragma unroll
                        for (int e = 0; e < 4; ++e) {
                            const float both = SPLIT == 1 ? sum[0][c][t][e] : sum[0][c][t][e] + sum[SPLIT - 1][c][t][e];
                            acc[t][c0 + c][e] += scale[t][e / 2] * both;
                        }
        }
    }
}

// Copy [tokens][k_begin .. k_begin + 128 * chunks) of x into the order that multiply_chunk reads; zeros past K. 16
// threads take a chunk of a token, 16 bytes each; piece p begins at k = 8p.
__device__ __forceinline__ void stage_x(
    unsigned char *to, u32 chunk_bytes, const u16 *x, long long row_stride, int tokens, int k_begin, int chunks,
    int K) {
    constexpr int BATCH = 8;  // loads on their way per thread
    const u32 piece = threadIdx.x % 16;
    const u32 quad = piece / 4, word = piece % 4;
    int token = 0, chunk = threadIdx.x / 16;
    auto carry = [&] {
        for (; chunk >= chunks && token < tokens; chunk -= chunks) ++token;
    };
    carry();
    while (token < tokens) {
        uint4 v[BATCH];
        unsigned char *place[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            place[i] = nullptr;
            if (token < tokens) {
                const int k = k_begin + chunk * CHUNK + 8 * piece;
                v[i] = load_16_bytes(x + token * row_stride + k, k < K);
                place[i] = to + chunk * chunk_bytes + token * 256 + (word ^ (token & 1)) * 64 + quad * 16;
                chunk += THREADS / 16;
                carry();
            }
        }
#pragma unroll
        for (int i = 0; i < BATCH; ++i)
            if (place[i]) *reinterpret_cast<uint4 *>(place[i]) = v[i];
    }
}

extern "C" __global__ void
#if CLUSTER > 1
__cluster_dims__(CLUSTER, 1, 1)
#endif
__launch_bounds__(THREADS, MIN_BLOCKS)
w4a16_skinny(
    const u16 *x,               // [M, K]
    const u32 *qweight,         // [N, ceil(K / 8)], k8x
    const u16 *scales,          // [N, num_groups]
#if ZEROS
    const u16 *zero_points,     // [N, num_groups]
#endif
    const u16 *bias,            // [N] or null
    u16 *out,                   // [M, N]
    int M, int N, int K,
    int group_size,             // K where one group is all of K
    long long x_row_stride, long long qweight_row_stride, long long scales_row_stride, long long out_row_stride) {
    const int row = threadIdx.x % 32 / 4, quad = threadIdx.x % 4;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // the same in all lanes, which the compiler cannot see
    const int warp_k = warp % WARPS_K, warp_n = warp / WARPS_K;
    const int m0 = blockIdx.y * TOKENS;
    const int tokens = min(M - m0, TOKENS);
    int rank = 0;
#if CLUSTER > 1
    rank = cluster_rank();
    // "I have started, and my buffer is free": waited for before the first store to a peer.
    cluster_arrive_without_stores();
#endif

    Weight w;
    w.words = qweight;
    w.scales = scales;
    w.zeros_from_scales = 0;
#if ZEROS
    w.zeros_from_scales = zero_points - scales;
#endif
    w.word_stride = u32(qweight_row_stride);  // strides of a weight fit 32 bits
    w.scale_stride = u32(scales_row_stride);
    w.N = N;
    w.K = K;
    if (SPAN == 128)
        w.groups = group_size >= K ? 31 : __ffs(group_size / CHUNK) - 1;
    else
        w.groups = group_size >= K ? 0 : (1u << 31) / u32(group_size / 32) + 1;

    // K in chunks: first over the cluster, one slice a block, then over the warps in turn.
    const int chunks = (K + CHUNK - 1) / CHUNK;
    const int slice_begin = chunks * rank / CLUSTER, slice_end = chunks * (rank + 1) / CLUSTER;
    const int first_chunk = slice_begin + warp_k;

    const u32 chunk_bytes = 256 * (COLUMNS == 1 ? tokens : TOKENS);
    unsigned char *ring = dynamic_shared_memory() + warp * (DEPTH * SLOT_BYTES);
    float *sums = reinterpret_cast<float *>(dynamic_shared_memory() + WARPS_N * WARPS_K * DEPTH * SLOT_BYTES);
    unsigned char *x_shared = reinterpret_cast<unsigned char *>(sums + BUFFERS * SUMS);
    // Columns of tokens that are not there repeat another's or hold anything: no column reaches another's result.
    const int token = COLUMNS == 1 ? min(row, tokens - 1) : row;
    const u32 x_lane = token * 256 + (token & 1) * 64 + quad * 16;

    const int tiles = (N + ROWS - 1) / ROWS;
    const int tile_stride = gridDim.x / CLUSTER;
    const int first_tile = blockIdx.x / CLUSTER;

    // The copying side runs DEPTH - 1 chunks ahead of the multiplying one, over the ends of tiles.
    int copied_tile = first_chunk < slice_end ? first_tile : tiles, copied_chunk = first_chunk;
    Source source = source_of(w, copied_tile * ROWS + warp_n * WARP_ROWS);
    auto copy_next = [&](u32 slot) {
        if (copied_tile < tiles) {
            copy_chunk(slot, source, w, copied_chunk);
            copied_chunk += WARPS_K;
            if (copied_chunk >= slice_end) {
                copied_chunk = first_chunk;
                copied_tile += tile_stride;
                source = source_of(w, copied_tile * ROWS + warp_n * WARP_ROWS);
            }
        }
        close_copies();
    };
#pragma unroll
    for (int d = 0; d < DEPTH - 1; ++d) copy_next(shared_address(ring) + d * SLOT_BYTES);

    // Early start: all above may run while the kernel ahead in the stream still does. It wrote no weights (the launcher
    // sees to that), but maybe x, and it may still read or write out.
    wait_for_previous_kernel();
    let_next_kernel_start();
    stage_x(x_shared, chunk_bytes, x + m0 * x_row_stride, x_row_stride, tokens, slice_begin * CHUNK,
            slice_end - slice_begin, K);
    __syncthreads();

    u32 read_at = 0, write_at = (DEPTH - 1) * SLOT_BYTES;
    float *turn_sums = sums;
#pragma unroll 1
    for (int tile = first_tile; tile < tiles; tile += tile_stride) {
        // The output feature that this thread adds up and writes; its bias is fetched now.
        const int own = tile * ROWS + rank * OWN_ROWS + threadIdx.x % OWN_ROWS;
        u32 own_bias = 0;  // zero in both dtypes
        load_half(own_bias, bias + own, bias != nullptr && own < N);

        // Strides of 8 rows are even: all rows of a lane have one parity.
        const u32 first_scale = u32(u64(scales) / 2) + (tile * ROWS + warp_n * WARP_ROWS + row) * w.scale_stride;
        const u32 parity = (first_scale & 1) | ((first_scale + u32(w.zeros_from_scales)) & 1) << 1;
        float acc[TILES][COLUMNS][4] = {};
#pragma unroll 1
        for (int chunk = first_chunk; chunk < slice_end; chunk += WARPS_K) {
            wait_for_copies<DEPTH - 2>();
            __syncwarp();  // what other lanes copied is seen, and what they read before is read
            copy_next(shared_address(ring) + write_at);
            write_at = read_at;
            const u32 x_at = (chunk - slice_begin) * chunk_bytes + x_lane;
            multiply_chunk(acc, ring + read_at, x_shared + x_at, x_shared + (x_at ^ 64), w, chunk, parity);
            read_at = read_at == (DEPTH - 1) * SLOT_BYTES ? 0 : read_at + SLOT_BYTES;
        }

        // Each warp stores its sums where they are added up: in this block, or in the one that owns the row.
#if CLUSTER > 1
        if (tile == first_tile) cluster_wait();
#endif
#pragma unroll
        for (int t = 0; t < TILES; ++t)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int r = warp_n * WARP_ROWS + 16 * t + 8 * h + row;
                u32 to = shared_address(turn_sums);
#if CLUSTER > 1
                to = map_to_rank(to, r / OWN_ROWS);
#endif
                to += 4 * (((rank * WARPS_K + warp_k) * TOKENS + 2 * quad) * PITCH + r % OWN_ROWS);
#pragma unroll
                for (int c = 0; c < COLUMNS; ++c)
#pragma unroll
                    for (int e = 0; e < 2; ++e)
                        if (8 * c + 2 * quad + e < tokens)
                            store_float(to + 4 * (8 * c + e) * PITCH, acc[t][c][2 * h + e]);
            }
        cluster_barrier();

        // Add in the order of the sources: the same bits on every run. One rounding, after the bias.
        if (own < N) {
#pragma unroll 1
            for (int t = threadIdx.x / OWN_ROWS; t < tokens; t += THREADS / OWN_ROWS) {
                const float *from = turn_sums + t * PITCH + threadIdx.x % OWN_ROWS;
                float sum = 0;
#pragma unroll
                for (int i = 0; i < SOURCES; ++i) sum += from[i * TOKENS * PITCH];
                out[(m0 + t) * out_row_stride + own] = from_float(sum + to_float(own_bias));
            }
        }
        if (BUFFERS == 2)
            turn_sums = turn_sums == sums ? sums + SUMS : sums;  // who stores there next has passed the next barrier
        else if (tile + tile_stride < tiles)
            cluster_barrier();
    }
}
