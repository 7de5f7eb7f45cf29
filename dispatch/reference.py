"""What the right answer is, and how far a kernel may be from it.

The reference is float64 and takes the dense weight as its owner defines it (a checkpoint's own formula, or
`dequantize` of a packed weight); it never looks at how a kernel computes.
"""

from __future__ import annotations

import numpy as np
from gristmill.problem import UNIT_ROUNDOFF

FP32_ROUNDOFF = 2.0**-24

# Half the spacing of subnormal numbers: what a rounding may change where relative precision has run out.
SUBNORMAL_ROUNDOFF = {"float16": 2.0**-25, "bfloat16": 2.0**-134}


def linear_float64(x: np.ndarray, w: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
    """x (M, K) times w (N, K) transposed plus bias (N,), in float64; returns (M, N)."""
    out = x.astype(np.float64) @ w.astype(np.float64).T
    return out if bias is None else out + bias.astype(np.float64)


def error_bound(
    x: np.ndarray,
    w: np.ndarray,
    bias: np.ndarray | None = None,
    *,
    dtype: str,
    roundings: int,
    weights_in_dtype: bool,
) -> np.ndarray:
    """Elementwise bound on |C - reference| for a kernel that accumulates in float32 and rounds once at the end.

    (roundings * u + (K + 1) * 2^-24) * (|x| @ |w|^T + |bias|), u the unit roundoff of `dtype`: each rounding moves a
    product by u at most, each of the K + 1 additions moves the sum by 2^-24 of what has been added. Where numbers are
    subnormal in `dtype` a rounding moves them by an absolute amount instead: once for the output, and, if the kernel
    rounds (q - z) * s to `dtype` (`weights_in_dtype`), once per weight.

    Parameters
    ----------
    x : (M, K) the activations as the kernel gets them
    w : (N, K) the weight, exact
    bias : (N,) or None
    dtype : "float16" or "bfloat16"
    roundings, weights_in_dtype : of the entry that ran, see `gristmill.manifest.Entry`

    Returns
    -------
    (M, N) float64
    """
    magnitude = np.abs(x).astype(np.float64) @ np.abs(w).astype(np.float64).T
    if bias is not None:
        magnitude += np.abs(bias).astype(np.float64)
    K = x.shape[1]
    bound = (roundings * UNIT_ROUNDOFF[dtype] + (K + 1) * FP32_ROUNDOFF) * magnitude
    subnormal = SUBNORMAL_ROUNDOFF[dtype]
    bound += subnormal
    if weights_in_dtype:
        bound += subnormal * np.abs(x).astype(np.float64).sum(axis=1, keepdims=True)
    return bound


def worst_error_over_bound(out: np.ndarray, reference: np.ndarray, bound: np.ndarray) -> float:
    """Largest |out - reference| / bound over all elements; infinite where `out` is not finite but should be."""
    if out.size == 0:
        return 0.0
    with np.errstate(invalid="ignore"):
        ratio = np.abs(out.astype(np.float64) - reference) / bound
    return float(np.where(np.isfinite(ratio), ratio, np.inf).max())
