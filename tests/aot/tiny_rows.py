"""Rows of variants over the small kernels."""

from __future__ import annotations

from dataclasses import replace

from gristmill.kernels.variant import PolicyRow, TritonVariant

ARCHS = ("gfx1151", "gfx1201", "sm80", "sm90")

TINY = TritonVariant(
    name="tiny",
    op="w4a16_gemm",
    module="tiny_kernels",
    function="tiny",
    signature={"x": "*fp16", "qweight": "*fp16", "out": "*fp16", "M": "i32", "N": "i64"},
    constexprs={"BLOCK": 32},
    divisibility={"x": 16, "qweight": 16},
    num_warps=2,
    num_stages=2,
    grid=("ceil_div(M, 32)", "ceil_div(N, 32)", "1"),
    dtype="float16",
    zero_points=False,
    conditions=("alignment % 16 == 0",),
    roundings=1,
    weights_in_dtype=True,
)


def variants(arch: str) -> list[TritonVariant]:
    """Three rows of two objects: the floor differs from the first in its needs alone."""
    return [
        TINY,
        replace(TINY, name="tiny_16", constexprs={"BLOCK": 16}),
        replace(TINY, name="floor", conditions=()),
    ]


def policy(arch: str) -> list[PolicyRow]:
    return [PolicyRow("M <= 16", ("tiny_16", "tiny"), "test"), PolicyRow("1", ("floor",), "test")]
