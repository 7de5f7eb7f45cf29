// W4A16 GEMM for few tokens, sm80 and later: out[M,N] = x[M,K] @ ((Q - Z) * S)[N,K]^T + bias
//   x, out  fp16 or bf16, row-major, rows strided        Q  4 bits, layout k8x (k8x_mma.h), rows padded to 16 bytes
//   S       dtype of x [N, num_groups]                   Z  like S, any real value; without ZEROS it is 8
// Grid (CLUSTER * min(ceil(N / ROWS), clusters at once), ceil(M / TOKENS)), ROWS = 16 * TILES * WARPS_N;
// block 32 * WARPS_N * WARPS_K threads; shared memory, dynamic, in bytes:
//   256 * ceil(ceil(K / 128) / CLUSTER) * (TOKENS == 8 ? min(M, 8) : TOKENS)            the activations of one slice of K
//   + 4 * CLUSTER * WARPS_K * TOKENS * (ROWS / CLUSTER + 4)                             the sums of all warps
// Needs K % 32 == 0, so that no 16-byte load of weights passes the end of a row, 16-byte aligned x and Q, and groups that
// a span of SPAN k never straddles.
//
// Weights are operand A of mma.m16n8k16 and tokens operand B: 16 output features are as many as one mma takes, 8 tokens
// as few. The order of k inside a sum is free as long as both operands agree, and k8x lets a lane feed itself: its
// 16-byte load is 32 neighbours in k of one row, already in the pairs that the mma wants. So weights go from device
// memory to registers to tensor cores; nothing of them is staged, shuffled or waited for by other lanes.
//
// What binds, for 2048 weights (16 rows of 128 k, a "unit" of one warp), H200 at 1.8 GHz:
//   memory   1056 bytes with a scale per 128 at 4.3 TB/s are 0.25 ns of the chip: 233 cycles of one of its 528 schedulers
//   issue    as disassembled: 143 instructions at M = 8 with one tile a warp, 123 with two, 256 at M = 64. Of these 72
//            unpack (8 words a lane: 4 LOP3, 4 HADD2 or HFMA2, 1 shift; bfloat16 88, with zero points 104 and 120), 8 mma
//            per 8 tokens, 4 / TILES loads of x and 4 FFMA per 8 tokens, 4 loads of weights and scales.
//   mma      8 per 8 tokens; at 8 cycles each the tensor core takes 64 cycles at M = 8, 256 at M = 32, 512 at M = 64
// So memory binds up to M = 16, if enough loads are in flight and other warps issue while one waits; the tensor core from
// M = 32. In layers that are read in a few us, starting binds as well: code is fetched cold, so it is kept short.
#include "k8x_mma.h"
#include "ptx.h"

constexpr int CHUNK = 128;                     // k per step of a warp: four lanes of 32
constexpr int WORDS = SPAN / 32;               // of a row per load; a span of k is one load of four lanes, in one group
constexpr int SPANS = CHUNK / SPAN;
constexpr int THREADS = 32 * WARPS_N * WARPS_K;
constexpr int ROWS = 16 * TILES * WARPS_N;     // output features per block and turn
constexpr int OWN_ROWS = ROWS / CLUSTER;       // of which this block writes
constexpr int PITCH = OWN_ROWS + 4;            // floats; 2 * PITCH % 32 == 8 spreads the sums of a warp over all banks
constexpr int SOURCES = CLUSTER * WARPS_K;     // sums per output
constexpr int COLUMNS = TOKENS / 8;            // n-tiles of the mma

// A dependent mma waits about 33 cycles, an independent one 8: at least four sums should be open at a time. Many columns
// give them by themselves; few columns get a second accumulator for every other mma. Where the 32 registers a tile of an
// unpacked chunk would not fit beside the sums (ptxas spills), half a chunk is unpacked at a time.
constexpr int BLOCK = COLUMNS % 4 == 0 ? 4 : COLUMNS % 3 == 0 ? 3 : COLUMNS;
constexpr int PASS = WORDS > 2 && TILES * COLUMNS > (BF16 || ZEROS ? 1 : 4) ? 2 : WORDS;
constexpr int SPLIT = BLOCK * TILES < 4 && PASS > 1 ? 2 : 1;

static_assert(TOKENS % 8 == 0 && ROWS % CLUSTER == 0 && THREADS % OWN_ROWS == 0 && THREADS % 64 == 0);
static_assert(SPAN == 128 || SPAN == 64 || SPAN == 32);

// What a lane holds of a chunk: the words of its rows `row` and `row + 8` in each tile, with their scales. For SPAN 64
// and 32 a lane loads the scale of one span only, and the four lanes of a row pass them on.
struct Weights {
    u32 word[TILES][2][4];
    u32 scale[TILES][2];
#if ZEROS
    u32 zero[TILES][2];
#endif
};

// Where the rows of a lane start.
struct Rows {
    const u32 *weights[TILES][2];
    const u16 *scales[TILES][2];
};

// Issue the loads of one chunk; nothing waits for them here.
__device__ __forceinline__ void load_chunk(
    Weights &w, const Rows &rows, int chunk, int slice_end, int K, u32 groups, long long zeros_from_scales) {
    const int quad = threadIdx.x % 4;
    const int k0 = chunk * CHUNK;
    const int limit = chunk < slice_end ? K : 0;
    // `groups` is log2 of the chunks in a group, or 2^31 / (group_size / 32) rounded up for groups in units of 32.
    const int k_scale = k0 + (32 * quad & ~(SPAN - 1));
    const int group = SPAN == 128 ? chunk >> groups : int((u64(u32(k_scale) / 32) * groups) >> 31);
#pragma unroll
    for (int t = 0; t < TILES; ++t)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
            for (int s = 0; s < SPANS; ++s)
                load_words<WORDS>(
                    &w.word[t][h][s * WORDS], rows.weights[t][h] + (k0 + s * SPAN) / 8,
                    k0 + s * SPAN + 8 * WORDS * quad < limit);
            load_half(w.scale[t][h], rows.scales[t][h] + group, k_scale < limit);
#if ZEROS
            load_half(w.zero[t][h], rows.scales[t][h] + zeros_from_scales + group, k_scale < limit);
#endif
        }
}

// The value that the lane of the same row loaded for span `s`.
__device__ __forceinline__ u32 of_span(u32 v, int s) {
    if constexpr (SPANS == 1) return v;
    return __shfl_sync(~0u, v, (threadIdx.x & 28) | (s * WORDS));
}

// acc += scale * (weights of the chunk * x of the chunk). `x` is the lane's place in the chunk in shared memory: 256 bytes
// a token, in which word j of the lane with this quad lies at 64 * j + 16 * quad, and 64 * (j ^ 1) + 16 * quad for odd
// tokens: eight lanes, two tokens of four quads, then read 128 bytes from all banks.
__device__ __forceinline__ void multiply_chunk(float acc[TILES][COLUMNS][4], const Weights &w, const unsigned char *x,
                                               const unsigned char *x_odd) {
#pragma unroll
    for (int first = 0; first < 4; first += PASS) {
        u32 a[TILES][2 * PASS][4];
        float scale[TILES][2];
#pragma unroll
        for (int t = 0; t < TILES; ++t)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                scale[t][h] = to_float(of_span(w.scale[t][h], first / WORDS));
#if ZEROS
                const u32 zero = of_span(w.zero[t][h], first / WORDS);
                const u32 minus_zero = negate2(zero | zero << 16);
#endif
#pragma unroll
                for (int j = 0; j < PASS; ++j) {
                    u32 pair[4];
#if ZEROS
                    unpack(w.word[t][h][first + j], minus_zero, pair);
#else
                    unpack(w.word[t][h][first + j], pair);
#endif
                    a[t][2 * j][h] = pair[0];
                    a[t][2 * j][2 + h] = pair[1];
                    a[t][2 * j + 1][h] = pair[2];
                    a[t][2 * j + 1][2 + h] = pair[3];
                }
            }
#pragma unroll
        for (int c0 = 0; c0 < COLUMNS; c0 += BLOCK) {
            float sum[SPLIT][BLOCK][TILES][4] = {};
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
                    for (int t = 0; t < TILES; ++t) mma_16x8x16(sum[0][c][t], a[t][2 * j], b[c].x, b[c].y);
#pragma unroll
                for (int c = 0; c < BLOCK; ++c)
#pragma unroll
                    for (int t = 0; t < TILES; ++t) mma_16x8x16(sum[SPLIT - 1][c][t], a[t][2 * j + 1], b[c].z, b[c].w);
            }
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

// Copy the block's slice of x, [tokens][k_begin .. k_begin + 128 * chunks), into the order that multiply_chunk reads.
// 64 threads walk along a token; 16-byte piece p of it is k = 8p.
__device__ __forceinline__ void stage_x(
    u32 to, u32 chunk_bytes, const u16 *x, long long row_stride, int tokens, int k_begin, int chunks, int K) {
    const u32 piece = threadIdx.x % 16;  // in its chunk; the same in every turn
    const u32 in_span = piece % (SPAN / 8);
    const u32 quad = in_span / WORDS, word = piece / (SPAN / 8) * WORDS + in_span % WORDS;
    for (int token = threadIdx.x / 64; token < tokens; token += THREADS / 64) {
        const u32 place = to + token * 256 + (word ^ (token & 1)) * 64 + quad * 16;
        const u16 *from = x + token * row_stride;
#pragma unroll 2
        for (int chunk = threadIdx.x % 64 / 16; chunk < chunks; chunk += 4) {
            const int k = k_begin + chunk * CHUNK + 8 * piece;
            copy_16_bytes_async(place + chunk * chunk_bytes, from + (k < K ? k : 0), k < K);
        }
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
    cluster_arrive_without_stores();  // "I have started, and my buffer is free": waited for before the first store to a peer
#endif

    // K in chunks: first over the cluster, one slice a block, then over the warps in turn.
    const int chunks = (K + CHUNK - 1) / CHUNK;
    const int slice_begin = chunks * rank / CLUSTER, slice_end = chunks * (rank + 1) / CLUSTER;
    const int first_chunk = slice_begin + warp_k;
    u32 groups;
    if (SPAN == 128)
        groups = group_size >= K ? 31 : __ffs(group_size / CHUNK) - 1;
    else
        groups = group_size >= K ? 0 : (1u << 31) / u32(group_size / 32) + 1;
    long long zeros_from_scales = 0;
#if ZEROS
    zeros_from_scales = zero_points - scales;
#endif

    const u32 chunk_bytes = 256 * (COLUMNS == 1 ? tokens : TOKENS);
    unsigned char *x_shared = dynamic_shared_memory();
    float *sums = reinterpret_cast<float *>(x_shared + (chunks + CLUSTER - 1) / CLUSTER * chunk_bytes);
    // Columns of tokens that are not there repeat another's or hold anything: no column reaches another's result.
    const int token = COLUMNS == 1 ? min(row, tokens - 1) : row;
    const u32 x_lane = token * 256 + (token & 1) * 64 + quad * 16;

    const int tiles = (N + ROWS - 1) / ROWS;
    const int tile_stride = gridDim.x / CLUSTER;
    const int first_tile = blockIdx.x / CLUSTER;
#pragma unroll 1
    for (int tile = first_tile; tile < tiles; tile += tile_stride) {
        Rows rows;
#pragma unroll
        for (int t = 0; t < TILES; ++t)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                // Past N the last row is read again and dropped when written. Strides of a weight fit 32 bits.
                const u32 n = min(tile * ROWS + (warp_n * TILES + t) * 16 + 8 * h + row, N - 1);
                rows.weights[t][h] = qweight + u64(n) * u32(qweight_row_stride) + WORDS * quad;
                rows.scales[t][h] = scales + u64(n) * u32(scales_row_stride);
            }

        // DEPTH chunks are on their way at any time: a ring of registers, each place at a fixed unrolled position.
        Weights ring[DEPTH];
#pragma unroll
        for (int d = 0; d < DEPTH; ++d) {
#pragma unroll
            for (int t = 0; t < TILES; ++t)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    // Not loaded means not past K, where x is zero: any word will do, a scale must be finite.
#pragma unroll
                    for (int j = 0; j < 4; ++j) asm volatile("" : "=r"(ring[d].word[t][h][j]));
                    ring[d].scale[t][h] = 0;
#if ZEROS
                    ring[d].zero[t][h] = 0;
#endif
                }
            load_chunk(ring[d], rows, first_chunk + d * WARPS_K, slice_end, K, groups, zeros_from_scales);
        }

        // The output feature that this thread adds up and writes; its bias is fetched now.
        const int own = tile * ROWS + rank * OWN_ROWS + threadIdx.x % OWN_ROWS;
        u32 own_bias = 0;  // zero in both dtypes
        load_half(own_bias, bias + own, bias != nullptr && own < N);

        if (tile == first_tile) {
            stage_x(shared_address(x_shared), chunk_bytes, x + m0 * x_row_stride, x_row_stride, tokens,
                    slice_begin * CHUNK, slice_end - slice_begin, K);
            wait_for_copies();
            __syncthreads();
        }

        float acc[TILES][COLUMNS][4] = {};
#pragma unroll 1
        for (int chunk0 = first_chunk; chunk0 < slice_end; chunk0 += DEPTH * WARPS_K) {
#pragma unroll
            for (int d = 0; d < DEPTH; ++d) {
                const int chunk = chunk0 + d * WARPS_K;
                if (chunk < slice_end) {
                    const u32 at = (chunk - slice_begin) * chunk_bytes + x_lane;
                    multiply_chunk(acc, ring[d], x_shared + at, x_shared + (at ^ 64));
                    load_chunk(ring[d], rows, chunk + DEPTH * WARPS_K, slice_end, K, groups, zeros_from_scales);
                }
            }
        }

        // Each warp stores its sums where they are added up: in this block, or in the one that owns the row.
        const int source = rank * WARPS_K + warp_k;
#if CLUSTER > 1
        cluster_wait();
#endif
#pragma unroll
        for (int t = 0; t < TILES; ++t)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int r = (warp_n * TILES + t) * 16 + 8 * h + row;
                u32 to = shared_address(sums);
#if CLUSTER > 1
                to = map_to_rank(to, r / OWN_ROWS);
#endif
                to += 4 * ((source * TOKENS + 2 * quad) * PITCH + r % OWN_ROWS);
#pragma unroll
                for (int c = 0; c < COLUMNS; ++c)
#pragma unroll
                    for (int e = 0; e < 2; ++e)
                        if (8 * c + 2 * quad + e < tokens)
                            store_float(to + 4 * (8 * c + e) * PITCH, acc[t][c][2 * h + e]);
            }
#if CLUSTER > 1
        cluster_arrive();
        cluster_wait();
#else
        __syncthreads();
#endif

        // Add in the order of the sources: the same bits on every run. One rounding, after the bias.
        if (own < N) {
#pragma unroll 1
            for (int t = threadIdx.x / OWN_ROWS; t < tokens; t += THREADS / OWN_ROWS) {
                const float *from = sums + t * PITCH + threadIdx.x % OWN_ROWS;
                float sum = 0;
#pragma unroll
                for (int i = 0; i < SOURCES; ++i) sum += from[i * TOKENS * PITCH];
                out[(m0 + t) * out_row_stride + own] = from_float(sum + to_float(own_bias));
            }
        }
        if (tile + tile_stride < tiles) {
#if CLUSTER > 1
            cluster_arrive();
#else
            __syncthreads();
#endif
        }
    }
}
