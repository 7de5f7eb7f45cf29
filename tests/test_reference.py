from fractions import Fraction

import numpy as np
import pytest
from gristmill.packed_weight import dequantize, pack
from gristmill.reference import error_bound, linear_float64, worst_error_over_bound

CASES = [
    (M, N, K)
    for M in (0, 1, 15, 16, 17, 33)
    for N in (1, 7, 8, 24, 72, 136, 576)
    for K in (8, 72, 128, 576, 1536, 2112)
]


@pytest.mark.parametrize(("M", "N", "K"), CASES)
def test_reference_is_the_matrix_product(M, N, K):
    rng = np.random.default_rng()
    q = rng.integers(0, 16, (N, K))
    groups = -(-K // 64)
    weight = pack(q, rng.random((N, groups)) + 0.5, rng.uniform(0, 15, (N, groups)), group_size=64, dtype="float16")
    x = rng.standard_normal((M, K)).astype(np.float16)
    bias = rng.standard_normal(N).astype(np.float16)
    w = dequantize(weight)
    out = linear_float64(x, w, bias)
    assert out.shape == (M, N)
    assert out.dtype == np.float64
    for m, n in {(0, 0), (M - 1, N - 1), (M // 2, N // 3)} if M else ():
        exact = sum(Fraction(float(a)) * Fraction(float(b)) for a, b in zip(x[m], w[n], strict=True)) + Fraction(
            float(bias[n])
        )
        assert abs(float(exact) - out[m, n]) <= 1e-12 * float(np.abs(x[m].astype(float)) @ np.abs(w[n]) + 1)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_bound_holds_for_one_rounding_and_fails_for_a_wrong_weight(dtype):
    import ml_dtypes

    numpy_dtype = np.float16 if dtype == "float16" else ml_dtypes.bfloat16
    rng = np.random.default_rng()
    x = rng.standard_normal((9, 512)).astype(numpy_dtype)
    w = rng.standard_normal((11, 512))
    reference = linear_float64(x, w)
    bound = error_bound(x, w, dtype=dtype, roundings=1, weights_in_dtype=False)
    assert worst_error_over_bound(reference.astype(numpy_dtype), reference, bound) <= 1
    wrong = w.copy()
    wrong[3, 100] += 8.0  # one zero point off in one weight
    assert worst_error_over_bound(linear_float64(x, wrong).astype(numpy_dtype), reference, bound) > 1


def test_output_that_is_not_finite_is_infinitely_wrong():
    reference = np.zeros((1, 2))
    assert worst_error_over_bound(np.array([[0.0, np.nan]]), reference, np.ones((1, 2))) == np.inf
    assert worst_error_over_bound(np.array([[0.0, np.inf]]), reference, np.ones((1, 2))) == np.inf
    assert worst_error_over_bound(np.zeros((0, 2)), np.zeros((0, 2)), np.ones((0, 2))) == 0


def test_bound_counts_subnormal_steps_where_relative_precision_runs_out():
    x, w = np.array([[1.0]]), np.array([[3e-8]])  # half a float16 step above nothing
    bound = error_bound(x, w, dtype="float16", roundings=1, weights_in_dtype=True)
    assert abs(float(np.float16(3e-8)) - 3e-8) <= bound[0, 0] < 1e-7
