// What only Hopper has, one function each: wgmma, barriers in shared memory, stores that signal a barrier of another
// block, registers that move between warps. Needs the target sm_90a; TOKENS is the n of the wgmma.
#pragma once

#include "ptx.h"

// A barrier in shared memory, 8 bytes: a phase ends when `count` arrivals and all announced bytes have come. Waiting
// for parity p returns once the latest phase that has ended is one of that parity; phases start at 0, so that before
// the first one ends, waiting for 1 returns at once.
__device__ __forceinline__ void barrier_init(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
__device__ __forceinline__ void end_of_barrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_arrive_and_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{ .reg .pred p;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
        "@!p bra again; }" ::"r"(barrier), "r"(parity)
        : "memory");
}

// Wait for `threads` of the block, all lanes of some warps, at one of 15 barriers that are not in memory, from 1 on.
__device__ __forceinline__ void warps_barrier(u32 barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

#if CLUSTER > 1
// Arrive at a barrier of another block; `barrier` comes from map_to_rank.
__device__ __forceinline__ void remote_barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Store 8 bytes into a block of the cluster and count them at a barrier of the same block: no fence, nothing to wait
// for. Illegal in a kernel that is launched without clusters.
__device__ __forceinline__ void store_floats_async(u32 to, float a, float b, u32 barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1,%2}, [%3];"
                 :
                 : "r"(to), "f"(a), "f"(b), "r"(barrier)
                 : "memory");
}
#endif

__device__ __forceinline__ void store_floats(u32 to, float a, float b) {
    asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(to), "f"(a), "f"(b) : "memory");
}
__device__ __forceinline__ void load_floats(float v[2], u32 from) {
    asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(v[0]), "=f"(v[1]) : "r"(from) : "memory");
}

// Store four 8 x 8 matrices of 16-bit numbers. Lane l gives of each matrix the pair (row l / 4, columns 2 * (l % 4)),
// and with `to` the place of row l % 8 of matrix l / 8, 16 bytes.
__device__ __forceinline__ void store_matrices(u32 to, uint4 v) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};"
                 :
                 : "r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}
// Order this thread's stores to shared memory before what the tensor cores read of them.
__device__ __forceinline__ void end_of_operand_stores() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Descriptor of an operand in shared memory: matrices of 8 rows of 16 bytes, each in one piece, the next one along k
// k_stride bytes on and the next 8 rows row_stride bytes on. Addresses carry the block's rank above their 18 bits.
__device__ __forceinline__ u64 operand(u32 at, u32 k_stride, u32 row_stride) {
    return u64(row_stride / 16) << 32 | (k_stride / 16) << 16 | (at & 0x3FFFF) / 16;
}

// Registers that wgmma reads or adds to may be written by others only before the fence and after the wait.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

#if BF16
#define WGMMA(n) "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 "
#else
#define WGMMA(n) "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.f16.f16 "
#endif
#define SUMS_4(i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define SUMS(i) SUMS_4(i), SUMS_4(i + 4)

// c += a * b, or c = a * b if not `add`, 64 x TOKENS x 16, by four warps of 16 rows each; a and c are laid out as in
// mma_16x8x16, c once for every 8 tokens.
__device__ __forceinline__ void wgmma(float c[TOKENS / 2], const u32 a[4], u64 b, bool add) {
#if TOKENS == 16
    asm volatile("{ .reg .pred add; setp.ne.b32 add, %13, 0;\n" WGMMA(16)
                 "{%0,%1,%2,%3,%4,%5,%6,%7}, {%8,%9,%10,%11}, %12, add, 1, 1, 0; }"
                 : SUMS(0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(add)));
#elif TOKENS == 32
    asm volatile("{ .reg .pred add; setp.ne.b32 add, %21, 0;\n" WGMMA(32)
                 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, "
                 "{%16,%17,%18,%19}, %20, add, 1, 1, 0; }"
                 : SUMS(0), SUMS(8)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(add)));
#else
    static_assert(TOKENS == 64);
    asm volatile("{ .reg .pred add; setp.ne.b32 add, %37, 0;\n" WGMMA(64)
                 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
                 "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
                 "{%32,%33,%34,%35}, %36, add, 1, 1, 0; }"
                 : SUMS(0), SUMS(8), SUMS(16), SUMS(24)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(add)));
#endif
}
#undef WGMMA
#undef SUMS
#undef SUMS_4

// Give registers of this warp back to the block, or take some that others gave back; all four warps of a warpgroup do.
template <int COUNT>
__device__ __forceinline__ void shrink_to_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
__device__ __forceinline__ void grow_to_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
