"""The sources behind a pack: rows of variants, and digests of all text that a kernel is compiled from."""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from gristmill.aot.compile_triton import compile_options, recipe_digests
from gristmill.aot.compilers import Variant, cxx_key_facts
from gristmill.aot.cxx_sources import source_digests as cxx_source_digests
from gristmill.aot.errors import BuildError
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


@lru_cache
def source_digests(module: str) -> Mapping[str, str]:
    """sha256 of the source of `module` and of all modules of its package that it imports, by module name.

    Read from the files, so that the cache can be asked without importing triton.
    """
    digests: dict[str, str] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name in digests:
            continue
        path = _source_path(name)
        if path is None:
            if name == module:
                raise BuildError(f"no source for module {module!r}")
            continue
        digests[name] = _file_digest(path)
        try:
            tree = ast.parse(path.read_bytes(), str(path))
        except SyntaxError as error:
            raise BuildError(f"{name}: line {error.lineno}: {error.msg}: {(error.text or '').strip()}") from None
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        waiting += [found for found in _imports(tree, package) if _is_related(found, module)]
    return dict(sorted(digests.items()))


def source_path(variant: Variant) -> str:
    """The file of the variant's kernel as people know it: `kernels/w4a16_gemm.py`."""
    if isinstance(variant, CxxVariant):
        return variant.source
    return "/".join(variant.module.split(".")[-2:]) + ".py"


def _imports(tree: ast.AST, package: str) -> Iterator[str]:
    """Names of the modules that the source may import; `from a import b` may mean a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".") if node.level else []
            parents = parents[: len(parents) - node.level + 1] if node.level else parents
            base = ".".join([*parents, *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _is_related(name: str, module: str) -> bool:
    """Whether `name` is ours: in the top-level package of `module` or, when it has none, a file beside it."""
    if "." in module:
        return name.split(".")[0] == module.split(".")[0]
    path, own = _source_path(name), _source_path(module)
    return path is not None and own is not None and path.parent == own.parent


def _source_path(name: str) -> Path | None:
    parent = name.rpartition(".")[0]
    if parent:
        parent_path = _source_path(parent)
        if parent_path is None or parent_path.name != "__init__.py":
            return None  # `name` is something in a module: looking it up would import it, and triton
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    return Path(spec.origin)


def _constants(variant: TritonVariant) -> dict[str, Any]:
    for name, value in variant.constexprs.items():
        if not isinstance(value, bool | int | float | str | None):
            raise BuildError(f"{variant.name}: constant {name!r} is a {type(value).__name__}; a row holds plain values")
    return dict(variant.constexprs)


def _file_digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _digest(document: object) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
