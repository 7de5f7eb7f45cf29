"""Host time per eager call, in one process: ours beside torch.mm's and the driver's launch alone.

    python tests/bench/host_cost.py

Needs a GPU, torch and the GPU's pack. Each figure is the best of 7 rounds of 2000 calls, after a warm-up, with the
queue drained between rounds. M=1 N=576 K=576, so that the host is what limits.
"""

from __future__ import annotations

import sys
import timeit
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1]))
import fake_driver
import gristmill
from gristmill.nn import W4A16Linear
from gristmill.prepared import prepare

CALLS = 2000
ROUNDS = 7


def time_us(call) -> float:
    """Host time of one call in us."""

    def run() -> float:
        torch.cuda.synchronize()
        return timeit.timeit(call, number=CALLS)

    run()
    return 1e6 * min(run() for _ in range(ROUNDS)) / CALLS


def main() -> None:
    weight = gristmill.to_torch(fake_driver.random_weight(576, 576, 32, zero_points=True), "cuda")
    layer = W4A16Linear(weight)
    dense = torch.randn(576, 576, dtype=torch.float16, device="cuda")
    prepared = prepare(weight)
    x, x3 = (torch.randn(shape, dtype=torch.float16, device="cuda") for shape in ((1, 576), (1, 1, 576)))
    out = gristmill.linear(x, weight)
    choice = next(iter(prepared.choices.values()))
    buffer = next(iter(prepared._pools.values()))[0]
    driver, kernel = prepared.loader.driver, choice.kernel
    stream = torch.cuda.current_stream().cuda_stream
    arguments = (0, kernel.function, choice.grid, kernel.block, choice.shared_bytes, buffer, stream)
    print(f"{torch.cuda.get_device_name()}, {kernel.entry.name}, best of {ROUNDS} x {CALLS} calls")
    with torch.inference_mode():
        for name, call in (
            ("torch.mm", lambda: torch.mm(x, dense)),
            ("gristmill.linear", lambda: gristmill.linear(x, weight)),
            ("gristmill.linear, rank 3", lambda: gristmill.linear(x3, weight)),
            ("gristmill.linear, out given", lambda: gristmill.linear(x, weight, out=out)),
            ("W4A16Linear", lambda: layer(x)),
            ("torch.ops.gristmill.w4a16_linear", lambda: torch.ops.gristmill.w4a16_linear(
                x, weight.qweight, weight.scales, weight.zero_points, None, None, 576, 32)),
            ("driver launch alone", lambda: driver.launch(*arguments)),
            ("output allocation alone", lambda: x.new_empty((1, 576))),
        ):  # fmt: skip
            print(f"{name:34} {time_us(call):7.2f} us")
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
