"""The problem: what a call asks for, as far as the choice of a kernel depends on it."""

from __future__ import annotations

import operator

from gristmill.errors import DTypeError, ShapeError
from gristmill.named_tuple import NamedTuple

OP_W4A16_GEMM = "w4a16_gemm"
DTYPES = ("float16", "bfloat16")
MAX_ALIGNMENT = 16  # in bytes: of the widest load
ALIGNMENTS = (16, 8, 4, 2, 1)

# Half a unit in the last place, relative: the most that one rounding to the dtype changes a normal number.
UNIT_ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8}


class Problem(NamedTuple):
    """C[M, N] = A[M, K] @ W[K, N] + bias, W in 4 bits.

    `group_size` is resolved (never -1). `alignment` is the largest power of two, 16 at most, that divides the address
    and the row stride in bytes of A, C and the packed weight.
    """

    op: str
    M: int
    N: int
    K: int
    group_size: int
    dtype: str
    has_zero_points: bool
    has_bias: bool
    alignment: int

    @property
    def num_groups(self) -> int:
        return -(-self.K // self.group_size)

    def formula_values(self) -> dict[str, int]:
        """Its share of the values that a manifest's formulas may name."""
        return {
            "M": self.M,
            "N": self.N,
            "K": self.K,
            "group_size": self.group_size,
            "num_groups": self.num_groups,
            "alignment": self.alignment,
            "has_bias": int(self.has_bias),
        }

    def __str__(self) -> str:
        text = f"M={self.M} N={self.N} K={self.K} group_size={self.group_size} {self.dtype}"
        text += " with zero points" if self.has_zero_points else ""
        text += " with bias" if self.has_bias else ""
        return f"{text} alignment={self.alignment}"


def resolve_group_size(group_size: int, K: int) -> int:
    """Turn -1 into K and check the rest.

    Raises
    ------
    ShapeError : `group_size` is no integer, or neither -1 nor a positive multiple of 8 (a packed word holds 8 values of
        one group)
    """
    try:
        size = operator.index(group_size)
    except TypeError:
        raise ShapeError(f"group_size must be an integer, got {type(group_size).__name__}") from None
    if size == -1 or size == K:
        return K
    if not 0 < size < 2**31 or size % 8:
        raise ShapeError(f"group_size must be -1, K or a positive multiple of 8 below 2**31, got {size} (K={K})")
    return size


def check_dtype(dtype: str, what: str) -> str:
    """Return `dtype` if it is an activation dtype, else raise DTypeError naming `what`."""
    if not isinstance(dtype, str) or dtype not in DTYPES:
        found = dtype if isinstance(dtype, str) else type(dtype).__name__
        raise DTypeError(f"{what} must be float16 or bfloat16, got {found}")
    return dtype
