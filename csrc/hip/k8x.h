// Layout k8x on RDNA: one 32-bit word of eight 4-bit weights -> four pairs of 16-bit floats.
//
// Value i of a word sits at bit 4*(i/2) + 16*(i%2), so one mask takes two neighbours in k, one in each half.
// Each format has: to_float and from_float (one 16-bit number), Zero (a zero point as the unpacking wants it),
// unpack (a word into q - z, k in order) and dot (two products added to a float, v_dot2).
#pragma once

#include "rdna.h"

struct Half {
  typedef f16x2 Pair;
  typedef f16x2 Zero;

  DEVICE float to_float(u16 bits) { return float(__builtin_bit_cast(_Float16, bits)); }
  DEVICE u16 from_float(float value) { return __builtin_bit_cast(u16, _Float16(value)); }
  // -z in both halves; by integers, as the compiler takes apart a pair that it knows to hold one number twice.
  DEVICE Zero zero(u16 bits) { return __builtin_bit_cast(Zero, (bits ^ 0x8000u) * 0x00010001u); }

  // 0x6400 is 1024, whose last place is 1: an OR of q makes 1024 + q, an OR of 16q makes 1024 + 16q. Taking 1024 (or
  // 64, after a sixteenth) away is exact, and so is 1032 or 72 for the implied zero point 8. A real zero point is
  // subtracted from the exact q: one rounding.
  template <bool HAS_ZERO>
  DEVICE void unpack(u32 word, Zero zero, Pair (&w)[4]) {
    constexpr _Float16 base = HAS_ZERO ? 1024 : 1032, base_16 = HAS_ZERO ? 64 : 72, sixteenth = 0.0625;
    for (int i = 0; i < 2; ++i) {
      const f16x2 low = __builtin_bit_cast(f16x2, (word & 0x000f000f) | 0x64006400);
      const f16x2 high = __builtin_bit_cast(f16x2, (word & 0x00f000f0) | 0x64006400);
      w[2 * i] = low - Pair{base, base};
      w[2 * i + 1] = __builtin_elementwise_fma(high, Pair{sixteenth, sixteenth}, Pair{-base_16, -base_16});
      word >>= 8;
    }
    if constexpr (HAS_ZERO)
      for (int i = 0; i < 4; ++i) w[i] += zero;
  }

  DEVICE float dot(Pair a, Pair b, float c) { return __builtin_amdgcn_fdot2(a, b, c, false); }
};

struct Bfloat {
  typedef bf16x2 Pair;
  typedef float Zero;

  // q - z is taken in float and cut to its upper 16 bits. Cutting alone would lose up to a whole last place; cutting
  // (q - z) * (1 + 2^-8) instead keeps every number that bfloat16 has, so all of q - 8, and errs by 2^-8, one rounding,
  // for the others.
  static constexpr float ROUND_UP = 1.0f + 1.0f / 256;

  DEVICE float to_float(u16 bits) { return __builtin_bit_cast(float, u32(bits) << 16); }
  DEVICE u16 from_float(float value) { return __builtin_bit_cast(u16, __bf16(value)); }
  DEVICE Zero zero(u16 bits) { return to_float(bits) * -ROUND_UP; }

  // RDNA3 and RDNA4 have no packed bfloat16 arithmetic. OR into 0x4300 and taking (128 + z) * sum(x) off the dot
  // product afterwards is cheaper by half, but its error is a part of 128 * |x| where |q - z| * |x| is allowed: a large
  // activation that meets a weight of zero would drown the rest. So: byte -> float -> q - z -> upper halves of two.
  template <bool HAS_ZERO>
  DEVICE void unpack(u32 word, Zero zero, Pair (&w)[4]) {
    u32 bytes[2] = {word & 0x0f0f0f0f, (word >> 4) & 0x0f0f0f0f};  // k = 0 4 1 5 and 2 6 3 7
    for (u32& b : bytes) asm("" : "+v"(b));  // else each nibble is cut out of `word` on its own before the conversion
    for (int i = 0; i < 4; ++i) {
      const u32 source = bytes[i % 2] >> (8 * (i / 2));
      const float low = minus_zero<HAS_ZERO>(float(source & 0xff), zero);
      const float high = minus_zero<HAS_ZERO>(float(source >> 16 & 0xff), zero);
      w[i] = __builtin_bit_cast(
          Pair, __builtin_amdgcn_perm(__builtin_bit_cast(u32, high), __builtin_bit_cast(u32, low), 0x07060302));
    }
  }

  template <bool HAS_ZERO>
  DEVICE float minus_zero(float q, Zero zero) {
    return __builtin_fmaf(q, ROUND_UP, HAS_ZERO ? zero : -8 * ROUND_UP);
  }

  DEVICE float dot(Pair a, Pair b, float c) { return __builtin_amdgcn_fdot2_f32_bf16(a, b, c, false); }
};
