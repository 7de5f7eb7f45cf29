// The functions of csrc/include/ptx.h for a CPU, and as much of CUDA as w4a16_skinny.cu uses.
//
// Each thread of a cluster is a fiber; the scheduler runs one until it waits for others. A load or store outside the
// arrays that the test has named, or outside the block's shared memory, is counted as a fault.
#ifndef GRISTMILL_PTX_H
#define GRISTMILL_PTX_H

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
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
extern thread_local Index threadIdx, blockIdx, gridDim;

struct Barrier {
    int expected = 0, arrived = 0, turn = 0;
};
struct Warp {
    Barrier barrier;
    u32 a[32][4], b[32][2], value[32];
};
struct Block {
    Barrier barrier;
    std::vector<Warp> warps;
    std::vector<unsigned char> shared;
};
struct Cluster {
    Barrier barrier;
    std::vector<Block> blocks;
};
// A copy in the background: done when it is waited for, not before.
struct Copy {
    u32 to, bytes;
    unsigned char from[16];
};
struct Fiber {
    ucontext_t context;
    std::unique_ptr<unsigned char[]> stack;
    Index thread, block;
    int rank = 0, cluster_turn = 0;
    std::deque<std::vector<Copy>> copies{1};  // by group; the last is open
    const int *waits_for = nullptr;  // runs on once this is no longer `turn`
    int turn = 0;
    bool done = false;
};
extern Cluster *cluster;
extern Fiber *current;
extern long faults;

void pause(const int *turn, int value);  // let others run until *turn is not `value`
bool is_inside(const void *p, size_t bytes);

inline Block &block() { return cluster->blocks[current->rank]; }
inline Warp &warp_of_lane() { return block().warps[threadIdx.x / 32]; }
inline int lane() { return threadIdx.x % 32; }

inline int arrive(Barrier &barrier) {
    const int turn = barrier.turn;
    if (++barrier.arrived == barrier.expected) {
        barrier.arrived = 0;
        ++barrier.turn;
    }
    return turn;
}
inline void wait(Barrier &barrier) { pause(&barrier.turn, arrive(barrier)); }

inline void __syncthreads() { wait(block().barrier); }
inline void __syncwarp() { wait(warp_of_lane().barrier); }
inline u32 __shfl_sync(u32, u32 v, int from) {
    Warp &warp = warp_of_lane();
    warp.value[lane()] = v;
    wait(warp.barrier);
    const u32 result = warp.value[from % 32];
    wait(warp.barrier);
    return result;
}
inline int __ffs(int v) { return v ? __builtin_ctz(v) + 1 : 0; }

inline u32 twice(u32 a) { return a * 0x00010001; }
inline u32 mask_or(u32 a, u32 mask, u32 bits) { return (a & mask) | bits; }

inline double to_double(u16 bits) {
#if BF16
    const u32 wide = u32(bits) << 16;
    float v;
#else
    const u16 wide = bits;
    _Float16 v;
#endif
    std::memcpy(&v, &wide, sizeof v);
    return double(v);
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
inline u32 fma2(u32 a, u32 b, u32 c) {
    u32 d = 0;
    for (int s = 0; s < 32; s += 16)
        d |= u32(from_double(to_double(a >> s) * to_double(b >> s) + to_double(c >> s))) << s;
    return d;
}
inline u32 add2(u32 a, u32 b) {
    const u32 one = from_double(1.0);
    return fma2(a, one | one << 16, b);
}
inline u32 multiply2(u32 a, u32 b) { return fma2(a, b, 0x80008000); }
inline float to_float(u32 a) { return float(to_double(u16(a))); }
inline u16 from_float(float a) { return from_double(a); }

inline void mma_16x8x16(float c[4], const u32 a[4], u32 b0, u32 b1) {
    Warp &warp = warp_of_lane();
    std::copy(a, a + 4, warp.a[lane()]);
    warp.b[lane()][0] = b0;
    warp.b[lane()][1] = b1;
    wait(warp.barrier);
    for (int i = 0; i < 4; ++i) {
        const int row = lane() / 4, column = lane() % 4 * 2 + i % 2;
        double sum = 0;
        for (int quad = 0; quad < 4; ++quad)
            for (int half = 0; half < 2; ++half)
                for (int s = 0; s < 32; s += 16)
                    sum += to_double(warp.a[4 * row + quad][i / 2 + 2 * half] >> s) *
                           to_double(warp.b[4 * column + quad][half] >> s);
        c[i] = float(c[i] + sum);
    }
    wait(warp.barrier);
}

template <class T>
inline bool may_read(const T *p, size_t bytes) {
    const bool fine = is_inside(p, bytes) && uintptr_t(p) % bytes == 0;
    faults += !fine;
    return fine;
}

inline void load_half(u32 &d, const u16 *p, bool wanted) {
    if (wanted && may_read(p, 2)) d = *p;
}

// An address in shared memory: the block's rank above 20 bits of offset.
inline u32 shared_address(const void *p) {
    return u32(current->rank) << 20 | u32(static_cast<const unsigned char *>(p) - block().shared.data());
}
inline void store_shared(u32 address, const void *from, u32 bytes) {
    std::vector<unsigned char> &shared = cluster->blocks[address >> 20].shared;
    const u32 at = address & 0xFFFFF;
    if (at + bytes > shared.size() || at % bytes) {
        ++faults;
        return;
    }
    std::memcpy(&shared[at], from, bytes);
}
inline uint4 load_16_bytes(const u16 *p, bool inside) {
    uint4 v = {};
    if (inside && may_read(p, 16)) std::memcpy(&v, p, 16);
    return v;
}

// A copy reads its source at once, as the arrays do not change, and writes when it is waited for.
inline void copy_async(u32 to, const void *from, u32 bytes, u32 count) {
    Copy copy{to, bytes, {}};
    const unsigned char *start = static_cast<const unsigned char *>(from);
    if (count) {
        const bool inside = is_inside(start, count);
        faults += !inside || uintptr_t(from) % bytes != 0;
        if (inside) std::memcpy(copy.from, from, count);
    }
    current->copies.back().push_back(copy);
}
inline void copy_16_bytes_async(u32 to, const u32 *from, u32 count) { copy_async(to, from, 16, count); }
inline void copy_4_bytes_async(u32 to, u64 from, u32 count) {
    copy_async(to, reinterpret_cast<const void *>(from), 4, count);
}
inline void close_copies() { current->copies.emplace_back(); }
template <int LEFT>
inline void wait_for_copies() {
    for (; current->copies.size() > LEFT + 1; current->copies.pop_front())
        for (const Copy &copy : current->copies.front()) store_shared(copy.to, copy.from, copy.bytes);
}

inline void load_shared(u32 w[4], const unsigned char *p) { std::memcpy(w, p, 16); }

inline void wait_for_previous_kernel() {}
inline void let_next_kernel_start() {}

inline int cluster_rank() { return current->rank; }
inline void cluster_arrive() { current->cluster_turn = arrive(cluster->barrier); }
inline void cluster_arrive_without_stores() { cluster_arrive(); }
inline void cluster_wait() { pause(&cluster->barrier.turn, current->cluster_turn); }
inline void cluster_barrier() { wait(CLUSTER > 1 ? cluster->barrier : block().barrier); }
inline u32 map_to_rank(u32 address, int rank) { return u32(rank) << 20 | (address & 0xFFFFF); }
inline void store_float(u32 address, float v) { store_shared(address, &v, 4); }

inline unsigned char *dynamic_shared_memory() { return block().shared.data(); }

#endif
