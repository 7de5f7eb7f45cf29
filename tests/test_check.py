"""`check_layer`: the entry that it names, and whose bound it applies, is the one that ran."""

import numpy as np
import pytest
from gristmill.arrays import Device
from gristmill.check import check_layer
from gristmill.checkpoints.affine import AffineWeight, LayerInfo


@pytest.mark.parametrize("M", [1, 3, 20])
@pytest.mark.parametrize("N", [7, 24])
def test_entry_named_is_the_entry_launched(fake_device, M, N):
    rng = np.random.default_rng()
    info = LayerInfo("layer", K=96, N=N, group_size=32, has_zero_points=True, format="Q4_1")
    scales = rng.uniform(0.01, 0.1, (N, 3)).astype(np.float16).astype(float)
    minimums = rng.uniform(-1, 1, (N, 3)).astype(np.float16).astype(float)
    weight = AffineWeight(info, rng.integers(0, 16, (N, 96), dtype=np.uint8), scales, minimums)
    (row,) = check_layer(weight, Device("fake", 0), "float16", [M], rng)
    (launch,) = fake_device.called("launch")
    assert launch[1].startswith(f"symbol_{row.entry} ")
    assert row.passed


def test_wrong_numbers_fail(fake_device):
    rng = np.random.default_rng()
    info = LayerInfo("layer", K=64, N=8, group_size=32, has_zero_points=False, format="Q4_0")
    weight = AffineWeight(info, rng.integers(0, 16, (8, 64), dtype=np.uint8), np.full((8, 2), 0.25), None)
    fake_device.computes = False  # the output stays poison
    (row,) = check_layer(weight, Device("fake", 0), "bfloat16", [5], rng)
    assert row.error_over_bound == np.inf
    assert not row.passed
