// A cluster of blocks on a CPU, and as much of CUDA as our kernels use.
//
// Each thread of the cluster is a fiber; the scheduler (run.cpp) runs one until it waits for others, in any order.
// What the hardware does in the background lands either as late as the kernel's own waits allow, or at once: `late`.
// Counted as a fault: a load or store outside the arrays that the test has named or outside shared memory, a barrier
// used wrongly, a block reached before it started or after it ended, a thread that waits for ever.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <vector>

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using std::max;
using std::min;

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __cluster_dims__(...)

struct uint4 {
    u32 x, y, z, w;
};
struct Index {
    int x, y;
};
extern Index threadIdx, blockIdx, gridDim;

// A barrier of a warp, a block or a cluster.
struct Barrier {
    int expected = 0, arrived = 0, turn = 0;
};
// A barrier in shared memory; phases are counted, the hardware keeps the lowest bit.
struct MBarrier {
    int count = 0, pending = 0, phase = 0;
    long bytes = 0;  // announced and not yet come; below zero if they come first
};
struct Block {
    Barrier barrier;
    std::vector<Barrier> warps;
    std::map<u32, Barrier> of_some_warps;  // by number
    std::vector<unsigned char> shared;
    std::map<u32, MBarrier> mbarriers;  // by address
    bool started = false;
    int running = 0;  // threads
    int spare_registers = 0, shrinks = 0;
};
// A store of one block to another that counts itself at a barrier there.
struct AsyncStore {
    u32 to, barrier;
    float pair[2];
};
struct Cluster {
    Barrier barrier;
    std::vector<Block> blocks;
    std::vector<AsyncStore> on_their_way;
};
// A copy in the background: done when it is waited for, not before.
struct Copy {
    u32 to, bytes;
    unsigned char from[16];
};
// A wgmma in the background: this lane's share.
struct Product {
    float *c;
    u32 a[4];
    u64 b;
    bool add;  // to c
};
struct Fiber {
    ucontext_t context;
    Index thread, block;
    int rank = 0, cluster_turn = 0;
    bool done = false, previous_kernel_ended = false;
    const int *waits_for = nullptr;  // runs on once this is no longer `turn`
    int turn = 0, rounds_to_pass = 0;
    std::deque<std::vector<Copy>> copies{1};       // by group; the last is open
    std::deque<std::vector<Product>> products{1};  // likewise
    u64 operands = 0;                              // of all products, a hash
    std::vector<Copy> operand_stores;              // which the tensor cores do not see yet
    // What the lane brings to an instruction of its whole warp.
    u32 value, address, a[4], b[2], matrices[4];
    u32 *loaded;
    float *c;
};
extern Cluster *cluster;
extern Fiber *current;
extern bool late;

void fault(const char *what);
void pause(const int *turn, int value);  // let others run until *turn is not `value`
bool is_inside(const void *p, size_t bytes);

inline Block &block() { return cluster->blocks[current->rank]; }
inline int lane() { return threadIdx.x % 32; }
inline Barrier &warp_barrier() { return block().warps[threadIdx.x / 32]; }
inline Fiber *warp_fibers() { return current - threadIdx.x % 32; }

inline int arrive(Barrier &barrier) {
    const int turn = barrier.turn;
    if (++barrier.arrived == barrier.expected) {
        barrier.arrived = 0;
        ++barrier.turn;
    }
    return turn;
}
inline void wait(Barrier &barrier) { pause(&barrier.turn, arrive(barrier)); }
// Wait for all; the last to come does the work of all.
template <class Work>
inline void meet(Barrier &barrier, Work work) {
    if (barrier.arrived + 1 == barrier.expected) work();
    wait(barrier);
}

inline void __syncthreads() { wait(block().barrier); }
inline void __syncwarp() { wait(warp_barrier()); }
inline u32 __shfl_sync(u32, u32 v, int from) {
    current->value = v;
    wait(warp_barrier());
    const u32 result = warp_fibers()[from % 32].value;
    wait(warp_barrier());
    return result;
}
inline u32 __reduce_or_sync(u32, u32 v) {
    current->value = v;
    wait(warp_barrier());
    u32 all = 0;
    for (int lane = 0; lane < 32; ++lane) all |= warp_fibers()[lane].value;
    wait(warp_barrier());
    return all;
}
inline bool __any_sync(u32, bool v) { return __reduce_or_sync(~0u, v); }

// An address in shared memory: the block's rank above 20 bits of offset.
inline u32 shared_address(const void *p) {
    return u32(current->rank) << 20 | u32(static_cast<const unsigned char *>(p) - block().shared.data());
}
// `bytes` of shared memory at `address`, or null, a fault.
inline unsigned char *shared_memory(u32 address, u32 bytes) {
    Block &of = cluster->blocks[address >> 20];
    const u32 at = address & 0xFFFFF;
    if (!of.started || !of.running)
        fault("reaches a block that has not started or has ended");
    else if (at + bytes > of.shared.size() || at % bytes)
        fault("accesses shared memory outside, or not aligned");
    else
        return &of.shared[at];
    return nullptr;
}
inline void store_shared(u32 address, const void *from, u32 bytes) {
    if (unsigned char *to = shared_memory(address, bytes)) std::memcpy(to, from, bytes);
}
inline void load_shared_bytes(void *to, u32 address, u32 bytes) {
    if (int(address >> 20) != current->rank) fault("loads from another block");
    if (const unsigned char *from = shared_memory(address, bytes)) std::memcpy(to, from, bytes);
}

template <class T>
inline bool may_load(const T *p, size_t bytes) {
    const bool fine = is_inside(p, bytes) && uintptr_t(p) % bytes == 0;
    if (!fine) fault("loads outside the arrays, or not aligned");
    return fine;
}

// 16-bit numbers of the dtype that BF16 chooses.
inline float to_float(u32 bits) {
#if BF16
    const u32 wide = bits << 16;
    float v;
    std::memcpy(&v, &wide, 4);
    return v;
#else
    static const std::vector<float> all = [] {  // converting takes a call where the CPU has no instruction for it
        std::vector<float> values(1 << 16);
        for (u32 i = 0; i < values.size(); ++i) {
            const u16 narrow = u16(i);
            _Float16 v;
            std::memcpy(&v, &narrow, 2);
            values[i] = float(v);
        }
        return values;
    }();
    return all[u16(bits)];
#endif
}
inline u16 from_double(double v) {
#if BF16
    const float f = float(v);  // what is rounded here fits float exactly, or has been one already
    u32 bits;
    std::memcpy(&bits, &f, 4);
    return u16((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
#else
    const _Float16 h = _Float16(v);
    u16 bits;
    std::memcpy(&bits, &h, 2);
    return bits;
#endif
}
