// The functions of csrc/include/ptx.h for a CPU.
#ifndef GRISTMILL_PTX_H
#define GRISTMILL_PTX_H

#include "machine.h"

inline u32 twice_low(u32 a) { return (a & 0xFFFF) * 0x00010001; }
inline u32 twice_high(u32 a) { return twice_low(a >> 16); }
inline u32 mask_or(u32 a, u32 mask, u32 bits) { return (a & mask) | bits; }

inline u32 fma2(u32 a, u32 b, u32 c) {
    u32 d = 0;
    for (int s = 0; s < 32; s += 16)
        d |= u32(from_double(double(to_float(a >> s)) * to_float(b >> s) + to_float(c >> s))) << s;
    return d;
}
constexpr u32 ONE = BF16 ? 0x3F803F80 : 0x3C003C00;
inline u32 add2(u32 a, u32 b) { return fma2(a, ONE, b); }
inline u32 multiply2(u32 a, u32 b) { return fma2(a, b, 0x80008000); }
inline u32 negate2(u32 a) { return a ^ 0x80008000; }
inline u16 from_float(float a) { return from_double(a); }

// Rows of operand A as a warp's lanes hold them, as numbers.
inline void unpack_rows(float rows[16][16], const u32 *const a[32]) {
    for (int lane = 0; lane < 32; ++lane)
        for (int i = 0; i < 4; ++i)
            for (int e = 0; e < 2; ++e)
                rows[lane / 4 + i % 2 * 8][lane % 4 * 2 + i / 2 * 8 + e] = to_float(a[lane][i] >> (16 * e));
}
// *sum += rows * column, rounded once: products of two 16-bit numbers are exact in float32.
inline void add_product(float *sum, const float row[16], const float column[16]) {
    double exact = 0;
    for (int k = 0; k < 16; ++k) exact += row[k] * column[k];
    *sum = float(*sum + exact);
}

inline void mma_16x8x16(float c[4], const u32 a[4], u32 b0, u32 b1) {
    std::copy(a, a + 4, current->a);
    current->b[0] = b0;
    current->b[1] = b1;
    current->c = c;
    meet(warp_barrier(), [] {
        const Fiber *lanes = warp_fibers();
        const u32 *operands[32];
        float rows[16][16], columns[8][16];
        for (int lane = 0; lane < 32; ++lane) {
            operands[lane] = lanes[lane].a;
            for (int k = 0; k < 4; ++k)
                columns[lane / 4][lane % 4 * 2 + k / 2 * 8 + k % 2] = to_float(lanes[lane].b[k / 2] >> (16 * (k % 2)));
        }
        unpack_rows(rows, operands);
        for (int lane = 0; lane < 32; ++lane)
            for (int i = 0; i < 4; ++i)
                add_product(&lanes[lane].c[i], rows[lane / 4 + i / 2 * 8], columns[lane % 4 * 2 + i % 2]);
    });
}

inline u32 load_half(const u16 *from) { return may_load(from, 2) ? *from : 0; }
// What it loads may be the result of the kernel before.
inline uint4 load_16_bytes(const u16 *p, bool inside) {
    uint4 v = {};
    if (!current->previous_kernel_ended) fault("loads what the kernel before may still write");
    if (inside && may_load(p, 16)) std::memcpy(&v, p, 16);
    return v;
}

// A copy reads its source at once, as the arrays do not change.
template <int BYTES>
inline void copy_async(u32 to, const void *from, bool wanted) {
    static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16);
    Copy copy{to, BYTES, {}};
    if (wanted) {
        const bool inside = is_inside(from, BYTES) && uintptr_t(from) % BYTES == 0;
        if (!inside) fault("copies from outside the arrays, or not aligned");
        if (inside) std::memcpy(copy.from, from, BYTES);
    }
    if (late)
        current->copies.back().push_back(copy);
    else
        store_shared(to, copy.from, BYTES);
}
inline void copy_16_bytes_async(u32 to, const u32 *from, bool wanted) { copy_async<16>(to, from, wanted); }
inline void close_copies() { current->copies.emplace_back(); }
template <int LEFT>
inline void wait_for_copies() {
    for (; current->copies.size() > LEFT + 1; current->copies.pop_front())
        for (const Copy &copy : current->copies.front()) store_shared(copy.to, copy.from, copy.bytes);
}

inline void store_shared_word(u32 to, u32 v) { store_shared(to, &v, 4); }
template <int COUNT>
inline void load_shared_words(u32 v[COUNT], u32 from) {
    static_assert(COUNT == 1 || COUNT == 2 || COUNT == 4);
    load_shared_bytes(v, from, 4 * COUNT);
}
inline u32 load_shared_half(u32 from) {
    u16 v = 0;
    load_shared_bytes(&v, from, 2);
    return v;
}
inline void load_matrices(u32 v[4], u32 from) {
    current->address = from;
    current->loaded = v;
    meet(warp_barrier(), [] {
        Fiber *lanes = warp_fibers();
        for (int m = 0; m < 4; ++m)
            for (int row = 0; row < 8; ++row) {
                u32 words[4] = {};
                load_shared_bytes(words, lanes[8 * m + row].address, 16);
                for (int pair = 0; pair < 4; ++pair) lanes[4 * row + pair].loaded[m] = words[pair];
            }
    });
}

inline void wait_for_previous_kernel() { current->previous_kernel_ended = true; }
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
