"""Floating point by exact rational arithmetic: slow, and independent of the emulator that it checks."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np

NEAREST_EVEN, TOWARD_POSITIVE, TOWARD_NEGATIVE, TOWARD_ZERO = range(4)


@dataclass(frozen=True)
class Format:
    precision: int  # significant bits, the implicit one included
    emin: int
    emax: int
    bits: int

    @property
    def infinity(self) -> int:
        return (self.emax - self.emin + 2) << (self.precision - 1)

    def decode(self, bits: int) -> Fraction:
        """The value of a finite pattern."""
        sign = -1 if bits >> (self.bits - 1) else 1
        exponent = bits >> (self.precision - 1) & ((1 << (self.bits - self.precision)) - 1)
        significand = bits & ((1 << (self.precision - 1)) - 1)
        if exponent:
            significand += 1 << (self.precision - 1)
        return sign * Fraction(significand) * Fraction(2) ** (max(exponent, 1) - 1 + self.emin - self.precision + 1)

    def encode(self, value: Fraction, rounding: int = NEAREST_EVEN, negative_zero: bool = False) -> int:
        """The pattern of `value`, rounded. `negative_zero`: the sign of an exact zero."""
        sign = 1 << (self.bits - 1)
        if value == 0:
            return sign if negative_zero else 0
        negative, magnitude = value < 0, abs(value)
        exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
        if Fraction(2) ** exponent > magnitude:
            exponent -= 1
        exponent = max(exponent, self.emin)
        quantum = Fraction(2) ** (exponent - self.precision + 1)
        count, rest = divmod(magnitude, quantum)
        up = {
            NEAREST_EVEN: rest * 2 > quantum or (rest * 2 == quantum and count % 2 == 1),
            TOWARD_POSITIVE: rest > 0 and not negative,
            TOWARD_NEGATIVE: rest > 0 and negative,
            TOWARD_ZERO: False,
        }[rounding]
        pattern = ((exponent - self.emin) << (self.precision - 1)) + int(count) + up
        if pattern >= self.infinity:
            outward = {
                NEAREST_EVEN: True,
                TOWARD_POSITIVE: not negative,
                TOWARD_NEGATIVE: negative,
                TOWARD_ZERO: False,
            }
            pattern = self.infinity if outward[rounding] else self.infinity - 1
        return pattern | (sign if negative else 0)

    def is_finite(self, bits: int) -> bool:
        return bits & (1 << (self.bits - 1)) - 1 < self.infinity


F32 = Format(24, -126, 127, 32)
F16 = Format(11, -14, 15, 16)
BF16 = Format(8, -126, 127, 16)


def fma(fmt: Format, a: int, b: int, c: int, rounding: int = NEAREST_EVEN) -> int:
    """a * b + c of finite patterns, rounded once."""
    value = fmt.decode(a) * fmt.decode(b) + fmt.decode(c)
    top = 1 << (fmt.bits - 1)
    product_negative, addend_negative = bool((a ^ b) & top), bool(c & top)
    opposite = product_negative != addend_negative  # then an exact zero is +0, or -0 when rounding down
    return fmt.encode(value, rounding, rounding == TOWARD_NEGATIVE if opposite else product_negative)


def add(fmt: Format, a: int, b: int, rounding: int = NEAREST_EVEN) -> int:
    return fma(fmt, a, fmt.encode(Fraction(1)), b, rounding)


def mul(fmt: Format, a: int, b: int, rounding: int = NEAREST_EVEN) -> int:
    return fmt.encode(fmt.decode(a) * fmt.decode(b), rounding, bool((a ^ b) >> (fmt.bits - 1)))


def random_finite(rng: np.random.Generator, fmt: Format, count: int) -> np.ndarray:
    """Patterns with every exponent equally likely: denormals, overflow and cancellation all come up."""
    dtype = np.uint32 if fmt.bits == 32 else np.uint16
    exponents = rng.integers(0, fmt.emax - fmt.emin + 2, count)
    significands = rng.integers(0, 1 << (fmt.precision - 1), count)
    keep = rng.integers(0, fmt.precision, count)  # short significands make ties and exact results
    significands = significands >> keep << keep
    signs = rng.integers(0, 2, count)
    return ((signs << (fmt.bits - 1)) | (exponents << (fmt.precision - 1)) | significands).astype(dtype)


def close_operands(rng: np.random.Generator, fmt: Format, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """a, b, c with |c| within 2^30 of |a * b| where the format can hold it: sums where rounding decides."""
    a, b = random_finite(rng, fmt, count), random_finite(rng, fmt, count)
    c = []
    for x, y, shift, sign in zip(a, b, rng.integers(-30, 31, count), rng.integers(0, 2, count), strict=True):
        product = abs(fmt.decode(int(x)) * fmt.decode(int(y))) * Fraction(2) ** int(shift)
        pattern = min(fmt.encode(product, TOWARD_ZERO), fmt.infinity - 1)
        c.append(pattern ^ int(rng.integers(0, 4)) | int(sign) << (fmt.bits - 1))
    c = np.array(c, a.dtype)
    return (
        a,
        b,
        np.where((c & ~(c.dtype.type(1) << c.dtype.type(fmt.bits - 1))) < fmt.infinity, c, 0).astype(a.dtype),
    )
