// W4A16 GEMM for few tokens, sm80 and later: out[M,N] = x[M,K] @ ((Q - Z) * S)[N,K]^T + bias
//   x, out  fp16 or bf16, row-major, rows strided        Q  4 bits, layout k8x (k8x_mma.h), rows padded to 16 bytes
//   S       dtype of x [N, num_groups]                   Z  like S, any real value; without ZEROS it is 8
// Grid (CLUSTER * min(ceil(N / ROWS), clusters at once), ceil(M / TOKENS)), ROWS = 16 * TILES * WARPS_N;
// block 32 * WARPS_N * WARPS_K threads; shared memory, dynamic, in bytes:
//   WARPS_N * WARPS_K * DEPTH * SLOT_BYTES                                        a ring of weights per warp
//   + 4 * BUFFERS * CLUSTER * WARPS_K * TOKENS * (ROWS / CLUSTER + 4)             the sums of all warps
//   + 256 * CHUNKS * ceil(ceil(K / UNIT) / CLUSTER) * (TOKENS == 8 ? min(M, 8) : TOKENS)     x, one slice of K
// Needs K % 32 == 0, so that no 16-byte copy of weights passes the end of a row, K < 2^20, 16-byte aligned x and Q, and
// one group or groups of a multiple of SPAN.
//
// Weights are operand A of mma.m16n8k16 and tokens operand B: 16 output features are as many as one mma takes, 8 tokens
// as few. ldmatrix hands 32 neighbours in k of a row to four lanes, a word of k8x each, already in the pairs that the
// mma wants; the order of k inside a sum is free as long as both operands agree. So unpacking needs no shuffle, and a
// product of four lanes stays within 32 k: each scale is applied to the float32 sum of its SPAN.
//
// What binds at M <= 8 is memory, if three things are seen to (figures: NVIDIA H200, K 4096, N 28672, M 8, 20 us):
//   - Weights are on their way all the time. Each warp copies its own, DEPTH - 1 units ahead and over the end of a
//     tile of rows, into a ring that no other warp reads: no barrier.
//   - x reaches shared memory through registers. cp.async to a place of its own for each 16 bytes took 9 us more.
//   - The next kernel starts while this one ends (sm90, "early start" below): 1.5 us.
// 2048 weights (16 rows of 128 k) may take 233 cycles of one of 528 schedulers. The loop, as disassembled for sm90, in
// both dtypes, with two tiles a warp, units of two chunks and scales in one piece, has 109 instructions for them: 72 to
// unpack, 8 mma. For groups of 64 it has 115, of 32 128; with zero points, whole or not, 117, 125 and 143.
constexpr int CHUNK = 128;                     // k per step of a warp
constexpr int UNIT = CHUNK * CHUNKS;           // k per copy of a warp
constexpr int UNIT_STRIDE = WARPS_K;
constexpr int SPANS = CHUNK / SPAN;            // scales of a row per chunk
constexpr int SPAN_WORDS = 4 / SPANS;          // that a lane has of a row
constexpr int THREADS = 32 * WARPS_N * WARPS_K;
constexpr int WARP_ROWS = 16 * TILES;
constexpr int ROWS = WARP_ROWS * WARPS_N;      // output features per block and turn
constexpr int OWN_ROWS = ROWS / CLUSTER;       // of which this block writes
constexpr int PITCH = OWN_ROWS + 4;            // floats; 2 * PITCH % 32 is 8 or 24: the sums of a warp lie in all banks
constexpr int SOURCES = CLUSTER * WARPS_K;     // sums per output
constexpr int SUMS = SOURCES * TOKENS * PITCH;
constexpr int BUFFERS = TOKENS == 8 ? 2 : 1;   // of sums: with two, a turn ends with one barrier
constexpr int COLUMNS = TOKENS / 8;            // n-tiles of the mma

#include "k8x_mma.h"
#include "weight_ring.h"

static_assert(TOKENS % 8 == 0 && ROWS % CLUSTER == 0 && THREADS % OWN_ROWS == 0 && DEPTH >= 2);

// A lane's place in a chunk of x: 256 bytes a token, in which k 32j .. 32j + 31 lie at 64 * j, for odd tokens at
// 64 * (j ^ 1): eight lanes, two tokens of four quads, then read 128 bytes from all banks.
struct Activations {
    const unsigned char *even, *odd;  // for even and odd j

    // Of eight tokens: k 32j + 8 * quad and the seven after it.
    __device__ __forceinline__ uint4 load(int j, int column) const {
        return *reinterpret_cast<const uint4 *>((j % 2 ? odd : even) + column * 8 * 256 + j / 2 * 128);
    }
};

// Scales, and minus zero points as unpack() takes them, of a unit in the rows that a lane has; two spans a word.
struct Factors {
    u32 scales[LANE_ROWS][SPAN_PAIRS], minuses[LANE_ROWS][SPAN_PAIRS];

    __device__ __forceinline__ float scale(int i, int span) const { return to_float(twice_of_span(scales[i], span)); }
    __device__ __forceinline__ u32 minus(int i, int span) const {
        return ZEROS ? twice_of_span(minuses[i], span) : MINUS_8;
    }
};

// A unit, as one lane sees it.
struct Unit {
    LaneScales scales;
    u32 read_place;  // where ldmatrix wants the lane in a slot
    const unsigned char *x_shared;
    u32 x_at, chunk_bytes;  // the lane's place in x for the first chunk, and how far on the next is

    __device__ __forceinline__ Activations activations(int part) const {
        const u32 at = x_at + part * chunk_bytes;
        return {x_shared + at, x_shared + (at ^ 64)};
    }

    __device__ __forceinline__ void load_words(u32 words[TILES][2][4], int part) const {
#pragma unroll
        for (int t = 0; t < TILES; ++t)
#pragma unroll
            for (int h = 0; h < 2; ++h)
                load_matrices(words[t][h], scales.slot + (read_place ^ 64 * part) + (16 * t + 8 * h) * LINE);
    }
};

// acc, in units of WEIGHT_UNIT, += scale * ((weights - zero point) * x) of one span, number `span` of its unit; `words`
// and `x` are those of its chunk.
__device__ __forceinline__ void multiply_span(
    float acc[TILES][COLUMNS][4], const u32 words[TILES][2][4], const Factors &f, int span, const Activations &x) {
    const int first = span % SPANS * SPAN_WORDS;
    float sum[TILES][COLUMNS][4] = {};
#pragma unroll
    for (int j = first; j < first + SPAN_WORDS; ++j) {
        u32 a[TILES][2][4];
#pragma unroll
        for (int t = 0; t < TILES; ++t)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                u32 pair[4];
                unpack(words[t][h][j], f.minus(2 * t + h, span), pair);
#pragma unroll
                for (int p = 0; p < 4; ++p) a[t][p / 2][2 * (p % 2) + h] = pair[p];
            }
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
            const uint4 b = x.load(j, c);
#pragma unroll
            for (int t = 0; t < TILES; ++t) mma_16x8x16(sum[t][c], a[t][0], b.x, b.y);
#pragma unroll
            for (int t = 0; t < TILES; ++t) mma_16x8x16(sum[t][c], a[t][1], b.z, b.w);
        }
    }
#pragma unroll
    for (int t = 0; t < TILES; ++t)
#pragma unroll
        for (int e = 0; e < 4; ++e)
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) acc[t][c][e] += f.scale(2 * t + e / 2, span) * sum[t][c][e];
}

// What minus_zero_points() loses, zero or not: the magnitudes of two numbers.
constexpr u32 MAGNITUDES = 0x7FFF7FFF;

// Whether the warp has lost anything in a unit; `lost` has two spans a word.
__device__ __forceinline__ bool anything_lost(const u32 lost[SPAN_PAIRS]) {
    u32 all = 0;
#pragma unroll
    for (int p = 0; p < SPAN_PAIRS; ++p) all |= lost[p];
    return __any_sync(~0u, all & MAGNITUDES);
}
// A bit for each span of the unit in which the warp has.
__device__ __forceinline__ u32 lost_spans(const u32 lost[SPAN_PAIRS]) {
    u32 spans = 0;
#pragma unroll
    for (int span = 0; span < UNIT_SPANS; ++span)
        if (lost[span / 2] & MAGNITUDES & 0xFFFFu << 16 * (span % 2)) spans |= 1 << span;
    return __reduce_or_sync(~0u, spans);
}

// acc, in units of WEIGHT_UNIT, -= scale * lost * (sum of x), in one span of a unit.
__device__ __forceinline__ void subtract_lost(
    float acc[TILES][COLUMNS][4], const Unit &unit, const Weight &w, int span) {
    const Activations x = unit.activations(span / SPANS);
    float x_sum[COLUMNS][4] = {};  // of a column's token, the same in all four rows
#pragma unroll
    for (int j = 0; j < SPAN_WORDS; ++j)
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
            const u32 ones[4] = {ONE, ONE, ONE, ONE};
            const uint4 b = x.load(span % SPANS * SPAN_WORDS + j, c);
            mma_16x8x16(x_sum[c], ones, b.x, b.y);
            mma_16x8x16(x_sum[c], ones, b.z, b.w);
        }
#pragma unroll
    for (int i = 0; i < LANE_ROWS; ++i) {
        u32 lost;
        minus_zero_points(load_scale(unit.scales, w, ZERO_POINT, 8 * i, span), lost);
        const float scale = to_float(load_scale(unit.scales, w, SCALE, 8 * i, span));
        // In the order in which they neither vanish nor overflow, for bfloat16 loses as little as 2^-133.
        const bool enlarges = scale * scale > 1;
        const float of_weight = to_float(lost) / WEIGHT_UNIT * (enlarges ? scale : 1), of_x = enlarges ? 1 : scale;
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c)
#pragma unroll
            for (int e = 0; e < 2; ++e)
                if (lost & MAGNITUDES)  // an infinite x times 0 would be NaN
                    acc[i / 2][c][2 * (i % 2) + e] -= of_weight * (of_x * x_sum[c][e]);
    }
}

// acc, in units of WEIGHT_UNIT, += the products of a unit.
__device__ __forceinline__ void multiply_unit(float acc[TILES][COLUMNS][4], const Unit &unit, const Weight &w) {
    u32 words[TILES][2][4];
    unit.load_words(words, 0);
    Factors f;
    load_scales(f.scales, unit.scales, w, SCALE);
    u32 lost[SPAN_PAIRS] = {};
    if (ZEROS) {
        load_scales(f.minuses, unit.scales, w, ZERO_POINT);
#pragma unroll
        for (int i = 0; i < LANE_ROWS; ++i)
#pragma unroll
            for (int p = 0; p < SPAN_PAIRS; ++p) {
                u32 of_pair;
                f.minuses[i][p] = minus_zero_points(f.minuses[i][p], of_pair);
                lost[p] |= of_pair;
            }
    }
#pragma unroll
    for (int part = 0; part < CHUNKS; ++part) {
        if (part > 0) unit.load_words(words, part);
#pragma unroll
        for (int i = 0; i < SPANS; ++i) multiply_span(acc, words, f, part * SPANS + i, unit.activations(part));
    }
    // Rare, but for zero points spread evenly over 0..15: one of 500 is that small for float16, which makes one unit of
    // 8, or, with groups of 32, two of 5. To look in which spans gains 8 % there.
    if (ZEROS && anything_lost(lost)) {
        u32 spans = lost_spans(lost);
#pragma unroll 1
        for (int span = 0; span < UNIT_SPANS; ++span, spans >>= 1)
            if (spans & 1) subtract_lost(acc, unit, w, span);
    }
}

// Copy [tokens][k_begin .. k_begin + 128 * chunks) of x into the order that Activations reads; zeros past K. 16 threads
// take a chunk of a token, 16 bytes each; piece p begins at k = 8p.
__device__ __forceinline__ void stage_x(
    unsigned char *to, u32 chunk_bytes, const u16 *x, long long row_stride, int tokens, int k_begin, int chunks,
    int K) {
    constexpr int BATCH = 8;  // loads on their way per thread
    const u32 piece = threadIdx.x % 16;
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
                place[i] = to + chunk * chunk_bytes + token * 256 + (piece ^ (token & 1) << 2) * 16;
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
    const u32 lane = lane_id();
    const int row = lane / 4, quad = lane % 4;
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

#if !ZEROS
    const u16 *zero_points = nullptr;
#endif
    const Weight w =
        make_weight(qweight, scales, zero_points, qweight_row_stride, scales_row_stride, N, K, group_size);

    // K in units: first over the cluster, one slice a block, then over the warps in turn.
    const int units = (K + UNIT - 1) / UNIT;
    const int slice_begin = units * rank / CLUSTER, slice_end = units * (rank + 1) / CLUSTER;

    const u32 chunk_bytes = 256 * (COLUMNS == 1 ? tokens : TOKENS);
    unsigned char *ring = dynamic_shared_memory() + warp * (DEPTH * SLOT_BYTES);
    float *sums = reinterpret_cast<float *>(dynamic_shared_memory() + WARPS_N * WARPS_K * DEPTH * SLOT_BYTES);
    unsigned char *x_shared = reinterpret_cast<unsigned char *>(sums + BUFFERS * SUMS);
    // Columns of tokens that are not there repeat another's or hold anything: no column reaches another's result.
    const int token = COLUMNS == 1 ? min(row, tokens - 1) : row;
    const u32 x_lane = token * 256 + (token & 1) * 64 + quad * 16;

    const Tiles tiles = {int(blockIdx.x) / CLUSTER, (N + ROWS - 1) / ROWS, int(gridDim.x) / CLUSTER};
    const Walk walk = {tiles, slice_begin + warp_k, slice_end, warp_n * WARP_ROWS};
    Copier copier(w, walk);
#pragma unroll
    for (int d = 0; d < DEPTH - 1; ++d) copier.copy_next(shared_address(ring) + d * SLOT_BYTES);

    // Early start: all above may run while the kernel ahead in the stream still does. It writes no weights, which
    // docs/deployment.md forbids in graphs, where alone the launcher allows this; but maybe x, and it may still read or
    // write out.
    wait_for_previous_kernel();
    let_next_kernel_start();
    stage_x(x_shared, chunk_bytes, x + m0 * x_row_stride, x_row_stride, tokens, slice_begin * UNIT,
            (slice_end - slice_begin) * CHUNKS, K);
    __syncthreads();

    const u32 read_place = place_of(lane % 8, lane / 8);
    u32 read_at = 0, write_at = (DEPTH - 1) * SLOT_BYTES;
    float *turn_sums = sums;
#pragma unroll 1
    for (int tile = tiles.first; tile < tiles.end; tile += tiles.stride) {
        // The output feature that this thread adds up and writes; its bias is fetched now.
        const int own = tile * ROWS + rank * OWN_ROWS + threadIdx.x % OWN_ROWS;
        const u32 own_bias = bias != nullptr && own < N ? load_half(bias + own) : 0;  // zero in both dtypes

        const u32 parity = scale_parity(w, tile * ROWS + walk.first_row + row);
        float acc[TILES][COLUMNS][4] = {};
#pragma unroll 1
        for (int unit = walk.first_unit; unit < walk.unit_end; unit += UNIT_STRIDE) {
            wait_for_copies<DEPTH - 2>();
            __syncwarp();  // what other lanes copied is seen, and what they read before is read
            copier.copy_next(shared_address(ring) + write_at);
            write_at = read_at;
            const Unit u = {{shared_address(ring) + read_at, u32(row), parity, unit}, read_place,
                            x_shared, (unit - slice_begin) * CHUNKS * chunk_bytes + x_lane, chunk_bytes};
            multiply_unit(acc, u, w);
            read_at = read_at == (DEPTH - 1) * SLOT_BYTES ? 0 : read_at + SLOT_BYTES;
        }

        // Each warp stores its sums where they are added up: in this block, or in the one that owns the row.
#if CLUSTER > 1
        if (tile == tiles.first) cluster_wait();
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
                out[(m0 + t) * out_row_stride + own] = from_float(WEIGHT_UNIT * sum + to_float(own_bias));
            }
        }
        if (BUFFERS == 2)
            turn_sums = turn_sums == sums ? sums + SUMS : sums;  // who stores there next has passed the next barrier
        else if (tile + tiles.stride < tiles.end)
            cluster_barrier();
    }
}
