// The functions of csrc/include/wgmma.h for a CPU.
#pragma once

#include "ptx.h"

constexpr u64 BARRIER_BYTES_HELD = 0xBA221E2BA221E2BA;  // in a barrier's place: whoever stores there is found out

// The barrier at `address`, or null, a fault.
inline MBarrier *mbarrier(u32 address) {
    Block &of = cluster->blocks[address >> 20];
    const auto found = of.mbarriers.find(address);
    if (found == of.mbarriers.end())
        fault("uses a barrier that is not initialised");
    else if (const unsigned char *held = shared_memory(address, 8)) {
        if (std::memcmp(held, &BARRIER_BYTES_HELD, 8)) fault("stores into a barrier");
        return &found->second;
    }
    return nullptr;
}
inline void end_phase_if_complete(MBarrier &barrier) {
    if (barrier.pending == 0 && barrier.bytes == 0) {
        barrier.pending = barrier.count;
        ++barrier.phase;
    }
}
inline void barrier_init(u32 address, u32 count) {
    store_shared(address, &BARRIER_BYTES_HELD, 8);
    MBarrier &barrier = block().mbarriers[address];
    if (barrier.count) fault("initialises a barrier twice");
    barrier.count = barrier.pending = int(count);
}
inline void end_of_barrier_init() {}
inline void arrive_and_expect(u32 address, u32 bytes) {
    MBarrier *barrier = mbarrier(address);
    if (!barrier) return;
    if (barrier->pending == 0) fault("arrives at a barrier more often than it counts");
    barrier->bytes += bytes;
    barrier->pending = max(barrier->pending - 1, 0);
    end_phase_if_complete(*barrier);
}
inline void barrier_arrive_and_expect(u32 address, u32 bytes) {
    if (int(address >> 20) != current->rank) fault("expects bytes at another block's barrier");
    arrive_and_expect(address, bytes);
}
inline void barrier_arrive(u32 address) { barrier_arrive_and_expect(address, 0); }
inline void remote_barrier_arrive(u32 address) { arrive_and_expect(address, 0); }
inline void barrier_wait(u32 address, u32 parity) {
    if (int(address >> 20) != current->rank) fault("waits at another block's barrier");
    if (const MBarrier *barrier = mbarrier(address))
        while (u32(barrier->phase & 1) == parity) pause(&barrier->phase, barrier->phase);
}

inline void warps_barrier(u32 number, int threads) {
    if (number < 1 || number > 15 || threads % 32) fault("uses a barrier that there is not");
    Barrier &barrier = block().of_some_warps[number];
    if (barrier.arrived && barrier.expected != threads) fault("meets at a barrier with another count");
    barrier.expected = threads;
    wait(barrier);
}

inline void land(const AsyncStore &store) {
    store_shared(store.to, store.pair, 8);
    if (MBarrier *barrier = mbarrier(store.barrier)) {
        barrier->bytes -= 8;
        end_phase_if_complete(*barrier);
    }
}
inline void store_floats_async(u32 to, float a, float b, u32 barrier) {
    if (CLUSTER == 1 || to >> 20 != barrier >> 20) fault("stores without a cluster, or signals another block");
    cluster->on_their_way.push_back({to, barrier, {a, b}});
    if (late) return;  // the scheduler lets them land when no thread can run
    land(cluster->on_their_way.back());
    cluster->on_their_way.pop_back();
}

inline void store_floats(u32 to, float a, float b) {
    const float pair[2] = {a, b};
    if (int(to >> 20) != current->rank) fault("stores to another block");
    store_shared(to, pair, 8);
}
inline void load_floats(float v[2], u32 from) { load_shared_bytes(v, from, 8); }

// The tensor cores see what is stored here only after the lane's fence.
inline void store_matrices(u32 to, uint4 v) {
    current->address = to;
    std::memcpy(current->matrices, &v, 16);
    meet(warp_barrier(), [] {
        Fiber *lanes = warp_fibers();
        for (int lane = 0; lane < 32; ++lane)
            for (int m = 0; m < 4; ++m) {
                const u32 row = lanes[8 * m + lane / 4].address;
                if (row % 16) fault("stores a matrix row that is not aligned");
                Copy store{row + lane % 4 * 4, 4, {}};
                std::memcpy(store.from, &lanes[lane].matrices[m], 4);
                lanes[lane].operand_stores.push_back(store);
            }
    });
}
inline void end_of_operand_stores() {
    for (const Copy &store : current->operand_stores) store_shared(store.to, store.from, store.bytes);
    current->operand_stores.clear();
}

inline u64 operand(u32 at, u32 k_stride, u32 row_stride) {
    if (at % 16 || k_stride % 16 || row_stride % 16) fault("describes an operand that is not aligned");
    return u64(row_stride / 16) << 32 | (k_stride / 16) << 16 | (at & 0x3FFFF) / 16;
}

// c = a * b, or c += a * b, for one product of a warp's 16 rows. The hardware takes four warps at a time; that they all
// ask for the same is checked in the end (run.cpp), so that no warp waits here for another, which on the device it may
// not.
inline void multiply_warp(size_t product) {
    Fiber *lanes = warp_fibers();
    const u64 b = lanes[0].products.front()[product].b;
    const u32 *operands[32];
    float rows[16][16], columns[TOKENS][16];
    for (int lane = 0; lane < 32; ++lane) operands[lane] = lanes[lane].products.front()[product].a;
    unpack_rows(rows, operands);
    for (int token = 0; token < TOKENS; ++token)
        for (int half = 0; half < 2; ++half) {
            const u32 k_stride = b >> 16 & 0x3FFF, row_stride = b >> 32 & 0x3FFF;
            const u32 matrix = u32(b & 0x3FFF) + half * k_stride + token / 8 * row_stride;
            u16 row[8] = {};
            load_shared_bytes(row, u32(current->rank) << 20 | (matrix + token % 8) * 16, 16);
            for (int i = 0; i < 8; ++i) columns[token][8 * half + i] = to_float(row[i]);
        }
    for (int lane = 0; lane < 32; ++lane) {
        const Product &own = lanes[lane].products.front()[product];
        for (int i = 0; i < TOKENS / 2; ++i) {
            if (!own.add) own.c[i] = 0;
            add_product(&own.c[i], rows[lane / 4 + i / 2 % 2 * 8], columns[i / 4 * 8 + lane % 4 * 2 + i % 2]);
        }
    }
}
// All lanes of the warp come here before the work is done, and leave when it is.
inline void finish_products(size_t groups_left) {
    meet(warp_barrier(), [=] {
        while (current->products.size() > groups_left + 1) {
            for (size_t product = 0; product < current->products.front().size(); ++product) multiply_warp(product);
            for (int lane = 0; lane < 32; ++lane) warp_fibers()[lane].products.pop_front();
        }
    });
}
inline void wgmma_fence() {}
inline void wgmma(float *c, const u32 a[4], u64 b, bool add) {
    current->products.back().push_back({c, {a[0], a[1], a[2], a[3]}, b, add});
    current->operands = current->operands * 0x9E3779B97F4A7C15 + b;
}
inline void wgmma_commit() {
    current->products.emplace_back();
    if (!late) finish_products(0);
}
template <int LEFT>
inline void wgmma_wait() {
    finish_products(LEFT);
}

// A warp that wants registers waits until others have given enough back.
inline int first_registers() { return 65536 / block().barrier.expected / 8 * 8; }
template <int COUNT>
inline void shrink_to_registers() {
    static_assert(COUNT % 8 == 0 && COUNT >= 24);
    block().spare_registers += first_registers() - COUNT;
    ++block().shrinks;
}
template <int COUNT>
inline void grow_to_registers() {
    static_assert(COUNT % 8 == 0 && COUNT <= 256);
    Block &own = block();
    const int wanted = COUNT - first_registers();
    if (wanted < 0) fault("grows to fewer registers than it has");
    while (own.spare_registers < wanted) pause(&own.shrinks, own.shrinks);
    own.spare_registers -= wanted;
}
