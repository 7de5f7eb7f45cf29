"""The self-test of an entry: a few small problems, chosen to reach every edge that the entry accepts.

The same cases run in the emulator before a pack is made into a wheel, and on a user's device with
`gristmill selftest`. Each runs with fresh random inputs, poison in every byte that the kernel must not read into a
result or write, and is compared element by element with the float64 reference.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from gristmill.arrays import Device, DeviceArray, numpy_dtype
from gristmill.device import DeviceFacts
from gristmill.drivers import get_driver
from gristmill.launch import ArgumentBuffer, fill
from gristmill.loader import LoadedKernel
from gristmill.manifest import Entry
from gristmill.packed_weight import NIBBLE_SHIFTS, VALUES_PER_WORD, dequantize, pack
from gristmill.problem import OP_W4A16_GEMM, Problem
from gristmill.reference import error_bound, linear_float64, worst_error_over_bound
from gristmill.select import launch_shape, unmet_needs
from gristmill.verified import Record

# Sizes around the tiles and words that kernels are made of, odd ones among them.
ROWS = (1, 2, 3, 5, 6, 8, 9, 16, 17, 24, 32, 33, 65, 129, 257, 1025)
COLUMNS = (1, 7, 8, 24, 40, 72, 136, 264, 520)
DEPTHS = (8, 20, 40, 72, 136, 200, 248, 264, 384, 392, 656)
GROUP_SIZES = (8, 24, 32, 48, 64, 96, 128, 256, -1)
POOL_SIZE = 10000
POOL_SEED = 4

MANY_BLOCKS = 8  # of rows, past which kernels go on to the next group of tiles

# What lies around an output, and in it before it is computed: read into a result or written over, it shows.
POISON_BYTE = 0xFF  # every 16-bit float made of these bytes is a NaN
GUARD_ELEMENTS = 128


@dataclass(frozen=True, slots=True)
class Case:
    """One small problem."""

    M: int
    N: int
    K: int
    group_size: int  # resolved
    has_bias: bool
    alignment: int  # 16: as a fresh allocation; 2: nothing but the element's own


@dataclass(frozen=True, slots=True)
class CaseResult:
    """How far off one case was."""

    case: Case
    error_over_bound: float
    guard_intact: bool

    @property
    def passed(self) -> bool:
        return self.error_over_bound <= 1 and self.guard_intact


def cases_for(entry: Entry, device: DeviceFacts) -> list[Case]:
    """Few cases that together reach every edge: greedily the cheapest that reaches most of what is left.

    Deterministic: the same entry gets the same cases on devices of one kind. None where the device has too little of
    something for all of them: 8.6 and 8.9 run sm80's pack with less shared memory than it was built for.
    """
    reach = {case: _edges(entry, case, device) for case in _candidates(entry, device)}
    left = set().union(*reach.values())
    chosen = []
    while left:
        case = max(reach, key=lambda case: (len(reach[case] & left) / _cost(case), -_cost(case)))
        left -= reach[case]
        chosen.append(case)
    return chosen


def why_no_cases(entry: Entry, device: DeviceFacts) -> str:
    """Why `cases_for` has none: what the case that comes nearest does not meet."""
    unmet = (unmet_needs(entry, problem_of(entry, case), device) for case in _pool())
    nearest = min(unmet, key=len)
    return "; ".join(nearest)


def run_case(
    kernel: LoadedKernel, device: Device, facts: DeviceFacts, case: Case, rng: np.random.Generator
) -> CaseResult:
    """Run `kernel` on one case and compare with the float64 reference."""
    entry = kernel.entry
    dtype = numpy_dtype(entry.needs.dtype)
    groups = -(-case.K // case.group_size)
    weight = pack(
        rng.integers(0, 16, (case.N, case.K)),
        rng.uniform(0.01, 0.1, (case.N, groups)) * rng.choice((-1, 1), (case.N, groups)),
        rng.uniform(-1, 16, (case.N, groups)) if entry.needs.zero_points else None,
        rng.standard_normal(case.N) if case.has_bias else None,
        group_size=case.group_size,
        dtype=entry.needs.dtype,
    )
    x = rng.standard_normal((case.M, case.K)).astype(dtype)

    place = _Placer(device, case.alignment, rng)
    arrays = {
        "x": place.rows(x),
        "qweight": place.rows(_with_garbage_nibbles(weight.qweight, case.K, rng)),
        "scales": place.rows(weight.scales),
        "zero_points": None if weight.zero_points is None else place.rows(weight.zero_points),
        "bias": None if weight.bias is None else DeviceArray.from_numpy(weight.bias, device),
    }
    memory, out = place.output(case.M, case.N, entry.needs.dtype)
    arrays["out"] = out
    _launch(kernel, device, facts, case, arrays)

    everything = memory.to_numpy()
    rows = np.lib.stride_tricks.as_strided(
        everything[place.output_offset :], out.shape, (out.strides[0] * dtype.itemsize, dtype.itemsize)
    )
    result = rows.copy()
    rows.view(np.uint16)[...] = 0xFFFF
    w = dequantize(weight)
    reference = linear_float64(x, w, weight.bias)
    bound = error_bound(
        x,
        w,
        weight.bias,
        dtype=entry.needs.dtype,
        roundings=entry.roundings,
        weights_in_dtype=entry.weights_in_dtype,
    )
    return CaseResult(
        case=case,
        error_over_bound=worst_error_over_bound(result, reference, bound),
        guard_intact=bool((everything.view(np.uint8) == POISON_BYTE).all()),
    )


def record_of(entry: Entry, results: Sequence[CaseResult], on: str, how: str) -> Record:
    """The record of an entry all of whose cases passed; there is at least one."""
    return Record(
        object=entry.object,
        on=on,
        how=how,
        cases=len(results),
        worst_error_over_bound=max(result.error_over_bound for result in results),
    )


def problem_of(entry: Entry, case: Case) -> Problem:
    """The problem that `case` poses to `entry`."""
    return Problem(
        op=OP_W4A16_GEMM,
        M=case.M,
        N=case.N,
        K=case.K,
        group_size=case.group_size,
        dtype=entry.needs.dtype,
        has_zero_points=entry.needs.zero_points,
        has_bias=case.has_bias,
        alignment=case.alignment,
    )


def _candidates(entry: Entry, device: DeviceFacts) -> Iterator[Case]:
    """The cases of `_pool` that the entry accepts."""
    for case in _pool():
        if not unmet_needs(entry, problem_of(entry, case), device):
            yield case


@lru_cache(maxsize=1)
def _pool() -> tuple[Case, ...]:
    """A fixed random sample of all combinations: enough that each accepted value of each size is among them."""
    choice = random.Random(POOL_SEED).choice
    cases: dict[Case, None] = {}
    for _ in range(POOL_SIZE):
        K, group_size = choice(DEPTHS), choice(GROUP_SIZES)
        if group_size >= K:
            group_size = K
        case = Case(
            choice(ROWS),
            choice(COLUMNS),
            K,
            K if group_size == -1 else group_size,
            choice((False, True)),
            choice((16, 2)),
        )
        cases[case] = None
    return tuple(cases)


def _edges(entry: Entry, case: Case, device: DeviceFacts) -> frozenset[str]:
    """What of the entry's domain a case touches."""
    blocks, one_row, one_column = (
        math.prod(launch_shape(entry, problem_of(entry, other), device)[0])
        for other in (case, _replace(case, M=1), _replace(case, N=1))
    )
    edges = {
        f"group_size {case.group_size}" if case.group_size != case.K else "group_size -1",
        f"bias {case.has_bias}",
        f"alignment {case.alignment}",
        "one row" if case.M == 1 else "odd rows" if case.M % 2 else "even rows",
        "one column" if case.N == 1 else f"N % 8 == {case.N % 8}",
        f"K % 8 == {case.K % 8}",
        "short K" if case.K < 128 else "long K" if case.K > 512 else "middling K",
    }
    # What a tile along K leaves over, for each width of tile that divides 128: nothing, or all but the last word.
    if case.K % 128 in (0, 120):
        edges.add(f"K % 128 == {case.K % 128}")
    if 2 * case.group_size <= case.K:
        edges.add(f"several groups of {case.group_size}")
    if blocks > one_row and blocks > one_column and case.K > 128:
        edges.add("several blocks both ways")
    if blocks > one_row:
        edges.add("several blocks of rows")
    if blocks > one_column:
        edges.add("several blocks of columns")
        edges.add(f"several blocks of columns, bias {case.has_bias}")
        if blocks > MANY_BLOCKS * one_row:
            edges.add("many blocks of rows, several of columns")
    if case.K % case.group_size:
        edges.add("ragged last group")
    if case.M <= 8:
        edges.add(f"M {case.M}")
    return frozenset(edges)


def _cost(case: Case) -> float:
    return 4096 + (case.M + 16) * (case.N + 16) * (case.K + 64) / 64


def _replace(case: Case, **changes: int) -> Case:
    fields = {name: getattr(case, name) for name in Case.__slots__}
    return Case(**{**fields, **changes})


class _Placer:
    """Puts arrays on the device with padded rows and, for the least alignment, at an odd element."""

    def __init__(self, device: Device, alignment: int, rng: np.random.Generator) -> None:
        self.device = device
        self.aligned = alignment == 16
        self.rng = rng
        self.output_offset = 0

    def rows(self, array: np.ndarray) -> DeviceArray:
        """A 2-D array whose padding holds NaNs or random words; nothing lies behind its last element."""
        rows, columns = array.shape
        stride, offset = self._stride_and_offset(columns, 16 // array.itemsize)
        extent = offset + (rows - 1) * stride + columns
        flat = np.full(extent * array.itemsize, POISON_BYTE, np.uint8).view(array.dtype)
        if array.dtype == np.int32:
            flat[...] = self.rng.integers(-(2**31), 2**31, flat.shape)
        for row in range(rows):
            flat[offset + row * stride : offset + row * stride + columns] = array[row]
        return DeviceArray.from_numpy(flat, self.device).part(offset, array.shape, (stride, 1))

    def output(self, M: int, N: int, dtype: str) -> tuple[DeviceArray, DeviceArray]:
        """Poisoned memory, and the output in its middle."""
        stride, offset = self._stride_and_offset(N + GUARD_ELEMENTS, 8)
        self.output_offset = GUARD_ELEMENTS + offset
        memory = DeviceArray.empty(self.device, (self.output_offset + M * stride + GUARD_ELEMENTS,), dtype)
        memory.fill_bytes(POISON_BYTE)
        return memory, memory.part(self.output_offset, (M, N), (stride, 1))

    def _stride_and_offset(self, columns: int, step: int) -> tuple[int, int]:
        if self.aligned:
            return (-(-columns // step) + 1) * step, 0
        return columns + 1 + columns % 2, 1


def _with_garbage_nibbles(qweight: np.ndarray, K: int, rng: np.random.Generator) -> np.ndarray:
    """The packed rows with random values in the nibbles past K."""
    words = np.ascontiguousarray(qweight)
    if K % VALUES_PER_WORD:
        garbage = 15 * rng.integers(0, 2, (words.shape[0], VALUES_PER_WORD), dtype=np.uint32)
        for i in range(K % VALUES_PER_WORD, VALUES_PER_WORD):
            words[:, -1] |= (garbage[:, i] << NIBBLE_SHIFTS[i]).view(np.int32)
    return words


def _launch(
    kernel: LoadedKernel, device: Device, facts: DeviceFacts, case: Case, arrays: dict[str, DeviceArray | None]
) -> None:
    driver = get_driver(device.driver)
    values: dict[str, int] = {name: 0 if array is None else array.address for name, array in arrays.items()}
    values |= {name: getattr(case, name) for name in ("M", "N", "K", "group_size")}
    values["num_groups"] = -(-case.K // case.group_size)
    for name in ("x", "qweight", "scales", "out"):
        array = arrays[name]
        assert array is not None
        values[f"{name}_row_stride"] = array.strides[0]
    grid, shared_bytes = launch_shape(kernel.entry, problem_of(kernel.entry, case), facts)
    arguments = fill(ArgumentBuffer(kernel.entry.arguments), kernel.entry, values)
    driver.launch(device.ordinal, kernel.function, grid, kernel.block, shared_bytes, arguments, 0)
    driver.synchronize(device.ordinal)
