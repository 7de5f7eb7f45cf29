"""Triton kernels as they ship, for tests that run machine code: a compiled row, its entry, a pack of rows."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from gristmill.aot.compile_triton import compile_variant
from gristmill.aot.compiled_object import CompiledObject
from gristmill.aot.pack import make_manifest, write_pack
from gristmill.aot.sources import Rows
from gristmill.aot.targets import find_target
from gristmill.kernels import w4a16_gemm_variants
from gristmill.kernels.variant import PolicyRow, TritonVariant
from gristmill.manifest import Entry


@dataclass(frozen=True)
class Built:
    """An entry and its code object."""

    arch: str
    entry: Entry
    code: bytes


def kernel_source() -> str:
    """The text of the kernel that the rows name."""
    spec = importlib.util.find_spec(w4a16_gemm_variants.MODULE)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).read_text()


def smallest_row(arch: str, dtype: str = "float16", zero_points: bool = True, aligned: bool = True) -> TritonVariant:
    """The row of `arch` with the smallest tile that several waves share, each with a part of its own, and
    whose sums are scaled, not its weights; or, without alignment, the floor."""

    def size(row: TritonVariant) -> int:
        return row.constexprs["BLOCK_M"] * row.constexprs["BLOCK_N"] * row.constexprs["BLOCK_K"]

    rows = [
        row
        for row in w4a16_gemm_variants.variants(arch)
        if (row.dtype, row.zero_points) == (dtype, zero_points)
        and 1 < row.num_warps <= row.constexprs["BLOCK_M"] * row.constexprs["BLOCK_N"] // 256
        and (bool(row.divisibility) and not row.constexprs["SCALE_WEIGHTS"] if aligned else not row.conditions)
    ]
    return min(rows, key=size)


def build(arch: str, row: TritonVariant) -> Built:
    """Compile a row and make its entry."""
    manifest, compiled = _manifest(arch, [row])
    return Built(arch, manifest.entries[row.name], compiled[row.name].code)


@functools.cache
def smallest(arch: str) -> Built:
    """`smallest_row`, built once."""
    return build(arch, smallest_row(arch))


def build_pack(folder: Path, arch: str, rows: Iterable[TritonVariant]) -> None:
    """A pack of `rows`, tried in this order, in the folder `arch` of `folder`."""
    manifest, compiled = _manifest(arch, list(rows))
    write_pack(folder / arch, manifest, compiled)


def _manifest(arch: str, rows: list[TritonVariant]):
    target = find_target(arch)
    compiled: dict[str, CompiledObject] = {row.name: compile_variant(row, target) for row in rows}
    policy = tuple(PolicyRow("1", (row.name,), "test") for row in rows)
    return make_manifest(target, Rows(tuple(rows), policy), compiled), compiled
