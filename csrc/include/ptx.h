// The instructions that our CUDA kernels write by hand, one function each. BF16 chooses the dtype; CLUSTER above 1
// needs sm90. No vendor header is needed. tests/cuda_on_host has the same functions for a CPU, in a file with the same
// guard: it is included first and keeps this one out, which #pragma once could not.
#ifndef GRISTMILL_PTX_H
#define GRISTMILL_PTX_H

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

// In both halves: the lower or the higher half of a pair.
__device__ __forceinline__ u32 twice_low(u32 a) {
    u32 d;
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {low, low}; }" : "=r"(d) : "r"(a));
    return d;
}
__device__ __forceinline__ u32 twice_high(u32 a) {
    u32 d;
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {high, high}; }" : "=r"(d) : "r"(a));
    return d;
}

// d = (a & mask) | bits, one LOP3: the truth table of (a & b) | c is 0xEA.
__device__ __forceinline__ u32 mask_or(u32 a, u32 mask, u32 bits) {
    u32 d;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(d) : "r"(a), "r"(mask), "r"(bits));
    return d;
}

#if BF16
constexpr u32 ONE = 0x3F803F80;  // 1, in both halves

// a * b + c on pairs of bfloat16, rounded once. sm80 has no packed add of these; x * 1 + c is one.
__device__ __forceinline__ u32 fma2(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
__device__ __forceinline__ u32 add2(u32 a, u32 b) { return fma2(a, ONE, b); }
__device__ __forceinline__ u32 multiply2(u32 a, u32 b) { return fma2(a, b, 0x80008000); }

__device__ __forceinline__ float to_float(u32 a) { return __uint_as_float(a << 16); }
__device__ __forceinline__ u16 from_float(float a) {
    u16 d;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(d) : "f"(a));
    return d;
}
#else
constexpr u32 ONE = 0x3C003C00;

// a * b + c and a + b on pairs of float16, rounded once.
__device__ __forceinline__ u32 fma2(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
__device__ __forceinline__ u32 add2(u32 a, u32 b) {
    u32 d;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
__device__ __forceinline__ u32 multiply2(u32 a, u32 b) {
    u32 d;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

__device__ __forceinline__ float to_float(u32 a) {
    float d;
    asm("cvt.f32.f16 %0, %1;" : "=f"(d) : "h"(u16(a)));
    return d;
}
__device__ __forceinline__ u16 from_float(float a) {
    u16 d;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(d) : "f"(a));
    return d;
}
#endif

// Minus a pair; not by XOR, as an instruction that takes this can negate for free.
__device__ __forceinline__ u32 negate2(u32 a) {
    u32 d;
#if BF16
    asm("neg.bf16x2 %0, %1;" : "=r"(d) : "r"(a));
#else
    asm("neg.f16x2 %0, %1;" : "=r"(d) : "r"(a));
#endif
    return d;
}

// c += a * b on the tensor cores, 16 x 8 x 16, products exact, sums in float32. With row = lane / 4, quad = lane % 4:
//   a[0], a[1]  rows `row`, `row + 8`, k pair `quad`      b[0]  column `row`, k pair `quad`
//   a[2], a[3]  the same rows,         k pair `quad + 4`  b[1]  column `row`, k pair `quad + 4`
//   c[0], c[1]  row `row`,     columns 2 * quad, 2 * quad + 1
//   c[2], c[3]  row `row + 8`, the same columns
__device__ __forceinline__ void mma_16x8x16(float c[4], const u32 a[4], u32 b0, u32 b1) {
#if BF16
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#endif
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Load one 16-bit number; the neighbours in its sector are soon wanted by this warp or another, so through the L1.
__device__ __forceinline__ u32 load_half(const u16 *from) {
    u16 v;
    asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(v) : "l"(from));
    return v;
}

// Load 16 bytes, or zeros if not `inside`. The kernel before may have written them: not through the read-only path.
__device__ __forceinline__ uint4 load_16_bytes(const u16 *p, bool inside) {
    uint4 v = {};
    if (inside)
        asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                     : "l"(p)
                     : "memory");
    return v;
}

// Copy from global to shared memory in the background, or zeros if not `wanted`: 16 bytes past the L1, which are read
// once; BYTES, 4, 8 or 16, through the L1, as another copy soon wants the rest of their sector.
__device__ __forceinline__ void copy_16_bytes_async(u32 to, const u32 *from, bool wanted) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
                 :
                 : "r"(to), "l"(from), "r"(wanted ? 16 : 0)
                 : "memory");
}
template <int BYTES>
__device__ __forceinline__ void copy_async(u32 to, const u16 *from, bool wanted) {
    static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16);
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"
                 :
                 : "r"(to), "l"(from), "n"(BYTES), "r"(wanted ? BYTES : 0)
                 : "memory");
}

// Copies form groups: close the group of those since the last; wait until at most LEFT groups are on their way.
__device__ __forceinline__ void close_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

__device__ __forceinline__ void store_shared_word(u32 to, u32 v) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(v) : "memory");
}
// COUNT words, 1, 2 or 4, aligned as a whole.
template <int COUNT>
__device__ __forceinline__ void load_shared_words(u32 v[COUNT], u32 from) {
    static_assert(COUNT == 1 || COUNT == 2 || COUNT == 4);
    if constexpr (COUNT == 4)
        asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                     : "r"(from)
                     : "memory");
    else if constexpr (COUNT == 2)
        asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v[0]), "=r"(v[1]) : "r"(from) : "memory");
    else
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v[0]) : "r"(from) : "memory");
}
// From shared memory: a 16-bit number; four 8 x 8 matrices of such. Lane l gives with `from` the place of row l % 8 of
// matrix l / 8, 16 bytes, and gets of each matrix the pair (row l / 4, columns 2 * (l % 4)).
__device__ __forceinline__ u32 load_shared_half(u32 from) {
    u16 v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(from) : "memory");
    return v;
}
__device__ __forceinline__ void load_matrices(u32 v[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                 : "r"(from)
                 : "memory");
}

// Early start, sm90: a kernel that is launched for it begins before the one ahead in its stream has ended. `wait`
// returns when that one has ended and its stores are seen; at once if there was no early start. `let` allows the next
// kernel one.
#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void let_next_kernel_start() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
#else
__device__ __forceinline__ void wait_for_previous_kernel() {}
__device__ __forceinline__ void let_next_kernel_start() {}
#endif

__device__ __forceinline__ u32 shared_address(const void *p) { return u32(__cvta_generic_to_shared(p)); }

#if CLUSTER > 1
// The blocks of a cluster split K and add up through each other's shared memory. Arrival releases what was stored
// before it, waiting acquires; the release is a fence over the whole chip, which an arrival that follows no store can
// spare.
__device__ __forceinline__ int cluster_rank() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return int(rank);
}
__device__ __forceinline__ void cluster_arrive() {
    __syncwarp();
    asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_arrive_without_stores() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_barrier() {
    cluster_arrive();
    cluster_wait();
}

// The same place in the shared memory of block `rank`, and a store to it.
__device__ __forceinline__ u32 map_to_rank(u32 address, int rank) {
    u32 mapped;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
    return mapped;
}
__device__ __forceinline__ void store_float(u32 address, float v) {
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address), "f"(v) : "memory");
}
#else
__device__ __forceinline__ void cluster_barrier() { __syncthreads(); }
__device__ __forceinline__ void store_float(u32 address, float v) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(v) : "memory");
}
#endif

__device__ __forceinline__ unsigned char *dynamic_shared_memory() {
    extern __shared__ uint4 memory[];
    return reinterpret_cast<unsigned char *>(memory);
}

#endif
