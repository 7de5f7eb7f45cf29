// Layout k8x for the tensor cores of sm80 and later: words of eight 4-bit weights to operands of mma.m16n8k16.
//
// Word j of a row holds k = 8j .. 8j+7, value i of the eight at bit 4*(i/2) + 16*(i%2). So nibble position p of both
// halves is the pair (k = 8j+2p, 8j+2p+1), and masking one position yields both as two 16-bit numbers.
//
// No vendor header is needed: all 16-bit arithmetic is on pairs in a 32-bit register, one instruction a function.
#pragma once

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

// d = (a & mask) | bits, one LOP3: the truth table of (a & b) | c is 0xEA.
__device__ __forceinline__ u32 mask_or(u32 a, u32 mask, u32 bits) {
    u32 d;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(d) : "r"(a), "r"(mask), "r"(bits));
    return d;
}

#if BF16

// bfloat16 has 7 bits of mantissa, so 0x4300 | q is 128 + q, exact. A nibble at bit 4 would reach into the exponent:
// each position is shifted down first.
constexpr u32 MAGIC = 0x43004300;
constexpr u32 ONE = 0x3F803F80;           // 1
constexpr u32 MINUS_BASE = 0xC300C300;    // -128
constexpr u32 MINUS_BASE_8 = 0xC308C308;  // -136

// a * b + c on pairs, rounded once. sm80 has no packed bfloat16 add; x * 1 + c is one.
__device__ __forceinline__ u32 fma2(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
__device__ __forceinline__ u32 add2(u32 a, u32 b) { return fma2(a, ONE, b); }
__device__ __forceinline__ u32 negate2(u32 a) { return a ^ 0x80008000; }

__device__ __forceinline__ float to_float(u32 a) { return __uint_as_float(a << 16); }
__device__ __forceinline__ u16 from_float(float a) {
    u16 d;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(d) : "f"(a));
    return d;
}

#else

// float16 has 10 bits of mantissa: 0x6400 | q is 1024 + q, and with the nibble left at bit 4 it is 1024 + 16q. Both are
// exact, and so is what takes 1024 away again: an add for the first, (.) * 1/16 - 64 for the second.
constexpr u32 MAGIC = 0x64006400;
constexpr u32 SIXTEENTH = 0x2C002C00;        // 1/16
constexpr u32 MINUS_BASE = 0xE400E400;       // -1024
constexpr u32 MINUS_BASE_8 = 0xE408E408;     // -1032
constexpr u32 MINUS_BASE_16 = 0xD400D400;    // -64
constexpr u32 MINUS_BASE_16_8 = 0xD480D480;  // -72

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
__device__ __forceinline__ u32 negate2(u32 a) { return a ^ 0x80008000; }

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

// The eight weights of one word as four pairs, pair[p] = (k = 8j+2p, 8j+2p+1), each q - 8, exact.
__device__ __forceinline__ void unpack(u32 word, u32 pair[4]) {
#if BF16
#pragma unroll
    for (int p = 0; p < 4; ++p) pair[p] = add2(mask_or(word >> (4 * p), 0x000F000F, MAGIC), MINUS_BASE_8);
#else
#pragma unroll
    for (int p = 0; p < 4; p += 2, word >>= 8) {
        pair[p] = add2(mask_or(word, 0x000F000F, MAGIC), MINUS_BASE_8);
        pair[p + 1] = fma2(mask_or(word, 0x00F000F0, MAGIC), SIXTEENTH, MINUS_BASE_16_8);
    }
#endif
}

// The same for q - z with any real z, given as the pair (-z, -z): q is exact, the subtraction rounds once. Folding z
// into the constant would save an instruction and round z to an integer, which it need not be.
__device__ __forceinline__ void unpack(u32 word, u32 minus_zero, u32 pair[4]) {
#if BF16
#pragma unroll
    for (int p = 0; p < 4; ++p)
        pair[p] = add2(add2(mask_or(word >> (4 * p), 0x000F000F, MAGIC), MINUS_BASE), minus_zero);
#else
#pragma unroll
    for (int p = 0; p < 4; p += 2, word >>= 8) {
        pair[p] = add2(add2(mask_or(word, 0x000F000F, MAGIC), MINUS_BASE), minus_zero);
        pair[p + 1] = add2(fma2(mask_or(word, 0x00F000F0, MAGIC), SIXTEENTH, MINUS_BASE_16), minus_zero);
    }
#endif
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
