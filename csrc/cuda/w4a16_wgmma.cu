// W4A16 GEMM for 9 to 64 tokens, Hopper (sm_90a): out[M,N] = x[M,K] @ ((Q - Z) * S)[N,K]^T + bias
//   x, out  fp16 or bf16, row-major, rows strided        Q  4 bits, layout k8x (k8x_mma.h), rows padded to 16 bytes
//   S       dtype of x [N, num_groups]                   Z  like S, any real value; without ZEROS it is 8
// Grid (CLUSTER * min(ceil(N / ROWS), clusters at once), ceil(M / TOKENS)), ROWS = 64 * WG_N;
// clusters of CLUSTER blocks; block 32 * (4 * WG_N * WG_K + STAGERS + 4) threads; shared memory, dynamic, in bytes:
//   ceil((16 * X_SLOTS + 16) / 128) * 128                                               barriers
//   + 256 * TOKENS * min(X_SLOTS, 2 * ceil(ceil(K / 256) / CLUSTER))                    activations
//   + 256 * TOKENS * WG_N * WG_K                                                        sums
//   + 4 * WG_N * WG_K * DEPTH * (2048 + 16384 / SPAN * (1 + ZEROS))                     weights and scales
// Needs K % 32 == 0 and K < 2^20, 16-byte aligned x and Q, and groups of a multiple of SPAN, or one group.
//
// Weights are operand A of wgmma, 64 output features by 16 k, and come from registers; tokens are operand B and come
// from shared memory. The order of k inside a sum is free as long as both operands agree: ldmatrix hands 32 neighbours
// in k of a row to four lanes, a word of k8x each, and x is stored in the order that this gives. Weights are
// multiplied by their scale in the dtype of x, rounding once more, so that the sums stay in the tensor core's registers
// over all of K: a product passes two roundings, three with zero points.
//
// Nothing in the main loop waits for a whole block. Warps have three trades:
//   multiplying  WG_N * WG_K warpgroups, 64 rows each, side by side along N and taking turns along K. Each warp copies
//                its own 16 rows in the background, DEPTH units of 256 k ahead and over the ends of tiles, unpacks half
//                a chunk of 128 k while the tensor core multiplies the half before, and sends its sums when a tile ends
//   staging x    STAGERS warps; once, if the slice of x fits X_SLOTS chunks, else again for every tile, just behind the
//                multiplication
//   adding up    4 warps; the sums of all warpgroups of the cluster come to them, from other blocks through
//                asynchronous stores that count themselves at a barrier, are added in a fixed order and rounded once,
//                while the next tile is multiplied
//
// What should bind, for 1024 weights (64 rows of 16 k), H200 at 1.8 GHz, in cycles of one multiprocessor of 132:
//   memory   528 bytes with a scale per 128 at 4.3 TB/s: 29
//   issue    24 instructions a warp as disassembled, 13 of them to unpack (4 LOP3, 4 HADD2 or HFMA2, 4 HMUL2, 1 shift)
//   wgmma    TOKENS / 2 at the full rate: 8, 16, 32; at 64 tokens operand B alone takes 16 of shared memory
// Measured: 4096 x 28672 takes 27, 33 and 49 us at 16, 32 and 64 tokens, that is 57, 68 and 101 cycles. A program with
// these wgmma and nothing else runs at the full rate, and at 64 tokens with the unpacking beside it at 45, 42 and 40
// cycles with two, three and four warpgroups. What is lost beside that is waiting: for words and scales out of the
// ring, for x, and at the ends of tiles. Words loaded a chunk ahead gained nothing, and for more than two warpgroups
// there are too few registers.
#include "k8x_mma.h"
#include "wgmma.h"

constexpr int CHUNK = 128;                     // k that 16 rows of a warp hold in registers: four words a row and lane
constexpr int CHUNKS = 2;                      // in a unit, so that copies are whole lines of 128 bytes
constexpr int UNIT = CHUNK * CHUNKS;
constexpr int SPANS = UNIT / SPAN;             // a span lies in one group
constexpr int SCALES = CHUNK / SPAN;           // of a row in a chunk
constexpr int WARPGROUPS = WG_N * WG_K;
constexpr int MULTIPLIERS = 4 * WARPGROUPS;    // warps
constexpr int ADDERS = 4;
constexpr int THREADS = 32 * (MULTIPLIERS + STAGERS + ADDERS);
constexpr int WARP_ROWS = 16;
constexpr int ROWS = 64 * WG_N;                // output features per cluster and turn
constexpr int OWN_ROWS = ROWS / CLUSTER;       // of which this block adds up
constexpr int SOURCES = CLUSTER * WG_K;        // sums per output

// A slot of a warp's ring: [WARP_ROWS][LINE bytes] weights, then [1 + ZEROS][SPANS][WARP_ROWS] scales, 4 bytes each.
constexpr int LINE = UNIT / 2;
constexpr int SCALES_AT = LINE * WARP_ROWS;
constexpr int ZEROS_AT = SCALES_AT + 4 * SPANS * WARP_ROWS;
constexpr int SLOT_BYTES = ZEROS_AT + (ZEROS ? 4 * SPANS * WARP_ROWS : 0);
constexpr int SCALE_COPIES = (SLOT_BYTES - SCALES_AT) / 128;  // per lane
constexpr int LINE_LANES = LINE / 16;
constexpr int COPY_ROWS = 32 / LINE_LANES;     // rows per copy of a warp

// A chunk of x: [8 steps][2 halves of k][TOKENS / 8][8 tokens][4 quads][2 neighbours in k]. Step 2j + e takes
// k = 32j + 8 * quad + 4e and the one after it in half 0, the two after those in half 1: what unpack() yields.
constexpr int X_BYTES = 2 * CHUNK * TOKENS;
constexpr int HALF_BYTES = 16 * TOKENS, STEP_BYTES = 2 * HALF_BYTES;
constexpr int SUM_BYTES = 4 * SOURCES * OWN_ROWS * TOKENS;
constexpr int BARRIER_BYTES = (16 * X_SLOTS + 16 + 127) / 128 * 128;

// All warps start with the same share of the registers; those that multiply then take what the others can spare.
constexpr int REGISTERS = 65536 / THREADS / 8 * 8;
constexpr int STAGER_REGISTERS = STAGERS == 4 ? 128 : 88;
constexpr int ADDER_REGISTERS = 32;
constexpr int FREE_REGISTERS =
    (REGISTERS * THREADS - 32 * (STAGERS * STAGER_REGISTERS + ADDERS * ADDER_REGISTERS)) / (32 * MULTIPLIERS) / 8 * 8;
constexpr int MULTIPLIER_REGISTERS = FREE_REGISTERS > 240 ? 240 : FREE_REGISTERS;
constexpr int X_LOADS = 8;  // of 16 bytes a lane, in each of two batches that are on their way

static_assert(SPAN == 128 || SPAN == 64 || SPAN == 32);
static_assert(WARPGROUPS <= 2 && (STAGERS == 4 || STAGERS == 8));
static_assert(ROWS % CLUSTER == 0 && OWN_ROWS % 8 == 0 && 32 * ADDERS % OWN_ROWS == 0);
// A warpgroup that is done with a tile looks for its next chunk up to CHUNKS * (2 * WG_K - 1) on. Were that more than
// all slots, a barrier's parity would not tell that chunk from one a round earlier.
static_assert(X_SLOTS >= CHUNKS * (2 * WG_K - 1));

__device__ __forceinline__ int lane_id() { return threadIdx.x % 32; }

// Where in a slot piece `piece` of row `row` lies: eight rows of one piece, which ldmatrix reads at a time, are 128
// bytes from all banks.
__device__ __forceinline__ u32 place_of(u32 row, u32 piece) { return row * LINE + 16 * (piece ^ row % 8); }

// A row's pairs of sums lie at their number XOR this: neither storing (4 rows of 4 pairs at a time) nor loading (one
// pair of 16 rows) then meets a bank twice.
__device__ __forceinline__ u32 sum_swizzle(u32 row) {
    return TOKENS == 16 ? (row & 2) << 1 | (row >> 2 & 3) : (row & 3) << 2 | (row >> 2 & 3);
}

// The same value, which the compiler cannot know: what follows from it is computed here, not kept in registers through
// the loop around it.
__device__ __forceinline__ u32 opaque(u32 v) {
    asm volatile("" : "+r"(v));
    return v;
}

struct Weight {
    const u32 *words;
    const u16 *scales;
    long long zeros_from_scales;  // in elements
    u32 word_stride, scale_stride;
    int N, K, group_size;
    u32 groups;  // the next whole number above 2^31 / (group_size / SPAN); 0 for one group

    __device__ __forceinline__ int group(u32 k) const { return int((u64(k / SPAN) * groups) >> 31); }
    // 2 for an odd group, else 0; other bits may be anything.
    __device__ __forceinline__ u32 twice_parity(u32 k) const { return k / SPAN * groups >> 30; }
};

// Where a lane copies from, of a warp's 16 rows.
struct Source {
    const u32 *words;
    const u16 *scales;
    int rows;        // that the weight still has, from the warp's first on
    int inside_end;  // units before it can be copied whole, with the neighbour of each scale
};

__device__ __forceinline__ Source source_of(const Weight &w, int first_row) {
    const u32 row = first_row + lane_id() / LINE_LANES, scale_row = first_row + lane_id() % WARP_ROWS;
    Source s;
    s.words = w.words + u64(row) * w.word_stride + 4 * (lane_id() % LINE_LANES);
    s.scales = w.scales + u64(scale_row) * w.scale_stride;
    s.rows = w.N - first_row;
    // Behind the last row's last scale the array may end.
    const int whole = s.rows > WARP_ROWS ? w.K : s.rows == WARP_ROWS ? w.group(w.K - 1) * w.group_size : 0;
    s.inside_end = whole / UNIT;
    return s;
}

// Start the copies of one unit into a slot; `place` is that of the lane's first. Past N and K come zeros; where the
// unit is INSIDE nothing does. 4 bytes are the least that can be copied: a scale comes with a neighbour, except where
// that may lie behind the array.
template <bool INSIDE>
__device__ __forceinline__ void copy_unit(u32 slot, u32 place, const Source &s, const Weight &w, int unit) {
    const int lane = lane_id();
    const int k0 = unit * UNIT;
    const int rows = k0 + 32 * (lane % LINE_LANES) < w.K ? s.rows - lane / LINE_LANES : 0;
    const u32 *from = s.words + k0 / 8;
#pragma unroll
    for (int first = 0; first < WARP_ROWS; first += COPY_ROWS) {
        copy_16_bytes_async(slot + (place ^ 16 * (first % 8)) + first * LINE, from, INSIDE || first < rows ? 16 : 0);
        from += u64(COPY_ROWS) * w.word_stride;
    }
#pragma unroll
    for (int i = 0; i < SCALE_COPIES; ++i) {
        const int span = i * (32 / WARP_ROWS) + lane / WARP_ROWS;
        const int k = k0 + span % SPANS * SPAN;
        const u64 at = u64(s.scales + w.group(k) + (ZEROS && span >= SPANS ? w.zeros_from_scales : 0));
        const bool present = k < w.K && lane % WARP_ROWS < s.rows;
        copy_4_bytes_async(slot + SCALES_AT + 4 * (i * 32 + lane), at & ~u64(3),
                           INSIDE ? 4 : present ? 2 + (at & 2) : 0);
    }
}

// How the blocks and warps of a cluster divide K and the tiles of ROWS output features.
struct Work {
    int first_tile, tiles, tile_stride;
    int slice_begin, slice_end;  // of K, in units, for this block
    int chunks;                  // of that slice
    int slots;                   // for chunks of x
    bool resident;               // each chunk of x has a slot for good
};

// Addresses in shared memory.
struct Places {
    u32 filled, emptied;            // a barrier per slot of x
    u32 sums_filled, sums_emptied;  // barriers
    u32 x, sums, rings;
};

__device__ __forceinline__ void arrive_at_cluster() {
#if CLUSTER > 1
    cluster_arrive_without_stores();
#endif
}
__device__ __forceinline__ void wait_for_cluster() {
#if CLUSTER > 1
    cluster_wait();
#endif
}

__device__ __forceinline__ void multiply(const Weight &w, const Work &work, const Places &at, int warp, int rank) {
    const int lane = lane_id(), row = lane / 4, quad = lane % 4;
    const int group_k = warp / 4 % WG_K, group_n = warp / 4 / WG_K;
    const int tile_row = 64 * group_n + WARP_ROWS * (warp % 4);
    const int first_unit = work.slice_begin + group_k;
    const u32 ring = at.rings + warp * (DEPTH * SLOT_BYTES);

    int load_tile = first_unit < work.slice_end ? work.first_tile : work.tiles, load_unit = first_unit;
    Source source = source_of(w, load_tile * ROWS + tile_row);
    const u32 copy_place = place_of(lane / LINE_LANES, lane % LINE_LANES), read_place = place_of(lane % 16, lane / 16);
    auto copy_next = [&](u32 slot) {
        if (load_tile < work.tiles) {
            if (load_unit < source.inside_end)
                copy_unit<true>(slot, copy_place, source, w, load_unit);
            else
                copy_unit<false>(slot, copy_place, source, w, load_unit);
            load_unit += WG_K;
            if (load_unit >= work.slice_end) {
                load_unit = first_unit;
                load_tile += work.tile_stride;
                source = source_of(w, load_tile * ROWS + tile_row);
            }
        }
        close_copies();
    };
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) copy_next(ring + d * SLOT_BYTES);
    arrive_at_cluster();
    __syncthreads();

    // The chunks of x of all tiles go through the slots in turn; of those this warpgroup takes every WG_K-th pair. A
    // slot that is filled anew has its barrier one phase on, so the parity to wait for flips with every round of the
    // slots. Resident x is filled once, and parity 0 stays the one to wait for.
    int slot = CHUNKS * group_k;
    u32 phase = 0;
    auto advance = [&](int count) {
        slot += count;
        if (slot >= work.slots) slot -= work.slots, phase ^= !work.resident;
    };
    // How far its steps take a warpgroup in one tile. A tile takes the slots on by work.chunks, and steps of WG_K units
    // may stop short of that or pass it.
    const int own_chunks =
        first_unit < work.slice_end ? (work.slice_end - first_unit + WG_K - 1) / WG_K * WG_K * CHUNKS : 0;

    u32 read_at = ring;
    int turn = 0;
#pragma unroll 1
    for (int tile = work.first_tile; tile < work.tiles; tile += work.tile_stride, ++turn) {
        // Bit 1 says which half of its 4 bytes the scale of group 0 is; for both rows of a lane, as 8 strides are even.
        const u32 parity = (u32(u64(w.scales) >> 1) + (tile * ROWS + tile_row + row) * w.scale_stride) << 1;
        if (work.resident) slot = CHUNKS * group_k;
        int held = -1;  // slot whose chunk is being multiplied
        auto release = [&] {  // once a warp: the slot is filled anew when all 4 * WG_N that read it have arrived
            if (held >= 0 && lane == 0) barrier_arrive(at.emptied + 8 * held);
        };
        float sums[TOKENS / 2] = {};
#pragma unroll 1
        for (int unit = first_unit; unit < work.slice_end; unit += WG_K) {
            wait_for_copies<DEPTH - 1>();
            __syncwarp();
#pragma unroll
            for (int part = 0; part < CHUNKS; ++part) {
                u32 word[4][2];  // of rows `row` and `row + 8`
#pragma unroll
                for (int j = 0; j < 4; j += 2) {
                    u32 v[4];
                    load_matrices(v, read_at + (read_place ^ 16 * (4 * part + j)));
                    word[j][0] = v[0], word[j][1] = v[1], word[j + 1][0] = v[2], word[j + 1][1] = v[3];
                }
                u32 scale[SCALES][2], minus_zero[SCALES][2];
#pragma unroll
                for (int i = 0; i < SCALES; ++i) {
                    const u32 odd = parity ^ w.twice_parity(unit * UNIT + part * CHUNK + i * SPAN);
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        const u32 scale_at = read_at + 4 * ((part * SCALES + i) * WARP_ROWS + 8 * h + row);
                        scale[i][h] = twice(load_shared_half(scale_at + SCALES_AT + (odd & 2)));
                        if (ZEROS) {
                            const u32 odd_zero = odd ^ u32(w.zeros_from_scales) << 1;
                            minus_zero[i][h] = negate2(twice(load_shared_half(scale_at + ZEROS_AT + (odd_zero & 2))));
                        }
                    }
                }
                if (part == CHUNKS - 1) {
                    __syncwarp();
                    copy_next(read_at);
                }
                const u64 b = operand(at.x + slot * X_BYTES, HALF_BYTES, 128);
                barrier_wait(at.filled + 8 * slot, phase);
#pragma unroll
                for (int first = 0; first < 4; first += 2) {
                    u32 a[4][4];
#pragma unroll
                    for (int j = 0; j < 2; ++j)
#pragma unroll
                        for (int h = 0; h < 2; ++h) {
                            const int span = (first + j) * SCALES / 4;
                            u32 pair[4];
                            unpack(word[first + j][h], minus_base(ZEROS ? 0 : 8), pair);
#pragma unroll
                            for (int i = 0; i < 4; ++i)
                                if (ZEROS) pair[i] = add2(pair[i], minus_zero[span][h]);
#pragma unroll
                            for (int i = 0; i < 4; ++i)
                                a[2 * j + i / 2][i % 2 * 2 + h] = multiply2(pair[i], scale[span][h]);
                        }
                    wgmma_fence();
#pragma unroll
                    for (int s = 0; s < 4; ++s) wgmma(sums, a[s], b + u32(2 * first + s) * (STEP_BYTES / 16));
                    wgmma_commit();
                    wgmma_wait<1>();
                    // The half before this one is done, and with it the chunk before this one.
                    if (first == 0 && !work.resident) {
                        release();
                        held = slot;
                    }
                }
                advance(part == CHUNKS - 1 ? 1 + CHUNKS * (WG_K - 1) : 1);
            }
            read_at = read_at == ring + (DEPTH - 1) * SLOT_BYTES ? ring : read_at + SLOT_BYTES;
        }
        wgmma_wait<0>();
        if (!work.resident) {
            release();
            advance(work.chunks - own_chunks);
            if (slot < 0) slot += work.slots, phase ^= 1;
        }

        if (turn == 0) wait_for_cluster();
        if (turn > 0) barrier_wait(at.sums_emptied, (turn - 1) & 1);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int own = (tile_row + 8 * h + row) % OWN_ROWS;
            const u32 to = at.sums + ((rank * WG_K + group_k) * OWN_ROWS + own) * (4 * TOKENS);
            const int to_rank = (tile_row + 8 * h) / OWN_ROWS;
            const u32 twist = opaque(sum_swizzle(own));
            auto place = [=](int c) { return 8 * ((4 * c + quad) ^ twist); };
            if (to_rank == rank) {
#pragma unroll
                for (int c = 0; c < TOKENS / 8; ++c)
                    store_floats(to + place(c), sums[4 * c + 2 * h], sums[4 * c + 2 * h + 1]);
            }
#if CLUSTER > 1
            else {
                const u32 remote = map_to_rank(to, to_rank), barrier = map_to_rank(at.sums_filled, to_rank);
#pragma unroll
                for (int c = 0; c < TOKENS / 8; ++c)
                    store_floats_async(remote + place(c), sums[4 * c + 2 * h], sums[4 * c + 2 * h + 1], barrier);
            }
#endif
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(at.sums_filled);
    }
    if (turn == 0) wait_for_cluster();
}

// x through registers: the copy unit takes 4 cycles for each 16 bytes that go to a place of their own. Lane (token,
// quad) loads 8 neighbours in k and stores each pair of them with the same pair of the other lanes.
__device__ __forceinline__ void stage_x(
    const Work &work, const Places &at, const u16 *x, long long x_row_stride, int tokens, int K, int stager) {
    arrive_at_cluster();
    __syncthreads();
    // Early start, see w4a16_skinny.cu: only x needs the kernel ahead to have ended, and out, which add_up() writes.
    // The warps that multiply read nothing but weights, and do not wait.
    wait_for_previous_kernel();
    let_next_kernel_start();

    constexpr int PIECES = TOKENS / 2 / STAGERS;  // of a chunk, for each warp: 8 tokens by 32 k
    constexpr int BATCH = X_LOADS / PIECES;       // chunks
    static_assert(X_LOADS % PIECES == 0);
    const int lane = lane_id(), row = lane / 4, quad = lane % 4;
    const int tile_count = max((work.tiles - work.first_tile + work.tile_stride - 1) / work.tile_stride, 0);
    const int chunks = (work.resident ? min(tile_count, 1) : tile_count) * work.chunks;
    const u16 *from = x + row * x_row_stride;
    const int k_begin = work.slice_begin * UNIT + 8 * quad;
    const u32 place = at.x + lane / 8 * HALF_BYTES + lane % 8 * 16;

    int load_chunk = 0, loads_left = chunks;
    auto load = [&](uint4 v[BATCH][PIECES]) {
        const int first_piece = opaque(stager) * PIECES;
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
#pragma unroll
            for (int i = 0; i < PIECES; ++i) {
                const int piece = first_piece + i, token = piece / 4 * 8;
                const int k = k_begin + load_chunk * CHUNK + piece % 4 * 32;
                v[b][i] = load_16_bytes(from + token * x_row_stride + k,
                                        loads_left > 0 && token + row < tokens && k < K);
            }
            --loads_left;
            if (++load_chunk == work.chunks) load_chunk = 0;
        }
    };
    int slot = 0, stores_left = chunks;
    u32 phase = 1;
    auto store = [&](const uint4 v[BATCH][PIECES]) {
#pragma unroll
        for (int b = 0; b < BATCH; ++b)
            if (stores_left > 0) {
                barrier_wait(at.emptied + 8 * slot, phase);
#pragma unroll
                for (int i = 0; i < PIECES; ++i) {
                    const int piece = stager * PIECES + i;
                    store_matrices(place + slot * X_BYTES + piece % 4 * (2 * STEP_BYTES) + piece / 4 * 128, v[b][i]);
                }
                end_of_operand_stores();
                __syncwarp();
                if (lane == 0) barrier_arrive(at.filled + 8 * slot);
                --stores_left;
                if (++slot == work.slots) slot = 0, phase ^= 1;
            }
    };
    uint4 v[2][BATCH][PIECES];
    load(v[0]);
#pragma unroll 1
    while (stores_left > 0) {
        load(v[1]);
        store(v[0]);
        load(v[0]);
        store(v[1]);
    }
    wait_for_cluster();
}

__device__ __forceinline__ void add_up(
    const Work &work, const Places &at, const u16 *bias, u16 *out, long long out_row_stride, int tokens, int N,
    int rank) {
    arrive_at_cluster();
    __syncthreads();
    wait_for_previous_kernel();  // it may still read or write out
    wait_for_cluster();

    const int thread = threadIdx.x - 32 * (MULTIPLIERS + STAGERS);
    const int own = thread % OWN_ROWS;
    u32 turn = 0;
#pragma unroll 1
    for (int tile = work.first_tile; tile < work.tiles; tile += work.tile_stride, ++turn) {
        const int n = tile * ROWS + rank * OWN_ROWS + own;
        u32 own_bias = 0;
        load_half(own_bias, bias + n, bias != nullptr && n < N);
#if CLUSTER > 1
        if (thread == 0) barrier_arrive_and_expect(at.sums_filled, SUM_BYTES - SUM_BYTES / CLUSTER);
#endif
        barrier_wait(at.sums_filled, turn & 1);
#pragma unroll 1
        for (int pair = thread / OWN_ROWS; pair < TOKENS / 2; pair += 32 * ADDERS / OWN_ROWS) {
            const u32 from = at.sums + own * (4 * TOKENS) + 8 * (pair ^ sum_swizzle(own));
            float sum[2] = {};
#pragma unroll
            for (int i = 0; i < SOURCES; ++i) {
                float v[2];
                load_floats(v, from + i * (4 * OWN_ROWS * TOKENS));
                sum[0] += v[0];
                sum[1] += v[1];
            }
#pragma unroll
            for (int e = 0; e < 2; ++e)
                if (n < N && 2 * pair + e < tokens)
                    out[(2 * pair + e) * out_row_stride + n] = from_float(sum[e] + to_float(own_bias));
        }
        // Only a block that goes on to another tile listens; one that does not may be gone.
        if (tile + work.tile_stride < work.tiles) {
            __syncwarp();
#if CLUSTER > 1
            if (lane_id() < CLUSTER) remote_barrier_arrive(map_to_rank(at.sums_emptied, lane_id()));
#else
            if (lane_id() == 0) barrier_arrive(at.sums_emptied);
#endif
        }
    }
}

extern "C" __global__ void
#if CLUSTER > 1
__cluster_dims__(CLUSTER, 1, 1)
#endif
__launch_bounds__(THREADS, 1)
w4a16_wgmma(
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
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    const int m0 = blockIdx.y * TOKENS;
    const int tokens = min(M - m0, TOKENS);
    int rank = 0;
#if CLUSTER > 1
    rank = cluster_rank();
#endif
    const int units = (K + UNIT - 1) / UNIT;
    Work work;
    work.first_tile = blockIdx.x / CLUSTER;
    work.tiles = (N + ROWS - 1) / ROWS;
    work.tile_stride = gridDim.x / CLUSTER;
    work.slice_begin = units * rank / CLUSTER;
    work.slice_end = units * (rank + 1) / CLUSTER;
    work.chunks = (work.slice_end - work.slice_begin) * CHUNKS;
    work.slots = min(X_SLOTS, (units + CLUSTER - 1) / CLUSTER * CHUNKS);
    work.resident = work.chunks <= work.slots;

    Places at;
    at.filled = shared_address(dynamic_shared_memory());
    at.emptied = at.filled + 8 * X_SLOTS;
    at.sums_filled = at.emptied + 8 * X_SLOTS;
    at.sums_emptied = at.sums_filled + 8;
    at.x = at.filled + BARRIER_BYTES;
    at.sums = at.x + work.slots * X_BYTES;
    at.rings = at.sums + SUM_BYTES;
    if (warp == MULTIPLIERS) {
        if (lane_id() == 0) {
            for (int i = 0; i < X_SLOTS; ++i) {
                barrier_init(at.filled + 8 * i, STAGERS);
                barrier_init(at.emptied + 8 * i, 4 * WG_N);
            }
            barrier_init(at.sums_filled, MULTIPLIERS + (CLUSTER > 1));  // and the bytes of other blocks
            barrier_init(at.sums_emptied, CLUSTER * ADDERS);
            end_of_barrier_init();
        }
        __syncwarp();
    }

    if (warp < MULTIPLIERS) {
        grow_to_registers<MULTIPLIER_REGISTERS>();
        Weight w;
        w.words = qweight;
        w.scales = scales;
        w.zeros_from_scales = 0;
#if ZEROS
        w.zeros_from_scales = zero_points - scales;
#endif
        w.word_stride = u32(qweight_row_stride);
        w.scale_stride = u32(scales_row_stride);
        w.N = N;
        w.K = K;
        w.group_size = group_size;
        w.groups = group_size >= K ? 0 : (1u << 31) / u32(group_size / SPAN) + 1;
        multiply(w, work, at, warp, rank);
    } else if (warp < MULTIPLIERS + STAGERS) {
        shrink_to_registers<STAGER_REGISTERS>();
        stage_x(work, at, x + m0 * x_row_stride, x_row_stride, tokens, K, warp - MULTIPLIERS);
    } else {
        shrink_to_registers<ADDER_REGISTERS>();
        add_up(work, at, bias, out + m0 * out_row_stride, out_row_stride, tokens, N, rank);
    }
}
