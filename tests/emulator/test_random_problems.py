"""Random problems through select, loader and launch on the emulated devices, with fresh inputs each time.

The self-test's cases are chosen; these are not. A failure names the seed that repeats it.
"""

from __future__ import annotations

import gristmill
import numpy as np
import pytest
from gristmill.aot.emulator.driver import ARCHS
from gristmill.arrays import Device, DeviceArray, numpy_dtype
from gristmill.packed_weight import dequantize, pack
from gristmill.prepared import prepare
from gristmill.reference import error_bound, linear_float64, worst_error_over_bound

PROBLEMS = 25


def draw(rng: np.random.Generator) -> dict:
    """One problem: sizes mostly small and odd, group sizes of every kind."""
    K = int(
        rng.choice([rng.integers(1, 64), rng.integers(64, 900), 8 * rng.integers(1, 100), 32 * rng.integers(1, 24)])
    )
    group_size = int(rng.choice([-1, 32, 64, 128, 8 * rng.integers(1, 40)]))
    return {
        "M": int(rng.choice([rng.integers(1, 9), rng.integers(9, 34), rng.integers(34, 80)])),
        "N": int(rng.choice([rng.integers(1, 20), rng.integers(20, 150)])),
        "K": K,
        "group_size": group_size,
        "dtype": str(rng.choice(["float16", "bfloat16"])),
        "zero_points": bool(rng.integers(2)),
        "bias": bool(rng.integers(2)),
        "x_padding": int(rng.choice([0, 0, 1, 5, 8])),
        "x_offset": int(rng.choice([0, 0, 1, 3])),
    }


@pytest.mark.parametrize("arch", ARCHS)
def test_random_problems_are_within_the_bound(arch):
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print(f"seed {seed}")  # shown with a failure of any kind
    rng = np.random.default_rng(seed)
    device = Device.parse(f"emulated:{arch}")
    for _ in range(PROBLEMS):
        problem = draw(rng)
        where = f"{arch} seed {seed}: {problem}"
        M, N, K = problem["M"], problem["N"], problem["K"]
        groups = 1 if problem["group_size"] == -1 else -(-K // problem["group_size"])
        weight = pack(
            rng.integers(0, 16, (N, K)),
            rng.standard_normal((N, groups)) * 0.05,
            rng.uniform(-3, 18, (N, groups)) if problem["zero_points"] else None,
            rng.standard_normal(N) if problem["bias"] else None,
            group_size=problem["group_size"],
            dtype=problem["dtype"],
        )
        x = rng.standard_normal((M, K)).astype(numpy_dtype(problem["dtype"]))
        stride = K + problem["x_padding"]
        flat = np.full(problem["x_offset"] + (M - 1) * stride + K, np.nan, x.dtype)
        rows = np.lib.stride_tricks.as_strided(flat[problem["x_offset"] :], (M, K), (2 * stride, 2))
        rows[...] = x
        x_device = DeviceArray.from_numpy(flat, device).part(problem["x_offset"], (M, K), (stride, 1))
        placed = gristmill.to_device(weight, str(device))
        choices = prepare(placed).choices
        choices.clear()
        out = gristmill.linear(x_device, placed).to_numpy()
        (choice,) = choices.values()
        entry = choice.kernel.entry
        w, bias = dequantize(weight), weight.bias
        bound = error_bound(
            x, w, bias, dtype=problem["dtype"], roundings=entry.roundings, weights_in_dtype=entry.weights_in_dtype
        )
        ratio = worst_error_over_bound(out, linear_float64(x, w, bias), bound)
        assert ratio <= 1, f"{where}, {entry.name}: {ratio} of the bound"
