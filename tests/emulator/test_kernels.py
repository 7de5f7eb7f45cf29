"""Whole kernels, as compilers make them, against float64."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from assembled import ARCHS
from compiled import Built, hip_kernel, triton_kernels
from gristmill.aot.emulator import (
    DeviceMemory,
    LaunchReport,
    LdsAccessError,
    MemoryAccessError,
    Module,
    launch,
)

GROUP = 32


def to_dtype(values: np.ndarray, dtype: str) -> np.ndarray:
    """Bits of fp16 or bf16, as uint16."""
    if dtype == "fp16":
        return values.astype(np.float16).view(np.uint16)
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_dtype(bits: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "fp16":
        return bits.view(np.float16).astype(np.float64)
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


class Problem:
    """Inputs, and the result in float64, from the definition of the format."""

    def __init__(self, M: int, N: int, K: int, dtype: str, zero_points: bool):
        rng = np.random.default_rng(M * 10000 + N * 100 + K)
        groups = -(-K // GROUP)
        self.shape, self.dtype, self.groups = (M, N, K), dtype, groups
        self.a = to_dtype(rng.standard_normal((M, K)), dtype)
        self.scales = to_dtype(rng.uniform(0.01, 0.1, (N, groups)), dtype)
        self.zeros = to_dtype(rng.integers(0, 16, (N, groups)).astype(np.float64), dtype)
        self.bias = to_dtype(rng.standard_normal(N), dtype)
        q = rng.integers(0, 16, (N, K))
        padded = np.concatenate([q, rng.integers(0, 16, (N, -K % 8))], axis=1).astype(np.uint32)
        self.words = np.zeros((N, padded.shape[1] // 8), np.uint32)
        for i in range(8):
            self.words |= padded[:, i::8] << np.uint32(4 * (i // 2) + 16 * (i % 2))
        group = np.arange(K) // GROUP
        zero = from_dtype(self.zeros, dtype)[:, group] if zero_points else 8
        weight = (q - zero) * from_dtype(self.scales, dtype)[:, group]
        a = from_dtype(self.a, dtype)
        self.want = a @ weight.T + from_dtype(self.bias, dtype)
        unit = 2.0**-11 if dtype == "fp16" else 2.0**-8
        # The weight is rounded to the dtype once, the result once; fp32 sums take K additions and the bias.
        self.bound = (2 * unit + (K + 1) * 2.0**-24) * (
            np.abs(a) @ np.abs(weight).T + np.abs(from_dtype(self.bias, dtype))
        )


def run(arch: str, built: Built, problem: Problem, **options: object) -> tuple[np.ndarray, LaunchReport]:
    M, N, K = problem.shape
    memory = DeviceMemory()
    arrays = {
        "a": problem.a,
        "q": problem.words,
        "s": problem.scales,
        "z": problem.zeros,
        "bias": problem.bias,
    }
    out = np.zeros((M, N), np.uint16)
    pointers = [memory.map(array, name, read_only=True) for name, array in arrays.items()]
    pointers.append(memory.map(out, "out"))
    arguments = struct.pack("<6Q4i2Q", *pointers, M, N, K, problem.groups, 0, 0)
    report = launch(
        Module(built.code).kernel(built.symbol), memory, (-(-M // built.tile[0]), -(-N // built.tile[1]), 1),
        (built.threads, 1, 1), built.shared_bytes, arguments, **options,
    )  # fmt: skip
    return from_dtype(out, problem.dtype), report


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("shape", [(1, 1, 8), (16, 64, 128), (33, 37, 72), (5, 70, 200)], ids=str)
def test_triton_w4a16(arch, dtype, shape):
    for built in triton_kernels(arch, dtype):
        problem = Problem(*shape, dtype, built.zero_points)
        got, _ = run(arch, built, problem)
        error = (np.abs(got - problem.want) / problem.bound).max()
        assert error <= 1, f"tile {built.tile} zero points {built.zero_points}: {error} times the bound"
        assert error > 0.001, "the bound is too loose to mean anything"


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("schedule", ["forward", "reverse", "random"])
def test_order_of_waves_does_not_matter(arch, schedule):
    for built in triton_kernels(arch, "fp16"):
        problem = Problem(17, 65, 72, "fp16", built.zero_points)
        (fast, _), (serial, report) = (
            run(arch, built, problem),
            run(arch, built, problem, schedule=schedule, seed=7),
        )
        np.testing.assert_array_equal(fast, serial)
        assert report.schedule == schedule


@pytest.mark.parametrize("arch", ARCHS)
def test_report_counts_what_the_kernel_does(arch):
    built = triton_kernels(arch, "fp16")[0]
    problem = Problem(16, 64, 128, "fp16", False)
    _, report = run(arch, built, problem)
    assert (report.blocks, report.waves, report.arch) == (2, 4, arch)
    # 16 x 64 x 128 products, 16 x 16 x 16 to an instruction.
    assert report.instructions["wmma"] == 64 * 128 // 256
    assert report.bytes_written == 16 * 64 * 2
    assert report.total_instructions == sum(report.mnemonics.values())


@pytest.mark.parametrize("arch", ARCHS)
def test_too_little_shared_memory_is_found(arch):
    built = triton_kernels(arch, "fp16")[0]
    less = Built(built.code, built.symbol, built.threads, built.shared_bytes // 2, built.tile, built.zero_points)
    with pytest.raises(LdsAccessError):
        run(arch, less, Problem(16, 64, 128, "fp16", False))


@pytest.mark.parametrize("arch", ARCHS)
def test_wrong_size_is_found(arch):
    """A launch that claims a longer K than the buffers hold reads past one of them."""
    built = triton_kernels(arch, "fp16")[0]
    problem = Problem(16, 64, 128, "fp16", False)
    problem.shape = (16, 64, 256)
    with pytest.raises(MemoryAccessError):
        run(arch, built, problem)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("schedule", ["lockstep", "forward", "reverse"])
@pytest.mark.parametrize("pairs", [1, 128, 300])
def test_hip_dot_product(arch, schedule, pairs):
    rng = np.random.default_rng(pairs)
    a, b = (
        rng.standard_normal((3, 2 * pairs)).astype(np.float16),
        rng.standard_normal(2 * pairs).astype(np.float16),
    )
    out, memory = np.zeros(3, np.float32), DeviceMemory()
    arguments = struct.pack(
        "<3Qi",
        memory.map(a, "a", read_only=True),
        memory.map(b, "b", read_only=True),
        memory.map(out, "out"),
        pairs,
    )
    launch(
        Module(hip_kernel(arch)).kernel("dot_reduce"),
        memory,
        (3, 1, 1),
        (128, 1, 1),
        16,
        arguments,
        schedule=schedule,
    )
    want = a.astype(np.float64) @ b.astype(np.float64)
    bound = (2 * pairs) * 2.0**-24 * (np.abs(a.astype(np.float64)) @ np.abs(b.astype(np.float64)))
    assert (np.abs(out - want) <= bound).all()
