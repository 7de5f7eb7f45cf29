"""Runs the HIP decode kernels in the emulator: what their tests share.

As a program it runs every variant on many problems and prints the worst error over bound of each, then the
instruction counts that csrc/w4a16_skinny_hip_counts.py keeps: `python tests/hip_kernels.py [sweep|counts]
[ARCH ...]`.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from gristmill.aot.compile_hip import compile_variant
from gristmill.aot.compiled_object import CompiledObject
from gristmill.aot.cxx_sources import argument_layout
from gristmill.aot.emulator import DeviceMemory, Kernel, LaunchReport, Module, launch
from gristmill.aot.targets import find_target
from gristmill.arrays import numpy_dtype
from gristmill.csrc import w4a16_skinny_hip_variants as rows
from gristmill.device import DeviceFacts
from gristmill.formula import Formula
from gristmill.kernels.variant import CxxVariant
from gristmill.launch import ArgumentBuffer
from gristmill.packed_weight import PackedWeight, dequantize, pack
from gristmill.problem import Problem, resolve_group_size
from gristmill.reference import error_bound, linear_float64, worst_error_over_bound
from gristmill.select import formula_values


@dataclass(frozen=True)
class Case:
    """One problem, and how its arrays lie in memory."""

    M: int
    N: int
    K: int
    group_size: int = 128
    bias: bool = True
    x_padding: int = 8  # elements after each row of x, all NaN
    x_offset: int = 0  # elements before x
    multiprocessor_count: int = 2
    lds_bytes: int = 65536
    schedule: str = "lockstep"
    seed: int = 0

    @property
    def names(self) -> dict[str, int]:
        """What a row's formulas may name."""
        group_size = resolve_group_size(self.group_size, self.K)
        alignment = 2 if self.x_offset % 8 or self.x_padding % 8 else 16
        problem = Problem("w4a16_gemm", self.M, self.N, self.K, group_size, "float16", False, self.bias, alignment)
        device = DeviceFacts("hip", "", "", 32, self.multiprocessor_count, self.lds_bytes, 1024)
        return formula_values(problem, device)


@dataclass(frozen=True)
class Result:
    out: np.ndarray  # (M, N), the activation dtype
    worst: float  # error over bound
    report: LaunchReport


@cache
def variant(arch: str, name: str) -> CxxVariant:
    return next(row for row in rows.variants(arch) if row.name == name)


@cache
def compiled(arch: str, name: str) -> CompiledObject:
    return compile_variant(variant(arch, name), find_target(arch))


@cache
def kernel(arch: str, name: str) -> Kernel:
    found = compiled(arch, name)
    return Module(found.code).kernel(found.symbol)


def accepts(row: CxxVariant, case: Case) -> bool:
    return all(Formula(condition)(case.names) for condition in row.conditions)


def random_weight(row: CxxVariant, case: Case) -> PackedWeight:
    generator = np.random.default_rng(case.seed)
    N, K = case.N, case.K
    groups = (N, case.names["num_groups"])
    return pack(
        generator.integers(0, 16, (N, K)),
        generator.standard_normal(groups) * 0.05,
        generator.uniform(0, 15, groups) if row.zero_points else None,
        generator.standard_normal(N) if case.bias else None,
        group_size=case.group_size,
        dtype=row.dtype,
    )


def random_x(row: CxxVariant, case: Case) -> np.ndarray:
    return np.random.default_rng(case.seed + 1).standard_normal((case.M, case.K)).astype(numpy_dtype(row.dtype))


def run(arch: str, name: str, case: Case, weight: PackedWeight | None = None, x: np.ndarray | None = None) -> Result:
    """Run one variant as a launch would, with grid, LDS and arguments from the row's formulas.

    Rows of x end in NaN, the last row of x and of qweight ends with the allocation, padding nibbles hold
    noise, and the output lies between guards.
    """
    row = variant(arch, name)
    assert accepts(row, case), f"{name} does not take {case}"
    weight = random_weight(row, case) if weight is None else weight
    x = random_x(row, case) if x is None else x
    dtype, names = numpy_dtype(row.dtype), case.names
    M, N, K = case.M, case.N, case.K

    stride = K + case.x_padding
    padded = np.full((M, stride), np.nan, np.float32).astype(dtype)
    padded[:, :K] = x
    flat = np.concatenate([np.zeros(case.x_offset, dtype), padded.reshape(-1)[: (M - 1) * stride + K]])
    qweight = np.ascontiguousarray(weight.qweight)
    if K % 8:
        noise = np.random.default_rng(case.seed + 2).integers(0, 2**32, N, dtype=np.uint32)
        unused = sum(0xF << (4 * (i // 2) + 16 * (i % 2)) for i in range(K % 8, 8))
        qweight[:, -1] ^= (noise & np.uint32(unused)).view(np.int32)
    out = np.full((M, N + 5), 0x5A5A, np.uint16)

    memory = DeviceMemory()
    values = {**names, "x_row_stride": stride, "qweight_row_stride": qweight.shape[1],
              "scales_row_stride": names["num_groups"], "out_row_stride": N + 5}  # fmt: skip
    values["x"] = memory.map(flat.view(np.uint16), "x", read_only=True) + 2 * case.x_offset
    values["qweight"] = memory.map(qweight.view(np.uint32), "qweight", read_only=True)
    for array in ("scales", "zero_points", "bias"):
        host = getattr(weight, array)
        values[array] = 0 if host is None else memory.map(host.view(np.uint16), array, read_only=True)
    values["out"] = memory.map(out, "out")

    buffer = ArgumentBuffer(argument_layout(row))
    for position, argument in enumerate(argument_layout(row)):
        buffer.values[position] = values[argument.name]
    report = launch(
        kernel(arch, name),
        memory,
        grid=tuple(Formula(text)(names) for text in row.grid),
        block=row.block,
        dynamic_shared_bytes=Formula(row.dynamic_shared_bytes)(names),
        kernarg=buffer.packed(),
        schedule=case.schedule,
        seed=case.seed,
    )
    assert (out[:, N:] == 0x5A5A).all(), "wrote past N"
    found = out[:, :N].view(dtype)
    w = dequantize(weight)
    reference = linear_float64(x, w, weight.bias)
    bound = error_bound(
        x, w, weight.bias, dtype=row.dtype, roundings=row.roundings, weights_in_dtype=row.weights_in_dtype
    )
    return Result(found, worst_error_over_bound(found, reference, bound), report)


def counts(arch: str, name: str) -> tuple[float, float, float, float]:
    """Executed instructions a weight and lane in the main loop: VALU, WMMA, LDS, global.

    By differences between launches, so that what happens once a launch or once a row of K is left out.
    """
    row = variant(arch, name)
    if "TOKEN_TILES" in row.defines:
        turn = 32 * row.defines["WAVES"] * row.defines["DEPTH"]
        case = Case(16 * row.defines["TOKEN_TILES"], 16 * row.defines["COLUMNS"], 2 * turn, 32, bias=False)
        few, many = run(arch, name, case).report, run(arch, name, replace(case, K=4 * turn)).report
        weights = case.N * 2 * turn / 32
        change = lambda kind: many.instructions.get(kind, 0) - few.instructions.get(kind, 0)  # noqa: E731
    else:
        # Whole turns of the ring: rows of one and of two steps, as many of them as DEPTH and twice that.
        depth = row.defines["DEPTH"]
        tile_rows = row.defines["WAVES"] * row.defines["ROWS"]
        case = Case(row.defines["TOKENS"], tile_rows, 1024, 128, bias=False, multiprocessor_count=1)
        reports = {
            (n, k): run(arch, name, replace(case, N=n * depth * tile_rows, K=k * 1024)).report.instructions
            for n in (1, 2)
            for k in (1, 2)
        }
        weights = depth * tile_rows * 1024 / 32

        def change(kind: str) -> int:
            of = {key: report.get(kind, 0) for key, report in reports.items()}
            return of[2, 2] - of[1, 2] - of[2, 1] + of[1, 1]

    valu = sum(change(kind) for kind in ("valu", "vopd", "vop3p", "dot"))
    return tuple(round(n / weights, 3) for n in (valu, change("wmma"), change("lds"), change("global")))


SIZES = {  # N, K, group size
    "small": ((1, 32, -1), (3, 48, -1), (7, 72, 32), (16, 128, 64), (24, 576, 64), (33, 1536, 128)),
    "groups": ((5, 96, 32), (5, 192, 64), (5, 256, 128), (5, 512, 256), (5, 1160, -1)),
    "odd": ((2, 37, -1), (72, 1000, 32), (3, 1031, 128), (1, 2056, 256)),
    "any": ((3, 40, 8), (7, 1104, 48), (5, 1080, 24), (2, 2040, 96), (9, 500, 16), (3, 136, 40)),
}


def sweep_cases(row: CxxVariant) -> list[Case]:
    most = row.defines.get("TOKENS") or 16 * row.defines["TOKEN_TILES"]
    least = max(1, most - 15 if "TOKEN_TILES" in row.defines else most - 1)
    sizes = itertools.chain.from_iterable(SIZES.values())
    cases = [
        Case(M, N, K, g, bias=bool((N + K) % 2), x_padding=pad, x_offset=offset)
        for (N, K, g), (M, pad, offset) in zip(
            sizes, itertools.cycle(((most, 8, 0), (least, 1, 0), (most, 8, 3), (least, 16, 8))), strict=False
        )
    ]
    if "TOKENS" in row.defines:
        step = row.defines["TOKENS"] * 2048
        cases.append(Case(most, 70, 3104, 32, lds_bytes=step))
        cases.append(Case(most, 5, 3000, 128, lds_bytes=2 * step, schedule="reverse"))
        cases.append(Case(most, 3, 1030, -1, lds_bytes=step + 1000, schedule="random"))
    return [case for case in cases if accepts(row, case)]


def print_counts(archs: list[str]) -> None:
    """As the table COUNTS has them."""
    for arch in archs:
        print(f'    "{arch}": {{')
        for row in rows.variants(arch):
            print(f'        "{row.name}": Counts{counts(arch, row.name)},', flush=True)
        print("    },")


def main(arguments: list[str]) -> int:
    what = arguments[0] if arguments else "sweep"
    archs = arguments[1:] or list(rows.ARCHES)
    if what == "counts":
        print_counts(archs)
        return 0
    failed = 0
    for arch in archs:
        for row in rows.variants(arch):
            cases = sweep_cases(row)
            worst = max(run(arch, row.name, case).worst for case in cases)
            failed += worst > 1
            print(f"{arch} {row.name} {len(cases)} cases, worst error {worst:.3f} of the bound", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
