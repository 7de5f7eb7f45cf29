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
constexpr u32 BASE = 0x43004300;          // 128
constexpr u32 MINUS_BASE = 0xC300C300;    // -128
constexpr u32 MINUS_BASE_8 = 0xC308C308;  // -136
constexpr u32 LIMIT = 0x45004500;         // 2048
#else
// float16 has 10 bits of mantissa: 0x6400 | q is 1024 + q, and with the nibble left at bit 4 it is 1024 + 16q. Both are
// exact, and so is what takes 1024 away again: an add for the first, (.) * 1/16 - 64 for the second.
constexpr u32 MAGIC = 0x64006400;
constexpr u32 BASE = 0x64006400;             // 1024
constexpr u32 MINUS_BASE = 0xE400E400;       // -1024
constexpr u32 MINUS_BASE_8 = 0xE408E408;     // -1032
constexpr u32 LIMIT = 0x68006800;            // 2048
constexpr u32 SIXTEENTH = 0x2C002C00;        // 1/16
constexpr u32 BASE_LESS_64 = 0x63806380;     // 960
constexpr u32 MINUS_BASE_16 = 0xD400D400;    // -64
constexpr u32 MINUS_BASE_16_8 = 0xD480D480;  // -72
#endif

// What unpacking adds to a pair to give q - b: to those of positions 0 and 2, and in float16 to those of 1 and 3.
struct MinusBase {
    u32 even, odd;
};
#if BF16
__device__ __forceinline__ MinusBase minus_base(int b) { return {b ? MINUS_BASE_8 : MINUS_BASE, 0}; }
#else
__device__ __forceinline__ MinusBase minus_base(int b) {
    return b ? MinusBase{MINUS_BASE_8, MINUS_BASE_16_8} : MinusBase{MINUS_BASE, MINUS_BASE_16};
}
#endif

__device__ __forceinline__ u32 negate2(u32 a) { return a ^ 0x80008000; }

// The eight weights of one word as four pairs, pair[p] = (k = 8j+2p, 8j+2p+1), each q - b, exact for whole b.
__device__ __forceinline__ void unpack(u32 word, MinusBase minus, u32 pair[4]) {
#if BF16
#pragma unroll
    for (int p = 0; p < 4; ++p) pair[p] = add2(mask_or(word >> (4 * p), 0x000F000F, MAGIC), minus.even);
#else
#pragma unroll
    for (int p = 0; p < 4; p += 2, word >>= 8) {
        pair[p] = add2(mask_or(word, 0x000F000F, MAGIC), minus.even);
        pair[p + 1] = fma2(mask_or(word, 0x00F000F0, MAGIC), SIXTEENTH, minus.odd);
    }
#endif
}

// Take the zero points of two rows apart, z = near + rest, `near` in what unpacking adds, for each row. The sum of
// (q - z) * x over a group is then that of (q - near) * x, less `rest` times the sum of x.
//
// `near` is z rounded to what can be told beside BASE: at least as close to z as any q, so |rest| <= |q - z| and
// |q - near| <= 2 |q - z|. Nothing cancels; the two float32 sums may hold three times what one of (q - z) * x does, and
// their errors are that much larger, which the rounding of q - z that there is no more leaves room for. q - near is
// exact unless |z| is large (from 1009 on in float16, 113 in bfloat16); then it rounds once. `rest` is exact as long as
// what it rounds is far below that: z is limited to what BASE can still be added to and taken from.
__device__ __forceinline__ void take_apart(u32 z, MinusBase minus[2], float rest[2]) {
    const u32 even = fma2(max2(min2(z, LIMIT), negate2(LIMIT)), negate2(ONE), MINUS_BASE);
    const u32 both = add2(z, add2(even, BASE));
#if BF16
    const u32 odd = 0;
#else
    const u32 odd = add2(even, BASE_LESS_64);
#endif
    minus[0] = {twice_low(even), twice_low(odd)};
    minus[1] = {twice_high(even), twice_high(odd)};
    rest[0] = to_float(both);
    rest[1] = to_float(both >> 16);
}
