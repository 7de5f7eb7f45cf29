// Layout k8x for the tensor cores of sm80 and later: words of eight 4-bit weights to operands of mma.m16n8k16.
//
// Word j of a row holds k = 8j .. 8j+7, value i of the eight at bit 4*(i/2) + 16*(i%2). So nibble position p of both
// halves is the pair (k = 8j+2p, 8j+2p+1), and masking one position yields both as two 16-bit numbers.
#pragma once

#include "ptx.h"

#if BF16
// bfloat16 has 7 bits of mantissa, so 0x4300 | q is 128 + q, exact. A nibble at bit 4 reaches into the exponent; but
// with nothing above it the number is subnormal, or one of the smallest that are not, and all those are 2^-133 times
// their bits: 2^-129 * q. The largest power of 2 makes q / 4 of it, and so all weights are unpacked to a quarter. (PTX
// has no fma of bfloat16 that flushes subnormal numbers.)
constexpr float WEIGHT_UNIT = 4;
constexpr u32 MAGIC = 0x43004300, ODD_MAGIC = 0;
constexpr u32 BASE = 0x43004300;        // 128
constexpr u32 MINUS_BASE = 0xC300C300;  // -128
constexpr u32 LIMIT = 0x45004500;       // 2048
constexpr u32 QUARTER = 0x3E803E80;     // 1/4
constexpr u32 FOUR = 0x40804080;
constexpr u32 EVEN_FACTOR = QUARTER;
constexpr u32 ODD_FACTOR = 0x7F007F00;  // 2^127
constexpr u32 MINUS_0 = 0x8000C200;     // -0, -128 / 4
constexpr u32 MINUS_8 = 0xC000C208;     // -8 / 4, -136 / 4
constexpr u32 FROM_EVEN = 0x42008000;   // 128 / 4, -0
#else
// float16 has 10 bits of mantissa: 0x6400 | q is 1024 + q, and with the nibble left at bit 4 it is 1024 + 16q. Both are
// exact, and so is what takes 1024 away again: an add for the first, (.) * 1/16 - 64 for the second.
constexpr float WEIGHT_UNIT = 1;
constexpr u32 MAGIC = 0x64006400, ODD_MAGIC = MAGIC;
constexpr u32 BASE = 0x64006400;        // 1024
constexpr u32 MINUS_BASE = 0xE400E400;  // -1024
constexpr u32 LIMIT = 0x68006800;       // 2048
constexpr u32 EVEN_FACTOR = ONE;
constexpr u32 ODD_FACTOR = 0x2C002C00;  // 1/16
constexpr u32 MINUS_0 = 0xD400E400;     // -64, -1024
constexpr u32 MINUS_8 = 0xD480E408;     // -72, -1032
constexpr u32 FROM_EVEN = 0x63808000;   // 1024 - 64, -0
#endif

// The eight weights of one word as four pairs, pair[p] = (k = 8j+2p, 8j+2p+1), each q - b in units of WEIGHT_UNIT,
// exact for whole b. `minus` is what unpacking adds: to the pairs at positions 0 and 2 its lower half, to those at 1
// and 3 its higher half; MINUS_0 and MINUS_8 are for b = 0 and 8.
__device__ __forceinline__ void unpack(u32 word, u32 minus, u32 pair[4]) {
    const u32 minus_even = twice_low(minus), minus_odd = twice_high(minus);
#pragma unroll
    for (int p = 0; p < 4; p += 2, word >>= 8) {
        const u32 even = mask_or(word, 0x000F000F, MAGIC);
        pair[p] = EVEN_FACTOR == ONE ? add2(even, minus_even) : fma2(even, EVEN_FACTOR, minus_even);
        pair[p + 1] = fma2(mask_or(word, 0x00F000F0, ODD_MAGIC), ODD_FACTOR, minus_odd);
    }
}

// From units of WEIGHT_UNIT to units of 1, less z, which both halves of `z` are. Rounds once.
__device__ __forceinline__ u32 subtract(u32 pair, u32 z) {
#if BF16
    return fma2(pair, FOUR, negate2(z));
#else
    return add2(pair, negate2(z));
#endif
}

// Take two zero points apart, z = near + rest; `minus` is what unpacking adds for b = near. The sum of (q - z) * x over
// a group is then that of (q - near) * x, less `rest` times the sum of x.
//
// `near` is z rounded to what can be told beside BASE: at least as close to z as any q, so |rest| <= |q - z| and
// |q - near| <= 2 |q - z|. Nothing cancels; the two float32 sums may hold three times what one of (q - z) * x does, and
// their errors are that much larger, which the rounding of q - z that there is no more leaves room for. q - near is
// exact unless |z| is large (from 1009 on in float16, 113 in bfloat16); then it rounds once. `rest` is exact as long as
// what it rounds is far below that: z is limited to what BASE can still be added to and taken from.
__device__ __forceinline__ void take_apart(u32 z, u32 minus[2], u32 &rest) {
    const u32 even = fma2(max2(min2(z, LIMIT), negate2(LIMIT)), negate2(ONE), MINUS_BASE);
    rest = add2(z, add2(even, BASE));
    const u32 both[2] = {twice_low(even), twice_high(even)};
    for (int i = 0; i < 2; ++i)
        minus[i] = EVEN_FACTOR == ONE ? add2(both[i], FROM_EVEN) : fma2(both[i], EVEN_FACTOR, FROM_EVEN);
}
