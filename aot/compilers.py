"""A variant -> the compiler that makes its object, and what a pack and the build cache ask about it."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

from gristmill.aot import compile_cuda, compile_hip, compile_triton, cxx_sources
from gristmill.aot.compiled_object import CompiledObject
from gristmill.aot.errors import BuildError
from gristmill.aot.targets import Target
from gristmill.kernels.variant import CxxVariant, TritonVariant
from gristmill.manifest import Argument

Variant = TritonVariant | CxxVariant

# By the suffix of the source.
CXX_COMPILERS: dict[str, ModuleType] = {".hip": compile_hip, ".cu": compile_cuda}


def compile_variant(variant: Variant, target: Target) -> CompiledObject:
    """Compile one variant with the compiler of its kind; see the compilers' own for what they raise."""
    return _compiler(variant).compile_variant(variant, target)


def argument_layout(variant: Variant) -> tuple[Argument, ...]:
    """The kernel's arguments in order, those that the compiler adds included."""
    if isinstance(variant, CxxVariant):
        return cxx_sources.argument_layout(variant)
    return compile_triton.argument_layout(variant)


def cxx_key_facts(variant: CxxVariant, target: Target) -> Mapping[str, object]:
    """All that a C++ variant's object depends on."""
    return _compiler(variant).key_facts(variant, target)


def dynamic_shared_bytes(variant: Variant, result: CompiledObject) -> str:
    """Formula of the dynamic shared memory: a C++ variant's own, or the number that Triton gives."""
    return variant.dynamic_shared_bytes if isinstance(variant, CxxVariant) else str(result.dynamic_shared_bytes)


def block(variant: Variant, result: CompiledObject) -> tuple[int, int, int]:
    """Threads of a block."""
    return variant.block if isinstance(variant, CxxVariant) else (result.threads, 1, 1)


def figures(variant: Variant) -> Mapping[str, int]:
    """What the row itself tells people of the kernel, beside what its code object says."""
    return variant.figures if isinstance(variant, CxxVariant) else {}


def early_start(variant: Variant) -> bool:
    """See `gristmill.manifest.Entry`."""
    return isinstance(variant, CxxVariant) and variant.early_start


def _compiler(variant: Variant) -> ModuleType:
    if isinstance(variant, TritonVariant):
        return compile_triton
    for suffix, module in CXX_COMPILERS.items():
        if variant.source.endswith(suffix):
            return module
    raise BuildError(f"{variant.name}: no compiler for {variant.source}; known: {', '.join(CXX_COMPILERS)}")
