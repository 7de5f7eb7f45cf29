"""The programs of `gristmill bench --cold`; each runs in a process of its own and prints its times.

This file is run as text, by `python -c`, so that nothing of gristmill is imported before a clock starts.
"""

from __future__ import annotations

import sys
import time


class Clock:
    """Times of phases in ms, one after the other."""

    def __init__(self) -> None:
        self.phases: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self.phases[phase] = 1000 * (now - self._last)
        self._last = now


def without_torch(folder: str) -> None:
    """numpy arrays in, a numpy array out."""
    import numpy as np

    given = dict(np.load(f"{folder}/problem.npz"))
    clock = Clock()
    from gristmill import DeviceArray, PackedWeight, linear, to_device
    from gristmill.arrays import Device
    from gristmill.drivers import get_driver
    from gristmill.loader import loader_for

    driver = get_driver("cuda")
    clock.lap("imports")
    driver.synchronize(0)
    clock.lap("CUDA")
    loader_for(Device("cuda", 0))
    clock.lap("manifest")
    weight = to_device(_weight(PackedWeight, given), "cuda:0")
    clock.lap("weight and modules")
    x = DeviceArray.from_numpy(given["x"], "cuda:0")
    result = linear(x, weight).to_numpy()
    clock.lap("launch and copies")
    _report(clock, np, given, result)


def with_torch(folder: str) -> None:
    """Tensors on the CPU in, a tensor on the CPU out."""
    import numpy as np

    given = dict(np.load(f"{folder}/problem.npz"))
    torch = _torch_with_cuda()
    clock = Clock()
    from gristmill import PackedWeight, linear, to_torch
    from gristmill.arrays import Device
    from gristmill.loader import loader_for

    clock.lap("imports")
    loader_for(Device("cuda", 0))
    clock.lap("manifest")
    weight = to_torch(_weight(PackedWeight, given), "cuda")
    clock.lap("weight and modules")
    result = linear(torch.from_numpy(given["x"]).cuda(), weight).cpu()
    clock.lap("launch and copies")
    _report(clock, np, given, result.numpy())


def with_jit(folder: str) -> None:
    """The tile kernel of the same source through Triton's JIT."""
    import numpy as np

    given = dict(np.load(f"{folder}/problem.npz"))
    torch = _torch_with_cuda()
    from gristmill import PackedWeight

    tensors = {name: torch.from_numpy(given[name]) for name in ("x", "qweight", "scales")}
    clock = Clock()
    from gristmill.aot.jit_peer import jit_call

    clock.lap("imports")
    weight = _weight(PackedWeight, {**given, **{name: tensor.cuda() for name, tensor in tensors.items()}})
    x = tensors["x"].cuda()
    clock.lap("weight and modules")
    out = x.new_empty(x.shape[0], weight.N)
    jit_call(x, weight, out)()
    result = out.cpu()
    clock.lap("launch and copies")
    _report(clock, np, given, result.numpy())


def imports(folder: str) -> None:
    """`import gristmill`, as a program does that may or may not call it."""
    clock = Clock()
    import gristmill  # noqa: F401

    clock.lap("imports")
    _print(clock)


def preload_model(folder: str) -> None:
    """Every kernel that a model can hit, its weights being on the device already."""
    import json
    from pathlib import Path

    from gristmill import DeviceArray, PackedWeight, preload
    from gristmill.drivers import get_driver

    get_driver("cuda").synchronize(0)
    layers = json.loads((Path(folder) / "model.json").read_text())
    weights = []
    for K, N in layers["shapes"] * layers["layers"]:
        # What the arrays hold does not matter, so they are not filled.
        qweight = DeviceArray.empty("cuda:0", (N, -(-K // 8)), "int32", row_stride=-(-K // 32) * 4)
        scales = DeviceArray.empty("cuda:0", (N, -(-K // 128)), "float16")
        weights.append(PackedWeight(K, N, 128, "float16", qweight, scales))
    clock = Clock()
    report = preload(weights)
    clock.lap("manifest and modules")
    _print(clock, weights=len(weights), kernels=len(report.entries))


def _torch_with_cuda():
    import torch

    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    return torch


def _weight(packed_weight, given):
    return packed_weight(
        K=int(given["K"]),
        N=int(given["N"]),
        group_size=int(given["group_size"]),
        dtype="float16",
        qweight=given["qweight"],
        scales=given["scales"],
    )


def _report(clock: Clock, np, given, result) -> None:
    error = np.abs(result.astype(np.float64) - given["expected"])
    _print(clock, worst=float((error / given["bound"]).max()))


def _print(clock: Clock, **facts: float) -> None:
    import json

    print(json.dumps({"phases": clock.phases, **facts}))


if __name__ == "__main__":
    globals()[sys.argv[1]](sys.argv[2])
