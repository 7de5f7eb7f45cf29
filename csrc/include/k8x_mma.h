// Layout k8x for the tensor cores of sm80 and later: words of eight 4-bit weights to operands of mma.m16n8k16.
//
// Word j of a row holds k = 8j .. 8j+7, value i of the eight at bit 4*(i/2) + 16*(i%2). So nibble position p of both
// halves is the pair (k = 8j+2p, 8j+2p+1), and masking one position yields both as two 16-bit numbers.
#pragma once

#include "ptx.h"

#if BF16
// bfloat16 has 7 bits of mantissa, so 0x4300 | q is 128 + q, exact. A nibble at bit 4 would reach into the exponent:
// each position is shifted down first.
constexpr u32 MAGIC = 0x43004300;
constexpr u32 MINUS_BASE = 0xC300C300;    // -128
constexpr u32 MINUS_BASE_8 = 0xC308C308;  // -136
#else
// float16 has 10 bits of mantissa: 0x6400 | q is 1024 + q, and with the nibble left at bit 4 it is 1024 + 16q. Both are
// exact, and so is what takes 1024 away again: an add for the first, (.) * 1/16 - 64 for the second.
constexpr u32 MAGIC = 0x64006400;
constexpr u32 SIXTEENTH = 0x2C002C00;        // 1/16
constexpr u32 MINUS_BASE = 0xE400E400;       // -1024
constexpr u32 MINUS_BASE_8 = 0xE408E408;     // -1032
constexpr u32 MINUS_BASE_16 = 0xD400D400;    // -64
constexpr u32 MINUS_BASE_16_8 = 0xD480D480;  // -72
#endif

__device__ __forceinline__ u32 negate2(u32 a) { return a ^ 0x80008000; }

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
