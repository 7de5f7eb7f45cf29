"""A variant: one row of what is built. Rows are plain data; `gristmill.aot` turns each into a code object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class TritonVariant:
    """One specialisation of a Triton kernel.

    The run-time arguments are the keys of `signature`, in the kernel's order; a name is one of
    `gristmill.manifest.ARGUMENT_NAMES`.
    """

    name: str  # the entry's name in the manifest, unique in a pack
    op: str
    module: str  # "gristmill.kernels.w4a16_gemm"
    function: str  # the @triton.jit function in it
    signature: Mapping[str, str]  # argument -> Triton type: "*fp16", "*i32", "i32", "i64"
    constexprs: Mapping[str, object]
    divisibility: Mapping[str, int]  # argument -> what divides its value for sure (bytes for a pointer)
    num_warps: int
    num_stages: int
    grid: tuple[str, str, str]  # formulas, in blocks
    dtype: str  # "float16", "bfloat16"
    zero_points: bool
    conditions: tuple[str, ...]  # formulas, all of which a problem must meet
    roundings: int  # see gristmill.manifest.Entry
    weights_in_dtype: bool
    options: Mapping[str, object] = field(default_factory=dict)  # further compiler options of the backend


@dataclass(frozen=True, slots=True)
class PolicyRow:
    """One rule of a pack's policy; see gristmill.manifest.Rule."""

    when: str
    variants: tuple[str, ...]
    origin: str


@dataclass(frozen=True, slots=True)
class CxxVariant:
    """One specialisation of a C++ kernel: a source file compiled with its own macros into its own object."""

    name: str  # the entry's name in the manifest, unique in a pack
    op: str
    source: str  # "csrc/hip/w4a16_skinny.hip"
    symbol: str  # extern "C" name of the kernel
    defines: Mapping[str, int | str]  # macros
    arguments: tuple[tuple[str, str], ...]  # (name, type) as in gristmill.manifest.Argument, in order
    block: tuple[int, int, int]  # in threads
    grid: tuple[str, str, str]  # formulas, in blocks
    dynamic_shared_bytes: str  # formula
    dtype: str  # "float16", "bfloat16"
    zero_points: bool
    conditions: tuple[str, ...]  # formulas, all of which a problem must meet
    roundings: int  # see gristmill.manifest.Entry
    weights_in_dtype: bool
    early_start: bool = False  # see gristmill.manifest.Entry
    features: str = ""  # "a" for sm_90a: instructions of this very processor, which no later one needs to have
    # What people are told of it beside registers and the like, in the entry's resources: counts, predictions.
    figures: Mapping[str, int] = field(default_factory=dict)
