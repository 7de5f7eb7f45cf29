import copy
import pickle

import ml_dtypes
import numpy as np
import pytest
from gristmill.errors import ArgumentError, DTypeError, ShapeError, StrideError
from gristmill.packed_weight import PackedWeight, dequantize, pack, pack_nibbles, round_to, unpack_nibbles
from hypothesis import given
from hypothesis import strategies as st

SHAPES = [(N, K) for N in (1, 7, 8, 24, 72, 136) for K in (1, 7, 8, 72, 128, 577, 2112)]


@pytest.fixture
def rng():
    return np.random.default_rng()


@pytest.mark.parametrize(("N", "K"), SHAPES)
def test_unpack_is_the_inverse_of_pack(N, K, rng):
    q = rng.integers(0, 16, (N, K), dtype=np.uint8)
    packed = pack_nibbles(q)
    assert packed.shape == (N, -(-K // 8))
    assert packed.strides[0] % 16 == 0
    np.testing.assert_array_equal(unpack_nibbles(packed, K), q)


def test_value_i_of_a_word_sits_where_the_layout_says(rng):
    q = rng.integers(0, 16, (5, 40), dtype=np.uint8)
    packed = pack_nibbles(q).view(np.uint32)
    for n in range(5):
        for k in range(40):
            i = k % 8
            assert int(packed[n, k // 8]) >> (4 * (i // 2) + 16 * (i % 2)) & 0xF == q[n, k]


def test_one_nibble_position_of_both_halves_is_two_neighbours_in_k():
    word = int(pack_nibbles(np.arange(8, dtype=np.uint8)[None, :]).view(np.uint32)[0, 0])
    for pair in range(4):
        both = (word >> 4 * pair) & 0x000F000F
        assert (both & 0xFFFF, both >> 16) == (2 * pair, 2 * pair + 1)


@pytest.mark.parametrize("group_size", [8, 24, 32, 48, 64, 128, -1])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("with_zero_points", [False, True])
def test_dequantize_is_the_definition(group_size, dtype, with_zero_points, rng):
    N, K = 5, 200  # a ragged last group for most sizes
    size = K if group_size == -1 else group_size
    groups = -(-K // size)
    numpy_dtype = np.float16 if dtype == "float16" else ml_dtypes.bfloat16
    q = rng.integers(0, 16, (N, K))
    scales = rng.standard_normal((N, groups)).astype(numpy_dtype)
    zero_points = rng.uniform(-20, 20, (N, groups)).astype(numpy_dtype) if with_zero_points else None
    weight = pack(q, scales, zero_points, group_size=group_size, dtype=dtype)
    found = dequantize(weight)
    for n in range(N):
        for k in range(K):
            zero = 8.0 if zero_points is None else float(zero_points[n, k // size])
            assert found[n, k] == (int(q[n, k]) - zero) * float(scales[n, k // size])


def test_perm_puts_columns_back_in_the_order_of_the_input_features(rng):
    q = rng.integers(0, 16, (4, 16))
    perm = rng.permutation(16)
    scales = np.ones((4, 2), np.float16)
    packed_order = dequantize(pack(q, scales, group_size=8))
    np.testing.assert_array_equal(dequantize(pack(q, scales, group_size=8, perm=perm))[:, perm], packed_order)


def test_group_size_minus_one_is_resolved_at_once():
    weight = pack(np.zeros((2, 72), int), np.ones((2, 1), np.float16), group_size=-1)
    assert (weight.group_size, weight.num_groups) == (72, 1)


Q = np.zeros((4, 64), np.uint8)
S = np.ones((4, 2), np.float16)


# What is wrong -> how pack is called: q, scales, zero points, bias, and options.
REFUSED = [
    (ShapeError, r"q must be \(N, K\), got shape \(64,\)", (Q[0], S), {}),
    (DTypeError, "q must be of an integer dtype, got float64", (Q * 1.0, S), {}),
    (ArgumentError, "q must hold values 0..15, got 16..16", (Q + 16, S), {}),
    (ArgumentError, r"q must hold values 0..15, got -1..-1", (Q.astype(int) - 1, S), {}),
    (ShapeError, r"scales must have shape \(4, 1\).*K=64 group_size=64, got \(4, 2\)", (Q, S), {"group_size": 64}),
    (ShapeError, "positive multiple of 8 below .*, got 12", (Q, S), {"group_size": 12}),
    (ShapeError, "group_size must be", (Q, S), {"group_size": 0}),
    (ShapeError, "group_size must be", (Q, S[:, :1]), {"group_size": 2**64}),
    (ShapeError, "group_size must be an integer, got float", (Q, S), {"group_size": 32.0}),
    (ShapeError, "group_size must be an integer, got NoneType", (Q, S), {"group_size": None}),
    (ArgumentError, "q must be an array on the host", ([[1, 2], [3]], S), {}),
    (ArgumentError, "scales must be an array on the host", (Q, [[1, 2], [3]]), {}),
    (ArgumentError, "perm must be a permutation", (Q, S), {"perm": np.array(["x"] * 64)}),
    (DTypeError, "dtype must be float16 or bfloat16, got ndarray", (Q, S), {"dtype": S}),
    (ShapeError, r"zero_points must have shape \(4, 2\)", (Q, S, S[:, :1]), {}),
    (ShapeError, r"bias must have shape \(4,\) = \(N,\), got \(1, 4\)", (Q, S, None, S[:, 0][None]), {}),
    (DTypeError, "dtype must be float16 or bfloat16, got float32", (Q, S.astype(np.float32)), {}),
    (DTypeError, "scales must hold real numbers", (Q, S.astype(complex)), {"dtype": "float16"}),
    (ArgumentError, r"scales\[0, 0\] = 100000.0 is not finite", (Q, S * np.float32(1e5)), {"dtype": "float16"}),
    (ArgumentError, r"zero_points\[0, 0\] = nan is not finite", (Q, S, S * np.nan), {}),
    (ArgumentError, "perm must be a permutation", (Q, S), {"perm": np.zeros(64, int)}),
    (ShapeError, "K and N must be at least 1", (Q[:0], S[:0]), {}),
]


@pytest.mark.parametrize(("error", "message", "arrays", "options"), REFUSED)
def test_pack_refuses(error, message, arrays, options):
    with pytest.raises(error, match=message):
        pack(*arrays, **{"group_size": 32, **options})


def test_packed_weight_refuses_arrays_that_are_not_the_layout():
    good = pack(Q, S, group_size=32)
    with pytest.raises(DTypeError, match="qweight must be int32, got uint32"):
        PackedWeight(64, 4, 32, "float16", good.qweight.view(np.uint32), good.scales)
    with pytest.raises(DTypeError, match="scales must be bfloat16, got float16"):
        PackedWeight(64, 4, 32, "bfloat16", good.qweight, good.scales)
    with pytest.raises(StrideError, match="qweight must have an inner stride of one element, got 4"):
        PackedWeight(64, 4, 32, "float16", np.asfortranarray(good.qweight), good.scales)
    with pytest.raises(ShapeError, match=r"qweight must have shape \(4, 8\)"):
        PackedWeight(64, 4, 32, "float16", good.qweight[:, :7], good.scales)


def test_sizes_are_integers():
    weight = pack(np.zeros((8, 64), int), np.ones((8, 2)), group_size=32, dtype="float16")
    assert type(weight.replace(K=np.int64(64)).K) is int
    for name in ("K", "N"):
        with pytest.raises(ShapeError, match=f"{name} must be an integer, got float"):
            weight.replace(**{name: float(getattr(weight, name))})


def test_a_weight_cannot_be_changed_but_replaced():
    weight = pack(np.zeros((4, 64), int), np.ones((4, 2)), group_size=32, dtype="float16")
    with pytest.raises(AttributeError, match="a PackedWeight cannot be changed"):
        weight.scales = None
    with pytest.raises(AttributeError, match="a PackedWeight cannot be changed"):
        del weight.scales
    other = weight.replace(bias=np.zeros(4, np.float16))
    assert weight.bias is None
    assert other.bias is not None
    assert other.qweight is weight.qweight
    assert repr(other) == "PackedWeight(K=64, N=4, group_size=32, dtype=float16, ndarrays qweight, scales, bias)"
    with pytest.raises(ShapeError):
        weight.replace(K=65)
    for copied in (copy.copy(weight), copy.deepcopy(weight), pickle.loads(pickle.dumps(weight))):
        np.testing.assert_array_equal(copied.qweight, weight.qweight)
        assert (copied.K, copied.group_size, copied.dtype, copied.bias) == (64, 32, "float16", None)


def test_bfloat16_is_rounded_once():
    """By way of float32, 1 + 2^-8 + 2^-30 would come to the tie 1 + 2^-8, and from there to 1."""
    above, below = 1 + 2.0**-8 + 2.0**-30, 1 + 3 * 2.0**-8 - 2.0**-30
    values = np.array([above, -above, below, 1 + 2.0**-8, np.nan, np.inf, 1e39, 0.0, 2.0**-140])
    expected = [1 + 2.0**-7, -1 - 2.0**-7, 1 + 2.0**-7, 1.0, np.nan, np.inf, np.inf, 0.0, 0.0]
    np.testing.assert_array_equal(round_to(values, "bfloat16").astype(np.float64), expected)
    assert round_to(np.array([2**24 + 2**16 + 1]), "bfloat16").astype(int) == 2**24 + 2**17
    q = np.zeros((1, 8), int)
    assert float(pack(q, np.full((1, 1), above), group_size=-1, dtype="bfloat16").scales[0, 0]) == 1 + 2.0**-7


@given(st.floats(width=64, allow_nan=False, min_value=-3e38, max_value=3e38))
def test_nearest_bfloat16(value):
    found = float(round_to(np.array([value]), "bfloat16")[0])
    bits = int(np.array([value], np.float32).view(np.uint32)[0]) >> 16
    neighbours = (np.array([max(bits - 1, 0), bits, bits + 1], np.uint32) << 16).view(np.float32).astype(np.float64)
    assert abs(found - value) <= np.abs(neighbours[np.isfinite(neighbours)] - value).min()
