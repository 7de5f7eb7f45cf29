// W4A16 GEMM for 9 to 64 tokens, Hopper (sm_90a): out[M,N] = x[M,K] @ ((Q - Z) * S)[N,K]^T + bias
//   x, out  fp16 or bf16, row-major, rows strided        Q  4 bits, layout k8x (k8x_mma.h), rows padded to 16 bytes
//   S       dtype of x [N, num_groups]                   Z  like S, any real value; without ZEROS it is 8
// Grid (CLUSTER * min(ceil(N / ROWS), clusters at once), ceil(M / TOKENS)), ROWS = 64 * WG_N;
// clusters of CLUSTER blocks; block 32 * (4 * WG_N * WG_K + STAGERS + 4) threads; shared memory, dynamic, in bytes:
//   ceil((16 * X_SLOTS + 32) / 128) * 128                                               barriers
//   + 256 * TOKENS * min(X_SLOTS, CHUNKS * ceil(ceil(K / (128 * CHUNKS)) / CLUSTER))    activations
//   + 4 * TOKENS * ROWS / CLUSTER * (2 * CLUSTER - 1)                                   sums
//   + 4 * WG_N * WG_K * DEPTH * CHUNKS * (1024 + 8192 / SPAN * (1 + ZEROS))             weights and scales
// Needs K % 32 == 0, K < 2^20, 16-byte aligned x and Q, and one group or groups of a multiple of SPAN.
//
// Weights are operand A of wgmma, 64 output features by 16 k, and come from registers; tokens are operand B and come
// from shared memory. The order of k inside a sum is free as long as both operands agree: ldmatrix hands 32 neighbours
// in k of a row to four lanes, a word of k8x each, and x is stored in the order that this gives. A zero point is
// subtracted from q, which rounds once. For groups of 128 and up to 32 tokens the sums of each 128 k are scaled; else
// weights are, in the dtype of x, rounding once more, and the sums stay in the tensor core's registers over all of K.
//
// Nothing in the main loop waits for a whole block. Warps have three trades:
//   multiplying  WG_N * WG_K warpgroups, 64 rows each, side by side along N and taking turns along K. Each warp copies
//                its own 16 rows in the background, DEPTH units ahead and over the ends of tiles, unpacks half a chunk
//                of 128 k while the tensor core multiplies the half before, and leaves its sums in shared memory when a
//                tile ends
//   staging x    STAGERS warps; once, if the slice of x fits X_SLOTS chunks, else again for every tile, just behind the
//                multiplication
//   adding up    4 warps, while the next tile is multiplied: each block has a part of the tile's rows. It sends the
//                sums of the others to their blocks, by asynchronous stores that count themselves at a barrier there,
//                adds what comes in a fixed order and rounds once. (Where the multiplying warps sent for themselves,
//                4096 x 28672 took 11 % longer at 64 tokens.)
//
// What should bind, for 1024 weights (64 rows of 16 k), H200 at 1.8 GHz, in cycles of one multiprocessor of 132:
//   memory   528 bytes with a scale per 128 at 4.3 TB/s: 29
//   issue    24 instructions a warp as disassembled, 13 of them to unpack (4 LOP3, 4 HADD2 or HFMA2, 4 HMUL2, 1 shift);
//            where sums are scaled 19 to 20
//   wgmma    TOKENS / 2 at the full rate: 8, 16, 32; at 64 tokens operand B alone takes 16 of shared memory
// Measured: 4096 x 28672 takes 26, 30 and 43 us at 16, 32 and 64 tokens, that is 54, 64 and 90 cycles. A program with
// these wgmma and nothing else runs at the full rate, and with the unpacking beside it at 26, 30 and 39 cycles, one or
// two less with more warpgroups. What is lost beside that, at 64 tokens: clusters of four fit on 120 of 132
// multiprocessors; 224 tiles are 7.5 turns; a tile takes 1400 cycles to end and the next to begin; the rest is waiting,
// for words and scales out of the ring and for x. Words loaded a chunk ahead, smaller steps between wgmma, four
// warpgroups and two sets of outgoing sums gained nothing.
#include "k8x_mma.h"
#include "wgmma.h"

constexpr int CHUNK = 128;                     // k that 16 rows of a warp hold in registers: four words a row and lane
constexpr int UNIT = CHUNK * CHUNKS;           // k per copy
constexpr int UNIT_STRIDE = WG_K;
constexpr int SPANS = CHUNK / SPAN;            // scales of a row per chunk
constexpr int WARPGROUPS = WG_N * WG_K;
constexpr int MULTIPLIERS = 4 * WARPGROUPS;    // warps
constexpr int ADDERS = 4;
constexpr int THREADS = 32 * (MULTIPLIERS + STAGERS + ADDERS);
constexpr int WARP_ROWS = 16;
constexpr int ROWS = 64 * WG_N;                // output features per cluster and turn
constexpr int OWN_ROWS = ROWS / CLUSTER;       // of which this block adds up

#include "weight_ring.h"

// A chunk of x: [8 steps][2 halves of k][TOKENS / 8][8 tokens][4 quads][2 neighbours in k]. Step 2j + e takes
// k = 32j + 8 * quad + 4e and the one after it in half 0, the two after those in half 1: what unpack() yields.
constexpr int X_BYTES = 2 * CHUNK * TOKENS;
constexpr int HALF_BYTES = 16 * TOKENS, STEP_BYTES = 2 * HALF_BYTES;
// Sums: [CLUSTER][OWN_ROWS][TOKENS] on their way out, a part for each block, and [CLUSTER - 1][OWN_ROWS][TOKENS] that
// other blocks have sent.
constexpr int PART_BYTES = 4 * OWN_ROWS * TOKENS;
constexpr int SUM_BYTES = PART_BYTES * (2 * CLUSTER - 1);
constexpr int BARRIER_BYTES = (16 * X_SLOTS + 32 + 127) / 128 * 128;

// All warps start with the same share of the registers; those that multiply then take what the others can spare.
constexpr int REGISTERS = 65536 / THREADS / 8 * 8;
constexpr int STAGER_REGISTERS = STAGERS == 4 && WARPGROUPS < 3 ? 128 : 88;
constexpr int ADDER_REGISTERS = 32;
constexpr int FREE_REGISTERS =
    (REGISTERS * THREADS - 32 * (STAGERS * STAGER_REGISTERS + ADDERS * ADDER_REGISTERS)) / (32 * MULTIPLIERS) / 8 * 8;
constexpr int MULTIPLIER_REGISTERS = FREE_REGISTERS > 240 ? 240 : FREE_REGISTERS;
static_assert(STAGER_REGISTERS <= REGISTERS && MULTIPLIER_REGISTERS >= REGISTERS);
constexpr int X_LOADS = 8;  // of 16 bytes a lane, in each of two batches that are on their way

// Either the sums of a chunk are scaled, TOKENS / 2 fma for a lane, or its weights before that, 32 multiplications.
constexpr bool SCALE_SUMS = SPANS == 1 && TOKENS <= 32;
constexpr float SUM_UNIT = ZEROS ? 1 : SCALING_UNIT;

static_assert(WARPGROUPS <= 3 && WG_K <= 2 && (STAGERS == 4 || STAGERS == 8));
static_assert(ROWS % CLUSTER == 0 && OWN_ROWS % 16 == 0 && OWN_ROWS <= 32 * ADDERS);
// A warpgroup that is done with a tile looks for its next chunk up to CHUNKS * (2 * WG_K - 1) on. Were that more than
// all slots, a barrier's parity would not tell that chunk from one a round earlier.
static_assert(X_SLOTS >= CHUNKS * (2 * WG_K - 1));

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

// What a block has to do.
struct Work {
    Tiles tiles;
    int slice_begin, slice_end;  // of K, in units, for this block
    int chunks;                  // of that slice
    int slots;                   // for chunks of x
    bool resident;               // each chunk of x has a slot for good
};

// Addresses in shared memory.
struct Places {
    u32 filled, emptied;                    // a barrier per slot of x
    u32 outgoing_filled, outgoing_emptied;  // barriers
    u32 incoming_filled, incoming_emptied;
    u32 x, outgoing, incoming, rings;
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

// What a lane has of the sums of 16 rows from tile_row on, and where they go, by halves of the tokens.
struct Sums {
    const float *sums;
    u32 outgoing;
    int tile_row;

    template <class Visit>
    __device__ __forceinline__ void visit(int half, Visit visit) const {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = tile_row + 8 * h + lane_id() / 4;
            const u32 to = outgoing + row * (4 * TOKENS), twist = opaque(sum_swizzle(row));
#pragma unroll
            for (int c = half * (TOKENS / 16); c < (half + 1) * (TOKENS / 16); ++c)
                visit(to + 8 * ((4 * c + lane_id() % 4) ^ twist), sums + 4 * c + 2 * h);
        }
    }
    template <int HALF>
    __device__ __forceinline__ void store() const {
        visit(HALF, [](u32 to, const float v[2]) { store_floats(to, v[0], v[1]); });
    }
    // Add what is there.
    template <int HALF>
    __device__ __forceinline__ void add() const {
        visit(HALF, [](u32 to, const float v[2]) {
            float other[2];
            load_floats(other, to);
            store_floats(to, v[0] + other[0], v[1] + other[1]);
        });
    }
};

__device__ __forceinline__ void multiply(const Weight &w, const Work &work, const Places &at, int warp) {
    const int lane = lane_id(), row = lane / 4;
    const int group_k = warp / 4 % WG_K, group_n = warp / 4 / WG_K;
    const int tile_row = 64 * group_n + WARP_ROWS * (warp % 4);
    const u32 ring = at.rings + warp * (DEPTH * SLOT_BYTES);

    const Walk walk = {work.tiles, work.slice_begin + group_k, work.slice_end, tile_row};
    Copier copier(w, walk);
    const u32 read_place = place_of(lane % 16, lane / 16);
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) copier.copy_next(ring + d * SLOT_BYTES);
    arrive_at_cluster();
    __syncthreads();

    // The chunks of x of all tiles go through the slots in turn; this warpgroup takes those of every WG_K-th unit. A
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
        max(walk.unit_end - walk.first_unit + UNIT_STRIDE - 1, 0) / UNIT_STRIDE * UNIT_STRIDE * CHUNKS;

    u32 read_at = ring;
    int turn = 0;
#pragma unroll 1
    for (int tile = work.tiles.first; tile < work.tiles.end; tile += work.tiles.stride, ++turn) {
        const u32 parity = scale_parity(w, tile * ROWS + tile_row + row);
        if (work.resident) slot = CHUNKS * group_k;
        int held = -1;  // slot whose chunk is being multiplied
        auto release = [&] {  // once a warp: the slot is filled anew when all 4 * WG_N that read it have arrived
            if (held >= 0 && lane == 0) barrier_arrive(at.emptied + 8 * held);
        };
        float sums[TOKENS / 2] = {}, scaled[TOKENS / 2] = {}, scale_of_sums[2] = {};
        auto add_scaled = [&] {
#pragma unroll
            for (int i = 0; i < TOKENS / 2; ++i) scaled[i] += scale_of_sums[i / 2 % 2] * sums[i];
        };
#pragma unroll 1
        for (int unit = walk.first_unit; unit < walk.unit_end; unit += UNIT_STRIDE) {
            wait_for_copies<DEPTH - 1>();
            __syncwarp();
            const LaneScales lane_scales = {read_at, u32(row), parity, unit};
            u32 scales[LANE_ROWS][SPAN_PAIRS], zeros[LANE_ROWS][SPAN_PAIRS];
            load_scales(scales, lane_scales, w, SCALE);
            if (ZEROS) load_scales(zeros, lane_scales, w, ZERO_POINT);
#pragma unroll
            for (int part = 0; part < CHUNKS; ++part) {
                u32 word[4][2];  // of rows `row` and `row + 8`
#pragma unroll
                for (int j = 0; j < 4; j += 2) {
                    u32 v[4];
                    load_matrices(v, read_at + (read_place ^ 16 * (4 * part + j)));
                    word[j][0] = v[0], word[j][1] = v[1], word[j + 1][0] = v[2], word[j + 1][1] = v[3];
                }
                if (part == CHUNKS - 1) {
                    __syncwarp();
                    copier.copy_next(read_at);
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
                            const int span = part * SPANS + (first + j) * SPANS / 4;
                            u32 pair[4];
                            unpack_for_scaling(word[first + j][h], pair);
#pragma unroll
                            for (int i = 0; i < 4; ++i) {
                                if (ZEROS) pair[i] = subtract_zero_point(pair[i], twice_of_span(zeros[h], span));
                                if (!SCALE_SUMS) pair[i] = multiply2(pair[i], twice_of_span(scales[h], span));
                                a[2 * j + i / 2][i % 2 * 2 + h] = pair[i];
                            }
                        }
                    if (SCALE_SUMS && first == 0) {
                        wgmma_wait<0>();
                        add_scaled();
#pragma unroll
                        for (int h = 0; h < 2; ++h) scale_of_sums[h] = to_float(twice_of_span(scales[h], part));
                    }
                    wgmma_fence();
#pragma unroll
                    for (int s = 0; s < 4; ++s)
                        wgmma(sums, a[s], b + u32(2 * first + s) * (STEP_BYTES / 16), !SCALE_SUMS || first + s > 0);
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
        if (SCALE_SUMS) add_scaled();
        if (!work.resident) {
            release();
            advance(work.chunks - own_chunks);
            if (slot < 0) slot += work.slots, phase ^= 1;
        }

        if (turn > 0) barrier_wait(at.outgoing_emptied, (turn - 1) & 1);
        const Sums own{SCALE_SUMS ? scaled : sums, at.outgoing, tile_row};
#if WG_K == 2
        // Each of two warps with the same rows gets the sums of the other for half of the tokens, and adds its own.
        if (group_k == 0)
            own.store<1>();
        else
            own.store<0>();
        warps_barrier(1 + 4 * group_n + warp % 4, 64);
        if (group_k == 0)
            own.add<0>();
        else
            own.add<1>();
#else
        own.store<0>();
        own.store<1>();
#endif
        __syncwarp();
        if (lane == 0) barrier_arrive(at.outgoing_filled);
    }
    wait_for_cluster();
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
    const int tile_count = max((work.tiles.end - work.tiles.first + work.tiles.stride - 1) / work.tiles.stride, 0);
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
    for (int tile = work.tiles.first; tile < work.tiles.end; tile += work.tiles.stride, ++turn) {
        const int n = tile * ROWS + rank * OWN_ROWS + own;
        const u32 own_bias = bias != nullptr && n < N ? load_half(bias + n) : 0;
        barrier_wait(at.outgoing_filled, turn & 1);
#if CLUSTER > 1
        if (thread == 0) barrier_arrive_and_expect(at.incoming_filled, PART_BYTES * (CLUSTER - 1));
        if (turn > 0) barrier_wait(at.incoming_emptied, (turn - 1) & 1);
#pragma unroll 1
        for (int i = 1; i < CLUSTER; ++i) {
            const int to = (rank + i) % CLUSTER;
            const u32 place = map_to_rank(at.incoming + (rank - (rank > to)) * PART_BYTES, to);
            const u32 filled = map_to_rank(at.incoming_filled, to);
#pragma unroll 4
            for (int at_byte = 8 * thread; at_byte < PART_BYTES; at_byte += 8 * 32 * ADDERS) {
                float v[2];
                load_floats(v, at.outgoing + to * PART_BYTES + at_byte);
                store_floats_async(place + at_byte, v[0], v[1], filled);
            }
        }
        barrier_wait(at.incoming_filled, turn & 1);
#endif
        constexpr int PAIRS_AT_ONCE = 32 * ADDERS / OWN_ROWS;
        const int nth = thread / OWN_ROWS;  // threads from OWN_ROWS * PAIRS_AT_ONCE on have no pair
#pragma unroll 1
        for (int pair = nth < PAIRS_AT_ONCE ? nth : TOKENS / 2; pair < TOKENS / 2; pair += PAIRS_AT_ONCE) {
            const u32 place = own * (4 * TOKENS) + 8 * (pair ^ sum_swizzle(own));
            float sum[2] = {};
#pragma unroll
            for (int i = 0; i < CLUSTER; ++i) {
                float v[2];
                load_floats(v, place + (i == rank ? at.outgoing + i * PART_BYTES
                                                  : at.incoming + (i - (i > rank)) * PART_BYTES));
                sum[0] += v[0];
                sum[1] += v[1];
            }
#pragma unroll
            for (int e = 0; e < 2; ++e)
                if (n < N && 2 * pair + e < tokens) {
                    const float in_ones = SUM_UNIT * sum[e];
                    out[(2 * pair + e) * out_row_stride + n] = from_float(in_ones + to_float(own_bias));
                }
        }
        __syncwarp();
        if (lane_id() == 0) barrier_arrive(at.outgoing_emptied);
#if CLUSTER > 1
        // Only a block that goes on to another tile listens; one that does not may be gone.
        if (tile + work.tiles.stride < work.tiles.end && lane_id() < CLUSTER)
            remote_barrier_arrive(map_to_rank(at.incoming_emptied, lane_id()));
#endif
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
    work.tiles = {int(blockIdx.x) / CLUSTER, (N + ROWS - 1) / ROWS, int(gridDim.x) / CLUSTER};
    work.slice_begin = units * rank / CLUSTER;
    work.slice_end = units * (rank + 1) / CLUSTER;
    work.chunks = (work.slice_end - work.slice_begin) * CHUNKS;
    work.slots = min(X_SLOTS, (units + CLUSTER - 1) / CLUSTER * CHUNKS);
    work.resident = work.chunks <= work.slots;

    Places at;
    at.filled = shared_address(dynamic_shared_memory());
    at.emptied = at.filled + 8 * X_SLOTS;
    at.outgoing_filled = at.emptied + 8 * X_SLOTS;
    at.outgoing_emptied = at.outgoing_filled + 8;
    at.incoming_filled = at.outgoing_emptied + 8;
    at.incoming_emptied = at.incoming_filled + 8;
    at.x = at.filled + BARRIER_BYTES;
    at.outgoing = at.x + work.slots * X_BYTES;
    at.incoming = at.outgoing + CLUSTER * PART_BYTES;
    at.rings = at.outgoing + SUM_BYTES;
    if (warp == MULTIPLIERS) {
        if (lane_id() == 0) {
            for (int i = 0; i < X_SLOTS; ++i) {
                barrier_init(at.filled + 8 * i, STAGERS);
                barrier_init(at.emptied + 8 * i, 4 * WG_N);
            }
            barrier_init(at.outgoing_filled, MULTIPLIERS);
            barrier_init(at.outgoing_emptied, ADDERS);
            barrier_init(at.incoming_filled, 1);  // and the bytes of other blocks
            barrier_init(at.incoming_emptied, CLUSTER * ADDERS);
            end_of_barrier_init();
        }
        __syncwarp();
    }

    if (warp < MULTIPLIERS) {
        grow_to_registers<MULTIPLIER_REGISTERS>();
#if !ZEROS
        const u16 *zero_points = nullptr;
#endif
        const Weight w =
            make_weight(qweight, scales, zero_points, qweight_row_stride, scales_row_stride, N, K, group_size);
        multiply(w, work, at, warp);
    } else if (warp < MULTIPLIERS + STAGERS) {
        shrink_to_registers<STAGER_REGISTERS>();
        stage_x(work, at, x + m0 * x_row_stride, x_row_stride, tokens, K, warp - MULTIPLIERS);
    } else {
        shrink_to_registers<ADDER_REGISTERS>();
        add_up(work, at, bias, out + m0 * out_row_stride, out_row_stride, tokens, N, rank);
    }
}
