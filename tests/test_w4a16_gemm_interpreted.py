"""Numerics of the Triton W4A16 GEMM, run as Python by Triton's interpreter, against a float64 reference.

TRITON_INTERPRET is read when triton is imported, so the cases run in one child process, which is this file
as a program; the tests read its answers.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
torch = pytest.importorskip("torch")

UNIT_ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
SMALLEST_SUBNORMAL = {"float16": 2.0**-24, "bfloat16": 2.0**-133}


@dataclass(frozen=True)
class Case:
    M: int
    N: int
    K: int
    group_size: int
    dtype: str
    zero_points: bool
    bias: bool
    block: tuple[int, int, int]  # BLOCK_M, BLOCK_N, BLOCK_K
    scale_weights: bool
    scales: int
    unroll: int = 1
    rdna: bool = False

    def __str__(self) -> str:
        parts = [f"M{self.M}-N{self.N}-K{self.K}-g{self.group_size}-{self.dtype}"]
        parts += ["zeros"] * self.zero_points + ["bias"] * self.bias + ["x".join(map(str, self.block))]
        parts += ["weights"] * self.scale_weights + [f"{self.scales}scales"] + ["rdna"] * self.rdna
        return "-".join(parts)


def cases() -> list[Case]:
    """Every K with every group size that it can have, the other fields turning at different rates."""
    rows = []
    sizes_m = itertools.cycle((1, 15, 16, 17, 33))
    sizes_n = itertools.cycle((1, 7, 8, 24, 72, 136))
    flags = itertools.cycle(itertools.product((False, True), (False, True)))
    for dtype, K, group_size in itertools.product(
        ("float16", "bfloat16"), (1, 5, 8, 72, 77, 128, 200, 576), (8, 24, 32, 64, 128, -1)
    ):
        if group_size > K:
            continue
        for block_k, scale_weights, scales in ways(group_size):
            M, N, (zero_points, bias) = next(sizes_m), next(sizes_n), next(flags)
            unroll, rdna = 1 + len(rows) % 2, len(rows) % 3 == 0
            block = (16, 32, block_k)
            way = (block, scale_weights, scales, unroll, rdna)
            rows.append(Case(M, N, K, group_size, dtype, zero_points, bias, *way))
    for zero_points, scale_weights in itertools.product((False, True), (False, True)):
        large = (zero_points, True, (32, 64, 64), scale_weights)
        rows.append(Case(33, 136, 576, 64, "float16", *large, 1))
        rows.append(Case(17, 72, 576, 128, "bfloat16", *large, 4))
    return rows


def ways(group_size: int) -> list[tuple[int, bool, int]]:
    """BLOCK_K, SCALE_WEIGHTS and SCALES.

    A tile in one group, groups in one tile, and the floor for any group.
    """
    floor = (32, True, 4)
    return {
        32: [(32, False, 1), (128, True, 4), floor],
        64: [(64, False, 4), (128, True, 2), floor],
        128: [(64, False, 1), (128, True, 1), floor],
        -1: [(64, False, 2), (128, True, 4), floor],
    }.get(group_size, [floor])


@pytest.fixture(scope="module")
def answers() -> dict[str, dict]:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    child = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout)


@pytest.mark.parametrize("case", cases(), ids=str)
def test_result_is_within_the_bound(case: Case, answers: dict[str, dict]) -> None:
    answer = answers[str(case)]
    assert answer["worst_error_over_bound"] <= 1.0
    assert answer["untouched"], "wrote outside of out"


def test_overflow_gives_infinity(answers: dict[str, dict]) -> None:
    assert answers["overflow"] == {"infinite": True}


# In the child process.


def teach_bfloat16() -> None:
    """Give the interpreter bfloat16 arithmetic: it keeps such tensors as raw uint16, adds and multiplies the
    bits, and truncates where the hardware rounds to nearest even."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def widen(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def narrow(data: np.ndarray) -> TensorHandle:
        bits = torch.from_numpy(np.array(data, dtype=np.float32)).to(torch.bfloat16).view(torch.int16)
        return TensorHandle(bits.numpy().view(np.uint16), tl.bfloat16)

    def binary(plain):
        def operation(self, lhs, rhs):
            if lhs.dtype.scalar != tl.bfloat16:
                return plain(self, lhs, rhs)
            return narrow(plain(self, widen(lhs), widen(rhs)).data)

        return operation

    def cast(plain):
        def operation(self, src, dst_type):
            if src.dtype.scalar == tl.float32 and dst_type.scalar == tl.bfloat16:
                return narrow(src.data)
            return widen(src) if src.dtype.scalar == tl.bfloat16 else plain(self, src, dst_type)

        return operation

    for name in ("create_fadd", "create_fsub", "create_fmul"):
        setattr(InterpreterBuilder, name, binary(getattr(InterpreterBuilder, name)))
    for name in ("create_fp_trunc", "create_fp_ext"):
        setattr(InterpreterBuilder, name, cast(getattr(InterpreterBuilder, name)))
    dot = InterpreterBuilder.create_dot
    InterpreterBuilder.create_dot = lambda self, a, b, *rest: dot(self, widen(a), widen(b), *rest)


def pack(q: np.ndarray, garbage: np.random.Generator) -> np.ndarray:
    """[N, K] values 0..15 -> [N, ceil(K/8)] words of layout k8x; the padding nibbles hold anything."""
    N, K = q.shape
    words = -(-K // 8)
    padded = garbage.integers(0, 16, (N, words * 8), dtype=np.uint32)
    padded[:, :K] = q
    shifts = np.array([4 * (i // 2) + 16 * (i % 2) for i in range(8)], dtype=np.uint32)
    return np.bitwise_or.reduce(padded.reshape(N, words, 8) << shifts, axis=2).view(np.int32)


@triton.jit
def halves(pair):
    low = (pair & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
    return low, (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def joined(low, high):
    low = low.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return low | (high.to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def packed_add(a, b):
    a_low, a_high = halves(a)
    b_low, b_high = halves(b)
    return joined(a_low + b_low, a_high + b_high)


@triton.jit
def packed_multiply(a, b):
    a_low, a_high = halves(a)
    b_low, b_high = halves(b)
    return joined(a_low * b_low, a_high * b_high)


@triton.jit
def upper_halves(low, high):
    return ((low >> 16) & 0xFFFF) | (high & -0x10000)


def teach_instructions() -> None:
    """Say in Triton what the kernel's inline assembly does: the interpreter cannot run that."""
    from gristmill.kernels import w4a16_gemm as module

    module._packed_add, module._packed_multiply = packed_add, packed_multiply
    module._upper_halves = upper_halves


def run(case: Case, x: torch.Tensor, q: np.ndarray, scales, zeros, bias) -> tuple[np.ndarray, bool]:
    """Launch the kernel on buffers whose rows are longer than needed; what must not be read is NaN."""
    from gristmill.kernels.w4a16_gemm import w4a16_gemm

    rng = np.random.default_rng(1)
    M, N, K = case.M, case.N, case.K
    group_size = K if case.group_size == -1 else case.group_size
    x_wide = torch.full((M, K + 3), float("nan"), dtype=x.dtype)
    x_wide[:, :K] = x
    words = torch.from_numpy(pack(q, rng))
    words_wide = torch.randint(-(2**31), 2**31 - 1, (N, words.shape[1] + 1), dtype=torch.int32)
    words_wide[:, :-1] = words
    out_wide = torch.full((M + 2, N + 5), 7.0, dtype=x.dtype)
    out = out_wide[1 : M + 1, 2 : N + 2]
    block_m, block_n, block_k = case.block
    grid = (-(-M // block_m) * -(-N // block_n), 1, 1)
    w4a16_gemm[grid](
        x=x_wide, qweight=words_wide, scales=scales, zero_points=zeros,
        bias=torch.empty(0, dtype=x.dtype) if bias is None else bias,  # an empty tensor is a null pointer
        out=out, M=M, N=N, K=K, group_size=group_size,
        x_row_stride=x_wide.stride(0), qweight_row_stride=words_wide.stride(0),
        scales_row_stride=scales.stride(0), out_row_stride=out_wide.stride(0),
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, GROUP_M=2, UNROLL=case.unroll, RDNA=case.rdna,
        SCALE_WEIGHTS=case.scale_weights, SCALES=case.scales,
    )  # fmt: skip
    result = out.double().numpy().copy()
    out.fill_(7.0)
    return result, bool((out_wide == 7.0).all())


def answer(case: Case) -> dict:
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    dtype = getattr(torch, case.dtype)
    M, N, K = case.M, case.N, case.K
    group_size = K if case.group_size == -1 else case.group_size
    groups = -(-K // group_size)
    x = torch.randn(M, K).to(dtype)
    q = rng.integers(0, 16, (N, K))
    scales = (torch.rand(N, groups) * 0.02 + 0.001).to(dtype)
    zeros = (torch.rand(N, groups) * 15).to(dtype) if case.zero_points else None
    bias = torch.randn(N).to(dtype) if case.bias else None
    result, untouched = run(case, x, q, scales, zeros, bias)

    group = np.arange(K) // group_size
    zero = zeros.double().numpy()[:, group] if case.zero_points else 8.0
    w = (q - zero) * scales.double().numpy()[:, group]
    a = x.double().numpy()
    reference = a @ w.T
    magnitude = np.abs(a) @ np.abs(w.T)
    if bias is not None:
        reference = reference + bias.double().numpy()
        magnitude = magnitude + np.abs(bias.double().numpy())
    u, tiny = UNIT_ROUNDOFF[case.dtype], SMALLEST_SUBNORMAL[case.dtype]
    roundings = 1 + case.zero_points + case.scale_weights
    bound = (roundings * u + K * 2.0**-24) * magnitude + tiny * (1 + np.abs(a).sum(axis=1, keepdims=True))
    worst = float((np.abs(result - reference) / bound).max())
    return {"worst_error_over_bound": worst, "untouched": untouched}


def overflow() -> dict:
    """A sum past the largest half is an infinity of the right sign in every column."""
    case = Case(1, 8, 64, 64, "float16", False, False, (16, 16, 64), False, 1)
    x = torch.full((1, 64), 60000.0, dtype=torch.float16)
    q = np.where(np.arange(8)[:, None] % 2, 0, 15) + np.zeros((8, 64), dtype=int)
    result, _ = run(case, x, q, torch.full((8, 1), 1000.0, dtype=torch.float16), None, None)
    expected = np.where(np.arange(8) % 2, -np.inf, np.inf)[None, :]
    return {"infinite": bool((result == expected).all())}


if __name__ == "__main__":
    teach_bfloat16()
    teach_instructions()
    print(json.dumps({**{str(case): answer(case) for case in cases()}, "overflow": overflow()}))
