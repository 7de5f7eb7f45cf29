"""The sources behind a pack: rows of variants, and the digests that name what is made of them."""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gristmill.aot.compile_triton import compile_options, recipe_digests
from gristmill.aot.compilers import Variant, cxx_key_facts
from gristmill.aot.cxx_sources import source_digests as cxx_source_digests
from gristmill.aot.errors import BuildError
from gristmill.aot.module_sources import bytecode_unwritten, source_digests
from gristmill.aot.targets import Target
from gristmill.aot.toolchain import triton_identity
from gristmill.kernels.variant import CxxVariant, PolicyRow, TritonVariant

# Each has `variants(arch)` and `policy(arch)`. The first rule that holds is taken, so the kernels for few
# tokens stand before the one that takes whatever is left.
ROW_MODULES = (
    "gristmill.csrc.w4a16_skinny_hip_variants",
    "gristmill.csrc.w4a16_skinny_cuda_variants",
    "gristmill.csrc.w4a16_wgmma_variants",
    "gristmill.kernels.w4a16_gemm_variants",
)


@dataclass(frozen=True, slots=True)
class Rows:
    """All that is to be built for one arch."""

    variants: tuple[Variant, ...]
    policy: tuple[PolicyRow, ...]


def read_rows(arch: str, modules: Sequence[str] = ROW_MODULES) -> Rows:
    """The rows of `arch` in all of `modules`; BuildError when there are none or two have one name."""
    variants: list[Variant] = []
    policy: list[PolicyRow] = []
    for name in modules:
        try:
            with bytecode_unwritten():
                module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            raise BuildError(f"no rows of variants: {error}") from None
        variants += module.variants(arch)
        policy += module.policy(arch)
    names = [variant.name for variant in variants]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise BuildError(f"{arch}: variants of one name: {', '.join(twice)}")
    if not variants:
        raise BuildError(f"no variants for {arch} in {', '.join(modules)}")
    return Rows(tuple(variants), tuple(policy))


def object_key(variant: Variant, target: Target) -> str:
    """The name of the variant's object in the cache: a digest of all that the object depends on.

    Variants that differ in what selection needs, not in code, share a key and so an object.
    """
    if isinstance(variant, CxxVariant):
        return _digest(cxx_key_facts(variant, target))
    return _digest(
        {
            "target": [target.arch, *target.triton],
            "module": variant.module,
            "function": variant.function,
            "signature": list(variant.signature.items()),
            "constexprs": _constants(variant),
            "divisibility": dict(variant.divisibility),
            "options": compile_options(variant),
            "sources": source_digests(variant.module),
            "recipe": recipe_digests(),
            "compiler": triton_identity(),
        }
    )


def rows_digest(rows: Rows) -> str:
    """Digest of rows and kernel sources: what the manifest calls the source digest."""
    sources: dict[str, Mapping[str, str]] = {}
    for variant in rows.variants:
        if isinstance(variant, CxxVariant):
            if variant.source not in sources:
                sources[variant.source] = cxx_source_digests(variant)
        else:
            sources[variant.module] = source_digests(variant.module)
    return _digest(
        {
            "variants": [_row_document(variant) for variant in rows.variants],
            "policy": [asdict(row) for row in rows.policy],
            "sources": sources,
        }
    )


def _row_document(variant: Variant) -> dict[str, Any]:
    """The row as JSON, its mappings whose order counts as lists."""
    document = asdict(variant)
    if isinstance(variant, TritonVariant):
        document["signature"] = list(variant.signature.items())
    return document


def source_path(variant: Variant) -> str:
    """The file of the variant's kernel as people know it: `kernels/w4a16_gemm.py`."""
    if isinstance(variant, CxxVariant):
        return variant.source
    return "/".join(variant.module.split(".")[-2:]) + ".py"


def _constants(variant: TritonVariant) -> dict[str, Any]:
    for name, value in variant.constexprs.items():
        if not isinstance(value, bool | int | float | str | None):
            raise BuildError(f"{variant.name}: constant {name!r} is a {type(value).__name__}; a row holds plain values")
    return dict(variant.constexprs)


def _digest(document: object) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
