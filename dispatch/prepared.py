"""A weight as launches need it: located, checked, and with the kernels chosen so far.

What a call costs is decided here: after the first call of its kind it is a dict look-up, five stores into an argument
buffer and the driver's launch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Literal

from gristmill.arrays import HOST, ArrayView, Device, view
from gristmill.errors import ArgumentError, DeviceMismatchError, StrideError
from gristmill.launch import ArgumentBuffer, check_int32, fill
from gristmill.loader import LoadedKernel, Loader, dependent_caches, loader_for
from gristmill.packed_weight import ARRAYS, ROW_WORDS, VALUES_PER_WORD, PackedWeight
from gristmill.problem import MAX_ALIGNMENT, OP_W4A16_GEMM, Problem
from gristmill.select import select

ALIGNED_VALUES = MAX_ALIGNMENT // 2  # of 16 bits each
MAX_CHOICES = 4096  # of one class of weights: values of M times alignments


class Choice:
    """A selection with its kernel loaded: all of a launch but the arguments."""

    __slots__ = ("grid", "kernel", "origin", "record", "shared_bytes")

    def __init__(self, kernel: LoadedKernel, grid: tuple[int, int, int], shared_bytes: int, origin: str) -> None:
        self.kernel = kernel
        self.grid = grid
        self.shared_bytes = shared_bytes
        self.origin = origin
        self.record: bytes | None = None  # of gristmill.fastcall


WEIGHT_STRIDE_LIMIT = 2**32  # the CUDA C++ kernels keep a weight's row strides in 32 bits; one rule for all archs


class PreparedWeight:
    """A weight on a device. It keeps no array alive."""

    __slots__ = (
        "K", "N", "_pools", "choices", "device", "dtype", "fast", "group_size", "has_bias", "has_perm",
        "has_zero_points", "loader", "low_bits", "ordinal", "single_out_row_stride", "single_row_stride", "values",
        "views",
    )  # fmt: skip

    def __init__(self, weight: PackedWeight) -> None:
        self.views = weight_views(weight)
        qweight, scales, zero_points = (self.views.get(name) for name in ("qweight", "scales", "zero_points"))
        assert qweight is not None
        assert scales is not None
        self.K = weight.K
        self.N = weight.N
        self.group_size = weight.group_size
        self.dtype = weight.dtype
        self.device = qweight.device
        self.ordinal = qweight.device.ordinal
        self.has_zero_points = zero_points is not None
        self.has_bias = "bias" in self.views
        self.has_perm = "perm" in self.views
        self.loader: Loader = loader_for(self.device)
        if weight.N > 1:
            qweight_row_stride, scales_row_stride = qweight.strides[0], scales.strides[0]
            zeros_row_stride = None if zero_points is None else zero_points.strides[0]
            _check_row_strides(weight.num_groups, qweight_row_stride, scales_row_stride, zeros_row_stride)
        else:  # a single row has no stride; the value given for it is the one that breaks no alignment
            words = -(-weight.K // VALUES_PER_WORD)
            qweight_row_stride, scales_row_stride = -(-words // ROW_WORDS) * ROW_WORDS, weight.num_groups
        self.single_row_stride = -(-weight.K // ALIGNED_VALUES) * ALIGNED_VALUES
        self.single_out_row_stride = -(-weight.N // ALIGNED_VALUES) * ALIGNED_VALUES
        self.low_bits = qweight.address | qweight_row_stride * 4
        self.values = {
            "qweight": qweight.address,
            "scales": scales.address,
            "zero_points": zero_points.address if zero_points is not None else 0,
            "bias": self.views["bias"].address if self.has_bias else 0,
            "N": weight.N,
            "K": weight.K,
            "group_size": weight.group_size,
            "num_groups": weight.num_groups,
            "qweight_row_stride": qweight_row_stride,
            "scales_row_stride": scales_row_stride,
            # Written anew in each call.
            "x": 0, "out": 0, "M": 0, "x_row_stride": 0, "out_row_stride": 0,
        }  # fmt: skip
        weight_class = (self.K, self.N, self.group_size, self.dtype, self.has_zero_points, self.has_bias)
        # By `M << 4 | low_bits & 15`, low_bits being the bitwise or of all addresses and row strides in bytes that the
        # alignment covers: its lowest four bits tell all alignments up to MAX_ALIGNMENT apart.
        self.choices: dict[int, Choice] = self.loader.choices.setdefault(weight_class, {})
        # Of gristmill.fastcall: None until it has been asked, False where it cannot serve this weight.
        self.fast: Callable[..., Any] | Literal[False] | None = None
        self._pools: dict[LoadedKernel, list[ArgumentBuffer]] = {}

    def problem(self, M: int, alignment: int) -> Problem:
        return Problem(
            op=OP_W4A16_GEMM,
            M=M,
            N=self.N,
            K=self.K,
            group_size=self.group_size,
            dtype=self.dtype,
            has_zero_points=self.has_zero_points,
            has_bias=self.has_bias,
            alignment=alignment,
        )

    def choose(self, M: int, low_bits: int, stream: int) -> Choice:
        """Select and load, and keep the result in `choices`, where `low_bits` is explained."""
        alignment = (low_bits | MAX_ALIGNMENT) & -(low_bits | MAX_ALIGNMENT)
        problem = self.problem(M, alignment)
        selection = select(problem, self.loader.facts, self.loader.pack.manifest)
        kernel = self.loader.kernel(selection.entry, stream)
        if selection.is_floor:
            import logging

            logging.getLogger("gristmill").warning(
                "floor kernel %s for %s on %s (%s): right, but not chosen for speed",
                selection.entry.name, problem, self.device, self.loader.facts.arch,
            )  # fmt: skip
        choice = Choice(kernel, selection.grid, selection.dynamic_shared_bytes, selection.origin)
        if len(self.choices) >= MAX_CHOICES:
            self.choices.clear()
        self.choices[M << 4 | low_bits & 15] = choice
        return choice

    def launch(
        self, choice: Choice, M: int, x: int, x_row_stride: int, out: int, out_row_stride: int, stream: int
    ) -> None:
        """Launch `choice` on checked arguments: addresses, and row strides in elements."""
        kernel = choice.kernel
        if x_row_stride | out_row_stride > kernel.row_stride_limit:
            check_int32("x_row_stride", x_row_stride, kernel.entry)
            check_int32("out_row_stride", out_row_stride, kernel.entry)
        # A buffer is in no pool while it is in use: threads never share one, without a lock.
        try:
            pool = self._pools[kernel]
            buffer = pool.pop()
        except (KeyError, IndexError):
            pool = self._pools.setdefault(kernel, [])
            buffer = fill(ArgumentBuffer(kernel.entry.arguments, spare_slots=1), kernel.entry, self.values)
        values = buffer.values
        at_x, at_out, at_M, at_x_row_stride, at_out_row_stride = kernel.varying
        values[at_x] = x
        values[at_out] = out
        values[at_M] = M
        values[at_x_row_stride] = x_row_stride
        values[at_out_row_stride] = out_row_stride
        loader = self.loader
        loader.driver.launch(
            self.ordinal, kernel.function, choice.grid, kernel.block, choice.shared_bytes, buffer, stream
        )
        pool.append(buffer)


def weight_views(weight: PackedWeight) -> dict[str, ArrayView]:
    """Views of the arrays that `weight` has, by name; DeviceMismatchError unless all lie on one device."""
    arrays = {name: getattr(weight, name) for name in ARRAYS}
    views = {name: view(array) for name, array in arrays.items() if array is not None}
    device = views["qweight"].device
    for name, found in views.items():
        if found.device != device:
            raise DeviceMismatchError(f"{name} must be on {device}, the device of qweight, got {found.device}")
    return views


def check_weight(weight: PackedWeight) -> None:
    """ArgumentError for what is no weight."""
    if not isinstance(weight, PackedWeight):
        raise ArgumentError(f"weight must be a PackedWeight, got {type(weight).__name__}; gristmill.pack makes one")


def device_of_weight(weight: PackedWeight) -> Device:
    """The device that the weight's arrays lie on; ArgumentError for what is no weight."""
    check_weight(weight)
    return view(weight.qweight).device


prepared_weights: dict[int, tuple[weakref.ref[PackedWeight], PreparedWeight]] = {}
"""By the id of the weight, which takes its entry along when it goes."""
dependent_caches.append(prepared_weights)


def _check_row_strides(num_groups: int, qweight: int, scales: int, zero_points: int | None) -> None:
    """Raise StrideError for row strides that the kernels cannot take; in elements."""
    if scales < num_groups:  # the kernels take N * num_groups numbers as there
        raise StrideError(f"rows of scales must not overlap, got row stride {scales}")
    if zero_points is not None and zero_points != scales:
        raise StrideError(f"scales and zero_points must have one row stride, got {scales} and {zero_points}")
    for name, stride in (("qweight", qweight), ("scales", scales)):
        if stride >= WEIGHT_STRIDE_LIMIT:
            raise StrideError(f"rows of {name} must be less than 2^32 elements apart, got {stride}")


def prepare(weight: PackedWeight) -> PreparedWeight:
    """The prepared form of `weight`, made on first use and dropped with it.

    Raises
    ------
    DeviceMismatchError : the weight lies on the host, or not all of it on one device
    StrideError : rows of scales overlap or lie too far apart, or scales and zero points differ in row stride
    NoPackError, NoDriverError, NoDeviceError : its device cannot be used
    """
    key = id(weight)
    found = prepared_weights.get(key)
    if found is not None:
        return found[1]
    if device_of_weight(weight).driver == HOST:
        raise DeviceMismatchError(
            "weight must be on a device, got arrays on cpu; see gristmill.to_torch and gristmill.to_device"
        )
    prepared = PreparedWeight(weight)

    def forget(_: Any, key: int = key) -> None:
        prepared_weights.pop(key, None)

    prepared_weights[key] = (weakref.ref(weight, forget), prepared)
    return prepared
