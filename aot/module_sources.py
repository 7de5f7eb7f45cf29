"""Digests of a Python module and of all that it imports of its package, and imports that leave no bytecode."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from gristmill.aot.errors import BuildError


@contextmanager
def bytecode_unwritten() -> Iterator[None]:
    """Write no bytecode for what is imported meanwhile.

    Python trusts bytecode whose source has kept its size and the second of its last change: an edit within that second
    would be missed. Bytecode that is there already is read.
    """
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        yield
    finally:
        sys.dont_write_bytecode = before


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
        digests[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        try:
            tree = ast.parse(path.read_bytes(), str(path))
        except SyntaxError as error:
            raise BuildError(f"{name}: line {error.lineno}: {error.msg}: {(error.text or '').strip()}") from None
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        waiting += [found for found in _imports(tree, package) if _is_related(found, module)]
    return dict(sorted(digests.items()))


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
