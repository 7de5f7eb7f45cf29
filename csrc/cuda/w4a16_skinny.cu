// W4A16 GEMM for few tokens, sm80 and later: out[M,N] = x[M,K] @ ((Q - Z) * S)[N,K]^T + bias
//   x, out  fp16 or bf16, row-major, rows strided        Q  4 bits, layout k8x (k8x_mma.h), rows padded to 16 bytes
//   S       dtype of x [N, num_groups]                   Z  like S, any real value; without ZEROS it is 8
// Grid (CLUSTER * min(ceil(N / ROWS), clusters at once), ceil(M / TOKENS)), ROWS = 16 * TILES * WARPS_N;
// block 32 * WARPS_N * WARPS_K threads; shared memory, dynamic, in bytes:
//   WARPS_N * WARPS_K * DEPTH * SLOT_BYTES                                        a ring of weights per warp
//   + 4 * BUFFERS * CLUSTER * WARPS_K * TOKENS * (ROWS / CLUSTER + 4)             the sums of all warps
//   + 256 * CHUNKS * ceil(ceil(K / UNIT) / CLUSTER) * (TOKENS == 8 ? min(M, 8) : TOKENS)     x, one slice of K
// Needs K % 32 == 0, so that no 16-byte copy of weights passes the end of a row, and 16-byte aligned x and Q. Groups:
// one, or with SPAN 128 a power of two from 128 on, with SPAN 64 or 32 a multiple of SPAN, and then K < 2^20.
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
// 2048 weights (16 rows of 128 k) may take 233 cycles of one of 528 schedulers. The loop, as disassembled for sm90 with
// two tiles a warp, has 121 instructions for them (bfloat16 136, with zero points 147; groups of 64 135, of 32 161).
// Unpacking is 72 (bfloat16 88), mma 8 (with zero points 12, which the sums of x take).
#include "k8x_mma.h"
#include "ptx.h"

constexpr int CHUNK = 128;                     // k per step of a warp
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

// A slot of a warp's ring: weights of a unit [WARP_ROWS][LINE bytes], scales [WARP_ROWS][UNIT_SPANS], zero points
// likewise. A scale takes 4 bytes, the aligned ones that it was copied with.
constexpr int UNIT = CHUNK * CHUNKS;           // k per copy
constexpr int UNIT_SPANS = UNIT / SPAN;
constexpr int LINE = UNIT / 2;
constexpr int PIECES = LINE / 16;              // of a line, one per copy of a lane
constexpr int SCALES_AT = LINE * WARP_ROWS;
constexpr int SCALES_BYTES = 4 * WARP_ROWS * UNIT_SPANS;
constexpr int SLOT_BYTES = SCALES_AT + (1 + ZEROS) * SCALES_BYTES;

// Zero points are taken apart (k8x_mma.h), or, where a span has too few k for that to pay, subtracted from each weight.
constexpr bool APART = ZEROS && SPAN >= 64;

static_assert(TOKENS % 8 == 0 && ROWS % CLUSTER == 0 && THREADS % OWN_ROWS == 0 && DEPTH >= 2);
static_assert(SPAN == 128 || SPAN == 64 || SPAN == 32);
static_assert(CHUNKS == 1 || CHUNKS == 2);

struct Weight {
    const u32 *words;
    const u16 *scales;
    long long zeros_from_scales;  // in elements
    u32 word_stride, scale_stride;
    int N, K, group_size;
    u32 groups;  // log2 of the chunks in a group; else the next whole number above 2^31 / (group_size / 32), 0 for one

    __device__ __forceinline__ int group(int k) const {
        return SPAN == 128 ? u32(k) / CHUNK >> groups : int((u64(u32(k) / 32) * groups) >> 31);
    }
    // 2 for an odd group, else 0; other bits may be anything.
    __device__ __forceinline__ u32 twice_parity(u32 k) const {
        return SPAN == 128 ? k / (CHUNK / 2) >> groups : k / 32 * groups >> 30;
    }
};

// The pieces of a row lie at their number XOR this: eight rows of one piece, which ldmatrix reads at a time, are then
// 128 bytes from all banks.
__device__ __forceinline__ u32 swizzle(u32 row) { return row / (8 / PIECES) % PIECES; }

// Where a lane copies from in one tile of rows. The lanes of a row's scales in a unit are neighbours: a warp's copy
// then touches no more rows than it must, each of which takes the copy unit a cycle.
struct Source {
    const u32 *words;
    const u16 *scales;
    int rows;        // that the weight still has, from the warp's first on
    int inside_end;  // units before it can be copied whole, with the neighbour of each scale
};

constexpr int COPY_ROWS = 32 / PIECES;  // per copy of a warp
constexpr int SCALE_ROWS = 32 / UNIT_SPANS;

__device__ __forceinline__ Source source_of(const Weight &w, int first_row) {
    const int lane = threadIdx.x % 32;
    const u32 row = first_row + lane / PIECES, scale_row = first_row + lane / UNIT_SPANS;
    Source s;
    s.words = w.words + u64(row) * w.word_stride + 4 * (lane % PIECES);
    s.scales = w.scales + u64(scale_row) * w.scale_stride;
    s.rows = w.N - first_row;
    // Behind the last row's last scale the array may end.
    const int whole = s.rows > WARP_ROWS ? w.K : s.rows == WARP_ROWS ? w.group(w.K - 1) * w.group_size : 0;
    s.inside_end = whole / UNIT;
    return s;
}

// Where in a slot piece `piece` of row `row` lies.
__device__ __forceinline__ u32 place_of(u32 row, u32 piece) { return row * LINE + 16 * (piece ^ swizzle(row)); }

// Start the copies of one unit into a slot; `place` is that of the lane's first. What lies past N or K becomes zero.
// Where the unit is INSIDE nothing does.
template <bool INSIDE>
__device__ __forceinline__ void copy_unit(u32 slot, u32 place, const Source &s, const Weight &w, int unit) {
    const int lane = threadIdx.x % 32;
    const int k0 = unit * UNIT;
    const int rows = k0 + 32 * (lane % PIECES) < w.K ? s.rows - lane / PIECES : 0;
    const u32 *from = s.words + k0 / 8;
#pragma unroll
    for (int first = 0; first < WARP_ROWS; first += COPY_ROWS) {
        copy_16_bytes_async(slot + (place ^ 16 * swizzle(first)) + first * LINE, from,
                            INSIDE || first < rows ? 16 : 0);
        from += u64(COPY_ROWS) * w.word_stride;
    }
    // A copy has at least 4 bytes, aligned: those that the scale is in. Of a scale in the lower half only its own two
    // are read, unless the unit is inside.
    const int k = k0 + lane % UNIT_SPANS * SPAN;
    const int scale_rows = k < w.K ? s.rows - lane / UNIT_SPANS : 0;
#pragma unroll
    for (int z = 0; z <= ZEROS; ++z) {
        const u64 at = u64(s.scales + w.group(k) + z * w.zeros_from_scales);
        u64 aligned = at & ~u64(3);
#pragma unroll
        for (int first = 0; first < WARP_ROWS; first += SCALE_ROWS) {
            if (SCALE_ROWS <= WARP_ROWS || lane < WARP_ROWS * UNIT_SPANS)
                copy_4_bytes_async(slot + SCALES_AT + z * SCALES_BYTES + 4 * (first * UNIT_SPANS + lane), aligned,
                                   INSIDE ? 4 : first < scale_rows ? 2 + (at & 2) : 0);
            aligned += u64(2 * SCALE_ROWS) * w.scale_stride;
        }
    }
}

// What a lane needs for two of its rows, `row` and `row + 8` of 16, in one span.
struct Factors {
    float scale[2];
    MinusBase minus[2];  // added in unpacking
    u32 minus_zero[2];   // added to pairs after that; 0 if APART
    float rest[2];       // taken off as so many times the sum of x; 0 unless APART
};

// `at` is where row `row` has its scale, whose half is the one `scale_half` bytes on.
__device__ __forceinline__ Factors load_factors(u32 at, u32 scale_half, u32 zero_half) {
    constexpr u32 EIGHT_ROWS = 4 * 8 * UNIT_SPANS;
    Factors f = {};
    u32 zero[2] = {};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        f.scale[h] = to_float(load_shared_half(at + h * EIGHT_ROWS + scale_half));
        if (ZEROS) zero[h] = load_shared_half(at + h * EIGHT_ROWS + SCALES_BYTES + zero_half);
        f.minus[h] = minus_base(ZEROS ? 0 : 8);
        if (ZEROS) f.minus_zero[h] = negate2(twice(zero[h]));
    }
    if (APART) take_apart(zero[0] | zero[1] << 16, f.minus, f.rest);
    return f;
}

// acc += scale * (weights of chunk `part` of the unit in `slot` * x of that chunk), whose first k is `k0`. `read_place`
// is where ldmatrix wants the lane in a slot, `x` the lane's place in the chunk of x: 256 bytes a token, in which k 32j
// .. 32j + 31 lie at 64 * j, for odd tokens at 64 * (j ^ 1): eight lanes, two tokens of four quads, then read 128 bytes
// from all banks. Bit 1 of `parity` says which half of its 4 bytes the scale of group 0 has, bit 2 the same of the zero
// point.
__device__ __forceinline__ void multiply_chunk(
    float acc[TILES][COLUMNS][4], u32 slot, u32 read_place, int part, const unsigned char *x,
    const unsigned char *x_odd, const Weight &w, int k0, u32 parity) {
    constexpr int WORDS = 4 / SPANS;  // of a row and lane, per span
    const u32 row = threadIdx.x % 32 / 4;
    u32 words[TILES][2][4];
#pragma unroll
    for (int t = 0; t < TILES; ++t)
#pragma unroll
        for (int h = 0; h < 2; ++h)
            load_matrices(words[t][h], slot + (read_place ^ 64 * part) + (16 * t + 8 * h) * LINE);
#pragma unroll
    for (int span = 0; span < SPANS; ++span) {
        const u32 odd = w.twice_parity(k0 + span * SPAN);
        const u32 scales = slot + SCALES_AT + 4 * (row * UNIT_SPANS + part * SPANS + span);
        Factors f[TILES];
#pragma unroll
        for (int t = 0; t < TILES; ++t)
            f[t] = load_factors(scales + 4 * 16 * t * UNIT_SPANS, (parity ^ odd) & 2, (parity >> 1 ^ odd) & 2);

        float sum[TILES][COLUMNS][4] = {}, x_sum[COLUMNS][4] = {};
#pragma unroll
        for (int j = span * WORDS; j < (span + 1) * WORDS; ++j) {
            u32 a[TILES][2][4];
#pragma unroll
            for (int t = 0; t < TILES; ++t)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    u32 pair[4];
                    unpack(words[t][h][j], f[t].minus[h], pair);
#pragma unroll
                    for (int p = 0; p < 4; ++p)
                        a[t][p / 2][2 * (p % 2) + h] = ZEROS && !APART ? add2(pair[p], f[t].minus_zero[h]) : pair[p];
                }
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) {
                // Of eight tokens: k 32j + 8 * quad and the seven after it.
                const uint4 b = *reinterpret_cast<const uint4 *>((j % 2 ? x_odd : x) + c * 8 * 256 + j / 2 * 128);
#pragma unroll
                for (int t = 0; t < TILES; ++t) mma_16x8x16(sum[t][c], a[t][0], b.x, b.y);
#pragma unroll
                for (int t = 0; t < TILES; ++t) mma_16x8x16(sum[t][c], a[t][1], b.z, b.w);
                if (APART) {
                    const u32 ones[4] = {ONE, ONE, ONE, ONE};
                    mma_16x8x16(x_sum[c], ones, b.x, b.y);
                    mma_16x8x16(x_sum[c], ones, b.z, b.w);
                }
            }
        }
#pragma unroll
        for (int t = 0; t < TILES; ++t)
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    // A whole zero point leaves no rest, and an infinite x then no NaN.
                    if (APART && f[t].rest[e / 2] != 0) sum[t][c][e] -= f[t].rest[e / 2] * x_sum[c][e];
                    acc[t][c][e] += f[t].scale[e / 2] * sum[t][c][e];
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
    const u32 lane = threadIdx.x % 32;
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
    w.group_size = group_size;
    if (SPAN == 128)
        w.groups = group_size >= K ? 31 : __ffs(group_size / CHUNK) - 1;
    else
        w.groups = group_size >= K ? 0 : (1u << 31) / u32(group_size / 32) + 1;

    // K in units: first over the cluster, one slice a block, then over the warps in turn.
    const int units = (K + UNIT - 1) / UNIT;
    const int slice_begin = units * rank / CLUSTER, slice_end = units * (rank + 1) / CLUSTER;
    const int first_unit = slice_begin + warp_k;

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

    // The copying side runs DEPTH - 1 units ahead of the multiplying one, over the ends of tiles.
    int copied_tile = first_unit < slice_end ? first_tile : tiles, copied_unit = first_unit;
    Source source = source_of(w, copied_tile * ROWS + warp_n * WARP_ROWS);
    const u32 copy_place = place_of(lane / PIECES, lane % PIECES);
    const u32 read_place = place_of(lane % 8, lane / 8);
    auto copy_next = [&](u32 slot) {
        if (copied_tile < tiles) {
            if (copied_unit < source.inside_end)
                copy_unit<true>(slot, copy_place, source, w, copied_unit);
            else
                copy_unit<false>(slot, copy_place, source, w, copied_unit);
            copied_unit += WARPS_K;
            if (copied_unit >= slice_end) {
                copied_unit = first_unit;
                copied_tile += tile_stride;
                source = source_of(w, copied_tile * ROWS + warp_n * WARP_ROWS);
            }
        }
        close_copies();
    };
#pragma unroll
    for (int d = 0; d < DEPTH - 1; ++d) copy_next(shared_address(ring) + d * SLOT_BYTES);

    // Early start: all above may run while the kernel ahead in the stream still does. It writes no weights, which
    // docs/deployment.md forbids in graphs, where alone the launcher allows this; but maybe x, and it may still read or
    // write out.
    wait_for_previous_kernel();
    let_next_kernel_start();
    stage_x(x_shared, chunk_bytes, x + m0 * x_row_stride, x_row_stride, tokens, slice_begin * UNIT,
            (slice_end - slice_begin) * CHUNKS, K);
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
        const u32 parity = (first_scale & 1) << 1 | ((first_scale + u32(w.zeros_from_scales)) & 1) << 2;
        float acc[TILES][COLUMNS][4] = {};
#pragma unroll 1
        for (int unit = first_unit; unit < slice_end; unit += WARPS_K) {
            wait_for_copies<DEPTH - 2>();
            __syncwarp();  // what other lanes copied is seen, and what they read before is read
            copy_next(shared_address(ring) + write_at);
            write_at = read_at;
#pragma unroll
            for (int part = 0; part < CHUNKS; ++part) {
                const u32 x_at = ((unit - slice_begin) * CHUNKS + part) * chunk_bytes + x_lane;
                multiply_chunk(acc, shared_address(ring) + read_at, read_place, part, x_shared + x_at,
                               x_shared + (x_at ^ 64), w, unit * UNIT + part * CHUNK, parity);
            }
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
