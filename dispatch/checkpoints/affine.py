"""A quantised linear layer as a checkpoint defines it: w = scale * q + minimum, per block along K."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from gristmill.packed_weight import IMPLIED_ZERO_POINT, PackedWeight, pack
from gristmill.problem import UNIT_ROUNDOFF
from gristmill.reference import SUBNORMAL_ROUNDOFF


@dataclass(frozen=True)
class LayerInfo:
    """What is known of a layer before its data is read."""

    name: str
    K: int
    N: int
    group_size: int
    has_zero_points: bool
    format: str  # "Q4_1"


@dataclass(frozen=True, eq=False)
class AffineWeight:
    """One layer's values: w[n, k] = scales[n, g] * q[n, k] + minimums[n, g] with g = k // group_size.

    `minimums` None means -8 * scales. Scales and minimums are float64 and hold what the file holds, exactly.
    """

    info: LayerInfo
    q: np.ndarray  # (N, K) uint8, 0..15
    scales: np.ndarray  # (N, num_groups) float64
    minimums: np.ndarray | None  # (N, num_groups) float64

    def dense(self) -> np.ndarray:
        """The weight by the format's own formula: (N, K) float64."""
        group = np.arange(self.info.K) // self.info.group_size
        minimums = -IMPLIED_ZERO_POINT * self.scales if self.minimums is None else self.minimums
        return self.scales[:, group] * self.q + minimums[:, group]

    def pack(self, dtype: str) -> PackedWeight:
        """The layer in layout k8x, its scales and zero points rounded to `dtype`.

        A minimum m becomes the zero point -m / scale. Where that does not exist (scale 0) or is past the largest
        float16, the block's sixteen values are equal to within one rounding to `dtype`, and it is stored as q = 0,
        zero point -1, scale = the middle of them.
        """
        q, scales, zero_points = self.q, self.scales, None
        if self.minimums is not None:
            largest = float(np.finfo(np.float16).max)
            constant = np.abs(self.minimums) > np.abs(scales) * largest
            zero_points = np.where(constant, -1.0, -self.minimums / np.where(constant | (scales == 0), 1.0, scales))
            scales = np.where(constant, self.minimums + 7.5 * scales, scales)
            group = np.arange(self.info.K) // self.info.group_size
            q = np.where(constant[:, group], 0, q)
        return pack(q, scales, zero_points, group_size=self.info.group_size, dtype=dtype)

    def conversion_bound(self, dtype: str) -> np.ndarray:
        """Elementwise bound on |packed - dense|: (N, K) float64.

        Rounding the scale moves a weight by u * |w|; rounding the zero point moves it by u * |minimum|, or by half a
        subnormal step times the scale where the zero point is that small; the second acts on what the first left. A
        constant block (see `pack`) is off by half its spread, under 7.5 / 65504 of its minimum, and by the rounding
        of its scale: less than the same sum.
        """
        u = UNIT_ROUNDOFF[dtype]
        group = np.arange(self.info.K) // self.info.group_size
        if self.minimums is None:
            return u * np.abs(self.dense())
        metadata = u * np.abs(self.minimums) + SUBNORMAL_ROUNDOFF[dtype] * np.abs(self.scales)
        return (1 + u) * (u * np.abs(self.dense()) + metadata[:, group])
