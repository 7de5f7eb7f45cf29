"""Check real layers on a device: the shipped kernels on the packed weight, against the checkpoint's own numbers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from gristmill.arrays import HOST, Device, DeviceArray, numpy_dtype
from gristmill.checkpoints.affine import AffineWeight
from gristmill.drivers import get_driver
from gristmill.drivers.default import HARDWARE
from gristmill.drivers.protocol import Driver
from gristmill.gemm import run
from gristmill.packed_weight import PackedWeight, dequantize
from gristmill.placement import to_device
from gristmill.prepared import Choice, prepare
from gristmill.reference import error_bound, linear_float64, worst_error_over_bound
from gristmill.selftest import GUARD_ELEMENTS, POISON_BYTE

TIMED_CALLS = 20


@dataclass(frozen=True, slots=True)
class CheckRow:
    """One layer at one M."""

    layer: str
    K: int
    N: int
    M: int
    dtype: str
    entry: str
    error_over_bound: float
    guard_intact: bool
    time_us: float

    @property
    def passed(self) -> bool:
        return self.error_over_bound <= 1 and self.guard_intact


@dataclass(frozen=True, slots=True)
class Answer:
    """What a device gave for one call, and the numerics of the entry that gave it."""

    out: np.ndarray
    entry: str
    roundings: int
    weights_in_dtype: bool
    guard_intact: bool
    time_us: float


def check_layer(
    weight: AffineWeight, device: Device, dtype: str, ms: Sequence[int], rng: np.random.Generator
) -> list[CheckRow]:
    """Run one layer for each M of `ms` with fresh random activations.

    The bound is the kernel's (`error_bound`) on the weight that it was given, plus what rounding the checkpoint's
    scales and zero points to `dtype` may have moved the weight (`AffineWeight.conversion_bound`).
    """
    packed = weight.pack(dtype)
    dense = weight.dense()
    moved = weight.conversion_bound(dtype)
    call = _reference_call(packed) if device.driver == HOST else _device_call(packed, device)
    rows = []
    for M in ms:
        x = rng.standard_normal((M, weight.info.K)).astype(numpy_dtype(dtype))
        answer = call(x)
        bound = error_bound(
            x,
            np.abs(dense) + moved,
            dtype=dtype,
            roundings=answer.roundings,
            weights_in_dtype=answer.weights_in_dtype,
        )
        bound += linear_float64(np.abs(x), moved)
        rows.append(
            CheckRow(
                layer=weight.info.name,
                K=weight.info.K,
                N=weight.info.N,
                M=M,
                dtype=dtype,
                entry=answer.entry,
                error_over_bound=worst_error_over_bound(answer.out, linear_float64(x, dense), bound),
                guard_intact=answer.guard_intact,
                time_us=answer.time_us,
            )
        )
    return rows


def _reference_call(packed: PackedWeight) -> Callable[[np.ndarray], Answer]:
    """The packed weight through float64 arithmetic: shows that packing is right where there is no GPU."""
    w = dequantize(packed)

    def call(x: np.ndarray) -> Answer:
        start = time.perf_counter()
        out = linear_float64(x, w).astype(x.dtype)
        return Answer(out, "reference", 1, False, True, (time.perf_counter() - start) * 1e6)

    return call


def _device_call(packed: PackedWeight, device: Device) -> Callable[[np.ndarray], Answer]:
    """The packed weight on `device`, through select, loader and launch as for any caller."""
    weight = to_device(packed, device)
    prepared = prepare(weight)
    driver = get_driver(device.driver)

    def call(x: np.ndarray) -> Answer:
        M, N = x.shape[0], weight.N
        x_device = DeviceArray.from_numpy(x, device)
        memory = DeviceArray.empty(device, (M * N + 2 * GUARD_ELEMENTS,), weight.dtype)
        memory.fill_bytes(POISON_BYTE)
        out = memory.part(GUARD_ELEMENTS, (M, N))

        def launch() -> Choice | None:
            return run(x_device.view(), out.view(), weight, prepared, 0)

        time_us, choice = _time_us(driver, device, launch, 1)
        everything = memory.to_numpy()
        if device.driver in HARDWARE:
            time_us, _ = _time_us(driver, device, launch, TIMED_CALLS)
        guards = np.concatenate((everything[:GUARD_ELEMENTS], everything[GUARD_ELEMENTS + M * N :])).view(np.uint8)
        assert choice is not None, "M is at least 1"
        entry = choice.kernel.entry
        return Answer(
            out=everything[GUARD_ELEMENTS : GUARD_ELEMENTS + M * N].reshape(M, N),
            entry=entry.name,
            roundings=entry.roundings,
            weights_in_dtype=entry.weights_in_dtype,
            guard_intact=bool((guards == POISON_BYTE).all()),
            time_us=time_us,
        )

    return call


def _time_us(
    driver: Driver, device: Device, launch: Callable[[], Choice | None], calls: int
) -> tuple[float, Choice | None]:
    """Time per call when `calls` follow each other, of the kernel or of the host where that takes longer; and what
    was launched."""
    start = driver.record_event(device.ordinal, 0)
    for _ in range(calls):
        choice = launch()
    stop = driver.record_event(device.ordinal, 0)
    return driver.elapsed_us(device.ordinal, start, stop) / calls, choice
