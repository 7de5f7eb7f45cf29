"""Host time per eager call, in one process: ours beside torch.mm's, Triton's JIT and the driver's launch alone.

    python tests/bench/host_cost.py

Needs a GPU, torch and the GPU's pack; Triton's rows need triton. Each figure is the best of 7 rounds of 2000 calls,
after a warm-up, with the queue drained between rounds; the rows take turns, so that a slow minute is everyone's.
M=1 N=576 K=576, so that the host is what limits.
"""

from __future__ import annotations

import ctypes
import sys
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[1]))
import fake_driver
import gristmill
from gristmill.nn import W4A16Linear
from gristmill.prepared import prepare

CALLS = 2000
ROUNDS = 7
OURS = "gristmill.linear"
MM = "torch.mm"
JIT = "Triton JIT, launch"


def time_us(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Host time of one call in us, the best over the rounds."""
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(1 + ROUNDS):  # the first one warms up: its times are never the best
        for name, call in calls.items():
            torch.cuda.synchronize()
            best[name] = min(best[name], 1e6 * timeit.timeit(call, number=CALLS) / CALLS)
    return best


def launch_alone(weight: Any, x: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """The driver's launch of the kernel that `linear` takes, prepared: through our driver, and C function alone."""
    prepared = prepare(weight)
    choice = next(iter(prepared.choices.values()))
    buffer = next(iter(prepared._pools.values()))[0]
    driver, kernel = prepared.loader.driver, choice.kernel
    stream = torch.cuda.current_stream().cuda_stream
    arguments = (0, kernel.function, choice.grid, kernel.block, choice.shared_bytes, buffer, stream)
    rows: dict[str, Callable[[], Any]] = {"driver's launch through Python": lambda: driver.launch(*arguments)}
    repeat = _repeated_launch(driver, kernel, choice, buffer, stream)
    if repeat:
        rows["driver's launch in C"] = repeat
    return rows


def _repeated_launch(driver, kernel, choice, buffer, stream) -> Callable[[], Any] | None:
    """The floor: cuLaunchKernel by a C function that takes no arguments to convert. ctypes adds its own call to it."""
    pointers = driver.launch_pointers(0)
    if pointers is None:
        return None
    prototype = ctypes.CFUNCTYPE(
        ctypes.c_int, ctypes.c_void_p, *(ctypes.c_uint,) * 7, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p
    )
    launch = prototype(pointers.launch)
    values = [ctypes.c_void_p(kernel.function.handle)]
    values += [ctypes.c_uint(value) for value in (*choice.grid, *kernel.block, choice.shared_bytes)]
    values += [ctypes.c_void_p(stream or None), ctypes.c_void_p(buffer.address), ctypes.c_void_p()]
    return lambda: launch(*values)


def triton_calls(x: torch.Tensor, weight: Any) -> dict[str, Callable[[], Any]]:
    """Our tile kernel as a user of Triton launches it: into one output, and with an output made for each call."""
    try:
        from gristmill.aot.jit_peer import jit_call

        launch = jit_call(x, weight, torch.empty((1, 576), dtype=x.dtype, device=x.device))
        launch()
    except Exception as error:  # no triton, or one that does not know the kernel's language
        print(f"no rows for Triton: {type(error).__name__}: {error}")
        return {}
    return {JIT: launch, "Triton JIT, launch and new_empty": lambda: (x.new_empty((1, 576)), launch())}


def main() -> None:
    weight = gristmill.to_torch(fake_driver.random_weight(576, 576, 32, zero_points=True), "cuda")
    layer = W4A16Linear(weight)
    dense = torch.randn(576, 576, dtype=torch.float16, device="cuda")
    x, x3 = (torch.randn(shape, dtype=torch.float16, device="cuda") for shape in ((1, 576), (1, 1, 576)))
    with torch.inference_mode():
        out = gristmill.linear(x, weight)
        served = "in C" if prepare(weight).fast else "in Python"
        entry = next(iter(prepare(weight).choices.values())).kernel.entry.name
        print(f"{torch.cuda.get_device_name()}, {entry}, best of {ROUNDS} x {CALLS} calls, eager calls made {served}")
        calls: dict[str, Callable[[], Any]] = {
            MM: lambda: torch.mm(x, dense),
            OURS: lambda: gristmill.linear(x, weight),
            "gristmill.linear, rank 3": lambda: gristmill.linear(x3, weight),
            "gristmill.linear, out given": lambda: gristmill.linear(x, weight, out=out),
            "W4A16Linear": lambda: layer(x),
            "torch.ops.gristmill.w4a16_linear": lambda: torch.ops.gristmill.w4a16_linear(
                x, weight.qweight, weight.scales, weight.zero_points, None, None, 576, 32),
            **triton_calls(x, weight),
            **launch_alone(weight, x),
            "output allocation, new_empty": lambda: x.new_empty((1, 576)),
        }  # fmt: skip
        times = time_us(calls)
    for name, us in times.items():
        print(f"{name:34} {us:7.2f} us  {us / times[MM]:5.2f} of torch.mm")
    print(f"{OURS} over {MM}: {times[OURS] / times[MM]:.2f} (wanted: at most 0.50)")
    if JIT in times:
        print(f"{OURS} over {JIT}: {times[OURS] / times[JIT]:.2f} (wanted: below 0.33)")
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
