"""The packed weight and its layout "k8x": pack, unpack and validation together.

For W[N, K], w = (q - z) * s, quantised along K:

- `qweight` int32 [N, ceil(K/8)], rows may be padded. Word j of row n holds k = 8j .. 8j+7; value i of the eight sits
  at bit 4*(i//2) + 16*(i%2). Masking one nibble position of both halves then yields two neighbours in k as a pair of
  16-bit numbers, which is what packed fp16 arithmetic and tensor-core fragments want.
- `scales` [N, num_groups] in the activation dtype, num_groups = ceil(K / group_size).
- `zero_points` None (the zero is 8) or [N, num_groups] in the activation dtype, any real value.
- `bias` [N] in the activation dtype, or None.
- `perm` int32 [K] or None: column k of the packed matrix is input feature perm[k] (act-order checkpoints).

One buffer serves every kernel. The nibbles past K in the last word are never read into a result.
"""

from __future__ import annotations

import operator
from typing import Any, NoReturn

import numpy as np
from gristmill.arrays import numpy_dtype
from gristmill.errors import ArgumentError, DTypeError, ShapeError, StrideError
from gristmill.problem import check_dtype, resolve_group_size

VALUES_PER_WORD = 8
NIBBLE_SHIFTS = np.array([4 * (i // 2) + 16 * (i % 2) for i in range(VALUES_PER_WORD)], dtype=np.uint32)
IMPLIED_ZERO_POINT = 8.0

ARRAYS = ("qweight", "scales", "zero_points", "bias", "perm")

# Rows start at 16-byte borders, so that a lane's widest load never straddles one.
ROW_WORDS = 4


class PackedWeight:
    """A 4-bit weight in layout k8x.

    The arrays are all of one kind: numpy arrays on the host (bfloat16 as `ml_dtypes.bfloat16`), or torch tensors or
    `DeviceArray`s on one device. `K`, `N` and `group_size` are the logical sizes; `group_size` is resolved (K for -1).
    It cannot be changed; `replace` and `map` make another one.

    Parameters
    ----------
    K, N : input and output features, at least 1
    group_size : input features per scale; -1 for K, else K or a multiple of 8
    dtype : "float16" or "bfloat16", of scales, zero points, bias and the activations
    qweight : (N, ceil(K/8)) int32, unit inner stride
    scales : (N, num_groups)
    zero_points : like `scales`, or None
    bias : (N,) or None
    perm : (K,) int32 or None

    Raises
    ------
    ShapeError, DTypeError, StrideError : an array is not what the layout says; the message names it and the rule
    """

    K: int
    N: int
    group_size: int
    dtype: str
    qweight: Any
    scales: Any
    zero_points: Any
    bias: Any
    perm: Any

    # Written by hand: making a dataclass of it takes 1 ms, and 1 ms more for the module that does it.
    def __init__(
        self,
        K: int,
        N: int,
        group_size: int,
        dtype: str,
        qweight: Any,
        scales: Any,
        zero_points: Any = None,
        bias: Any = None,
        perm: Any = None,
    ) -> None:
        K, N = _extent("K", K), _extent("N", N)
        if K < 1 or N < 1:
            raise ShapeError(f"K and N must be at least 1, got K={K} N={N}")
        group_size = resolve_group_size(group_size, K)
        check_dtype(dtype, "the weight's dtype")
        _check_array("qweight", qweight, (N, -(-K // VALUES_PER_WORD)), "int32", "(N, ceil(K/8))")
        groups = (N, -(-K // group_size))
        rule = f"(N, ceil(K/group_size)) with K={K} group_size={group_size}"
        _check_array("scales", scales, groups, dtype, rule)
        if zero_points is not None:
            _check_array("zero_points", zero_points, groups, dtype, rule)
        if bias is not None:
            _check_array("bias", bias, (N,), dtype, "(N,)")
        if perm is not None:
            _check_array("perm", perm, (K,), "int32", "(K,)")
        vars(self).update(
            K=K, N=N, group_size=group_size, dtype=dtype,
            qweight=qweight, scales=scales, zero_points=zero_points, bias=bias, perm=perm,
        )  # fmt: skip

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(f"a PackedWeight cannot be changed; replace({name}=...) makes another one")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"a PackedWeight cannot be changed; {name} stays")

    def __repr__(self) -> str:
        sizes = f"K={self.K}, N={self.N}, group_size={self.group_size}, dtype={self.dtype}"
        arrays = ", ".join(name for name in ARRAYS if getattr(self, name) is not None)
        return f"PackedWeight({sizes}, {type(self.qweight).__name__}s {arrays})"

    @property
    def num_groups(self) -> int:
        return -(-self.K // self.group_size)

    @property
    def nbytes(self) -> int:
        """Bytes that a kernel reads of the weight, padding left out."""
        itemsize = 2
        words = self.N * -(-self.K // VALUES_PER_WORD)
        groups = self.N * self.num_groups * (1 if self.zero_points is None else 2)
        return 4 * words + itemsize * (groups + (0 if self.bias is None else self.N))

    def map(self, convert) -> PackedWeight:
        """The same weight with `convert` applied to each array that is there."""
        return self.replace(
            **{name: convert(getattr(self, name)) for name in ARRAYS if getattr(self, name) is not None}
        )

    def replace(self, **changes: Any) -> PackedWeight:
        """The same weight with some of its fields changed."""
        return PackedWeight(**{**vars(self), **changes})


def pack(
    q: np.ndarray,
    scales: np.ndarray,
    zero_points: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    *,
    group_size: int,
    dtype: str | None = None,
    perm: np.ndarray | None = None,
) -> PackedWeight:
    """Pack a quantised weight; the one place where the layout is made.

    Parameters
    ----------
    q : (N, K), any integer dtype, values 0..15
    scales : (N, num_groups), any real dtype; num_groups = ceil(K / group_size)
    zero_points : like `scales`, or None for 8 everywhere; any real values
    bias : (N,) or None
    group_size : input features per scale; -1 for K, else a multiple of 8
    dtype : "float16" or "bfloat16", to which scales, zero points and bias are rounded; default: the dtype of `scales`,
        which must be one of the two: give it for scales in float64, say
    perm : (K,) permutation of 0..K-1, or None: column k of `q` belongs to input feature perm[k]

    Returns
    -------
    PackedWeight of numpy arrays; rows of `qweight` are padded to a multiple of 16 bytes

    Raises
    ------
    ArgumentError : values out of range, a scale that is not finite in `dtype`, or arrays of the wrong shape
    """
    q = _array("q", q)
    if q.ndim != 2:
        raise ShapeError(f"q must be (N, K), got shape {q.shape}")
    if q.dtype.kind not in "iu":
        raise DTypeError(f"q must be of an integer dtype, got {q.dtype}")
    N, K = q.shape
    if q.size and (q.min() < 0 or q.max() > 15):
        raise ArgumentError(f"q must hold values 0..15, got {int(q.min())}..{int(q.max())}")
    dtype = check_dtype(str(_array("scales", scales).dtype) if dtype is None else dtype, "dtype")
    if perm is not None:
        perm = _array("perm", perm)
        if perm.dtype.kind not in "iu" or perm.shape != (K,) or not np.array_equal(np.sort(perm), np.arange(K)):
            raise ArgumentError(f"perm must be a permutation of 0..K-1 with K={K}")
        perm = perm.astype(np.int32)
    return PackedWeight(
        K=K,
        N=N,
        group_size=group_size,
        dtype=dtype,
        qweight=pack_nibbles(q),
        scales=_rounded("scales", scales, dtype),
        zero_points=None if zero_points is None else _rounded("zero_points", zero_points, dtype),
        bias=None if bias is None else _rounded("bias", bias, dtype),
        perm=perm,
    )


def pack_nibbles(q: np.ndarray) -> np.ndarray:
    """(N, K) values 0..15 -> int32 (N, ceil(K/8)) in layout k8x, a view of rows padded to 16 bytes."""
    N, K = q.shape
    words = -(-K // VALUES_PER_WORD)
    stride = -(-words // ROW_WORDS) * ROW_WORDS
    padded = np.zeros((N, stride * VALUES_PER_WORD), dtype=np.uint32)
    padded[:, :K] = q
    nibbles = padded.reshape(N, stride, VALUES_PER_WORD) << NIBBLE_SHIFTS
    return np.bitwise_or.reduce(nibbles, axis=2).view(np.int32)[:, :words]


def unpack_nibbles(qweight: np.ndarray, K: int) -> np.ndarray:
    """Inverse of `pack_nibbles`: int32 (N, ceil(K/8)) -> uint8 (N, K)."""
    words = np.ascontiguousarray(qweight).view(np.uint32)
    values = (words[:, :, None] >> NIBBLE_SHIFTS) & 0xF
    return values.reshape(words.shape[0], -1)[:, :K].astype(np.uint8)


def dequantize(weight: PackedWeight) -> np.ndarray:
    """The weight that a host PackedWeight stands for: float64 (N, K) in the order of the input features."""
    group = np.arange(weight.K) // weight.group_size
    q = unpack_nibbles(weight.qweight, weight.K).astype(np.float64)
    zero_points: np.ndarray | float = IMPLIED_ZERO_POINT
    if weight.zero_points is not None:
        zero_points = np.asarray(weight.zero_points).astype(np.float64)[:, group]
    w = (q - zero_points) * np.asarray(weight.scales).astype(np.float64)[:, group]
    if weight.perm is None:
        return w
    ordered = np.empty_like(w)
    ordered[:, np.asarray(weight.perm)] = w
    return ordered


def _extent(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise ShapeError(f"{name} must be an integer, got {type(value).__name__}") from None


def _array(name: str, values: Any) -> np.ndarray:
    try:
        return np.asarray(values)
    except (ValueError, TypeError, RuntimeError) as error:  # rows of different lengths, a tensor on a GPU
        raise ArgumentError(f"{name} must be an array on the host ({error})") from None


def _rounded(name: str, values: np.ndarray, dtype: str) -> np.ndarray:
    values = _array(name, values)
    if values.dtype.kind not in "fiu" and str(values.dtype) != "bfloat16":
        raise DTypeError(f"{name} must hold real numbers, got {values.dtype}")
    rounded = round_to(values, dtype)
    finite = np.isfinite(rounded.astype(np.float32))
    if not finite.all():
        at = tuple(int(i) for i in np.argwhere(~finite)[0])
        raise ArgumentError(f"{name}{list(at)} = {values[at]} is not finite in {dtype}")
    return np.ascontiguousarray(rounded)


def round_to(values: np.ndarray, dtype: str) -> np.ndarray:
    """`values` rounded once, to nearest even, to "float16" or "bfloat16"; what is too large becomes infinite.

    ml_dtypes goes from float64 to bfloat16 by way of float32, which would round twice. Rounded to odd on the way, a
    number keeps to its side of a tie.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        if dtype == "bfloat16" and (values.dtype == np.float64 or values.dtype.kind in "iu"):
            exact = values.astype(np.float64)
            single = exact.astype(np.float32)
            toward_zero = single.view(np.uint32) - (np.abs(single) > np.abs(exact))
            values = (toward_zero | (single != exact)).view(np.float32)
        return values.astype(numpy_dtype(dtype))


def _check_array(name: str, array: Any, shape: tuple[int, ...], dtype: str, rule: str) -> None:
    found = tuple(getattr(array, "shape", ()))
    if found != shape:
        raise ShapeError(f"{name} must have shape {shape} = {rule}, got {found}")
    found_dtype = str(array.dtype).removeprefix("torch.")
    if found_dtype != dtype:
        raise DTypeError(f"{name} must be {dtype}, got {found_dtype}")
    if shape[-1] > 1 and inner_stride(array) != 1:
        raise StrideError(f"{name} must have an inner stride of one element, got {inner_stride(array)}")


def inner_stride(array: Any) -> int:
    """Stride of the last dimension in elements, for numpy arrays, torch tensors and `DeviceArray`s."""
    if isinstance(array, np.ndarray):
        return array.strides[-1] // array.itemsize
    strides = array.stride() if callable(getattr(array, "stride", None)) else array.strides
    return strides[-1]
