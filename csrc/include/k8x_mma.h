// Layout k8x for the tensor cores of sm80 and later: words of eight 4-bit weights to operands of mma and wgmma.
//
// Word j of a row holds k = 8j .. 8j+7, value i of the eight at bit 4*(i/2) + 16*(i%2). So nibble position p of both
// halves is the pair (k = 8j+2p, 8j+2p+1), and masking one position yields both as two 16-bit numbers.
//
// There are two ways on: unpack(), and unpack_for_scaling() where each weight is multiplied by its scale in the dtype;
// in units of the first the product could be subnormal.
#pragma once

#include "ptx.h"

// One fma per pair both converts nibbles and subtracts zero points, whole or not. A nibble with nothing above it is a
// subnormal number, or, at bit 4 of a bfloat16, one of the smallest that are not: 2^-24 (float16) or 2^-133 (bfloat16)
// times its bits. The largest power of 2 makes q / 512 or q / 64 of one at bit 0, and so does 1/16 of it of one at bit
// 4. (PTX has no fma of bfloat16 that flushes subnormal numbers.)
#if BF16
constexpr float WEIGHT_UNIT = 64;
constexpr u32 WEIGHT_UNITS = 0x42804280;  // 64, in both halves
constexpr u32 MINUS_1 = 0xBC80BC80;       // -1 / 64
constexpr u32 MINUS_8 = 0xBE00BE00;       // -8 / 64
constexpr u32 EVEN_FACTOR = 0x7F007F00;   // 2^127
constexpr u32 ODD_FACTOR = 0x7D007D00;    // 2^123
#else
constexpr float WEIGHT_UNIT = 512;
constexpr u32 WEIGHT_UNITS = 0x60006000;  // 512
constexpr u32 MINUS_1 = 0x98009800;       // -1 / 512
constexpr u32 MINUS_8 = 0xA400A400;       // -8 / 512
constexpr u32 EVEN_FACTOR = 0x78007800;   // 2^15
constexpr u32 ODD_FACTOR = 0x68006800;    // 2^11
#endif

// The eight weights of one word as four pairs, pair[p] = (k = 8j+2p, 8j+2p+1), each q - z in units of WEIGHT_UNIT,
// rounded once; both halves of `minus` are -z in units of WEIGHT_UNIT.
__device__ __forceinline__ void unpack(u32 word, u32 minus, u32 pair[4]) {
#pragma unroll
    for (int p = 0; p < 4; p += 2, word >>= 8) {
        pair[p] = fma2(word & 0x000F000F, EVEN_FACTOR, minus);
        pair[p + 1] = fma2(word & 0x00F000F0, ODD_FACTOR, minus);
    }
}

// Minus two finite zero points in units of WEIGHT_UNIT, rounded where that is subnormal. `lost` is what rounding took,
// in units of 1: z = lost - minus * WEIGHT_UNIT, exactly. It is zero for z = 0 and from |z| = 2^-5 (float16) or 2^-120
// (bfloat16) on; a difference q - z that is subnormal is exact then, so that unpack() rounds in proportion to it.
__device__ __forceinline__ u32 minus_zero_points(u32 z, u32 &lost) {
    const u32 minus = multiply2(z, MINUS_1);
    lost = fma2(minus, WEIGHT_UNITS, z);
    return minus;
}

// For unpack_for_scaling(): a nibble below the bits of a power of 2, 0x6400 | q, is 1024 + q in float16, and 0x4300 | q
// is 128 + q in bfloat16; at bit 4 of float16 it is 1024 + 16q, and alone at bit 4 of bfloat16 the largest power of 2
// makes q / 4 of it, so that all are a quarter there.
#if BF16
constexpr float SCALING_UNIT = 4;
constexpr u32 EVEN_MAGIC = 0x43004300, ODD_MAGIC = 0;
constexpr u32 EVEN_SCALE = 0x3E803E80;                       // 1/4
constexpr u32 ODD_SCALE = 0x7F007F00;                        // 2^127
constexpr u32 MINUS_EVEN = ZEROS ? 0xC200C200 : 0xC208C208;  // -128 / 4, -136 / 4
constexpr u32 MINUS_ODD = ZEROS ? 0x80008000 : 0xC000C000;   // -0, -8 / 4
#else
constexpr float SCALING_UNIT = 1;
constexpr u32 EVEN_MAGIC = 0x64006400, ODD_MAGIC = 0x64006400;
constexpr u32 EVEN_SCALE = ONE;
constexpr u32 ODD_SCALE = 0x2C002C00;                        // 1/16
constexpr u32 MINUS_EVEN = ZEROS ? 0xE400E400 : 0xE408E408;  // -1024, -1032
constexpr u32 MINUS_ODD = ZEROS ? 0xD400D400 : 0xD480D480;   // -64, -72
#endif

// As unpack(), but q, with ZEROS, or q - 8, both exact and in units of SCALING_UNIT.
__device__ __forceinline__ void unpack_for_scaling(u32 word, u32 pair[4]) {
#pragma unroll
    for (int p = 0; p < 4; p += 2, word >>= 8) {
        const u32 even = mask_or(word, 0x000F000F, EVEN_MAGIC);
        pair[p] = EVEN_SCALE == ONE ? add2(even, MINUS_EVEN) : fma2(even, EVEN_SCALE, MINUS_EVEN);
        pair[p + 1] = fma2(mask_or(word, 0x00F000F0, ODD_MAGIC), ODD_SCALE, MINUS_ODD);
    }
}

// A pair of q of unpack_for_scaling() in units of 1, less z, which both halves of `z` are. Rounds once.
__device__ __forceinline__ u32 subtract_zero_point(u32 pair, u32 z) {
#if BF16
    return fma2(pair, 0x40804080, negate2(z));  // times SCALING_UNIT
#else
    return add2(pair, negate2(z));
#endif
}
