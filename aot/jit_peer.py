"""Our tile kernel through Triton's JIT: what the same source costs where it is compiled on the user's machine."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from gristmill.device import PACKS_FOR_ARCH
from gristmill.formula import Formula
from gristmill.kernels import w4a16_gemm_variants
from gristmill.kernels.variant import TritonVariant
from gristmill.launch import INT32_MAX
from gristmill.packed_weight import PackedWeight
from gristmill.problem import OP_W4A16_GEMM, Problem


def jit_call(x: Any, weight: PackedWeight, out: Any) -> Callable[[], Any]:
    """A launch of the tile kernel by Triton's JIT, which compiles in the first one.

    Parameters
    ----------
    x : torch tensor (M, K)
    weight : of torch tensors on the device of `x`, without `perm`
    out : (M, N), which the call writes

    Raises
    ------
    ImportError : there is no triton
    """
    import torch

    major, minor = torch.cuda.get_device_capability(x.device)
    count = torch.cuda.get_device_properties(x.device).multi_processor_count
    variant = choose(x.shape[0], weight, PACKS_FOR_ARCH[f"sm{major}{minor}"][0], count)
    launch = getattr(importlib.import_module(variant.module), variant.function)[_grid(variant, x.shape[0], weight)]
    # The kernel asks a bias for its address, which None has not.
    bias = weight.bias if weight.bias is not None else x.new_zeros(weight.N)
    arrays = (x, weight.qweight, weight.scales, weight.zero_points, bias, out)
    sizes = (x.shape[0], weight.N, weight.K, weight.group_size)
    strides = (x.stride(0), weight.qweight.stride(0), weight.scales.stride(0), out.stride(0))
    constants = {name: value for name, value in variant.constexprs.items() if name != "zero_points"}
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages, **variant.options}
    return lambda: launch(*arrays, *sizes, *strides, **constants, **options)


def choose(M: int, weight: PackedWeight, arch: str, multiprocessor_count: int) -> TritonVariant:
    """The tile kernel that the policy of `arch` takes, the C++ kernels left out."""
    # No bound of shared memory: a tile's row is made for its arch.
    own = {"multiprocessor_count": multiprocessor_count, "lds_bytes": INT32_MAX}
    values = _problem(M, weight).formula_values() | own
    rows = {row.name: row for row in w4a16_gemm_variants.variants(arch)}
    for rule in w4a16_gemm_variants.policy(arch):
        if Formula(rule.when)(values):
            for row in (rows[name] for name in rule.variants):
                fits = row.dtype == weight.dtype and row.zero_points == (weight.zero_points is not None)
                if fits and all(Formula(condition)(values) for condition in row.conditions):
                    return row
    raise LookupError(f"no tile kernel of {arch} for M={M} N={weight.N} K={weight.K}")


def _grid(variant: TritonVariant, M: int, weight: PackedWeight) -> tuple[int, ...]:
    return tuple(Formula(extent)(_problem(M, weight).formula_values()) for extent in variant.grid)


def _problem(M: int, weight: PackedWeight) -> Problem:
    return Problem(
        op=OP_W4A16_GEMM,
        M=M,
        N=weight.N,
        K=weight.K,
        group_size=weight.group_size,
        dtype=weight.dtype,
        has_zero_points=weight.zero_points is not None,
        has_bias=weight.bias is not None,
        alignment=16,
    )
