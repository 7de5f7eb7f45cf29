"""Rows -> the manifest that a build would give, without a compiler."""

from __future__ import annotations

from collections.abc import Sequence

from gristmill.aot.compilers import Variant, argument_layout, early_start
from gristmill.aot.sources import read_rows, source_path
from gristmill.aot.targets import find_target
from gristmill.formula import Formula
from gristmill.kernels.variant import CxxVariant
from gristmill.manifest import Entry, Manifest, Needs, Rule


def manifest_of_rows(arch: str, modules: Sequence[str]) -> Manifest:
    """The manifest of `arch` from the row modules of these names, but for what only a compiler knows."""
    rows = read_rows(arch, modules)
    return Manifest.of(
        [_entry(row) for row in rows.variants],
        tuple(Rule(Formula(row.when), row.variants, row.origin) for row in rows.policy),
        arch=arch,
        kind=find_target(arch).kind,
        version="0",
        compilers={},
        source_digest="0" * 64,
    )


def _entry(row: Variant) -> Entry:
    is_cxx = isinstance(row, CxxVariant)
    x, y, z = (Formula(text) for text in row.grid)
    return Entry(
        name=row.name,
        op=row.op,
        symbol=row.symbol if is_cxx else row.function,
        object="0" * 64,
        source=source_path(row),
        arguments=argument_layout(row),
        grid=(x, y, z),
        block=row.block if is_cxx else (32 * row.num_warps, 1, 1),
        static_shared_bytes=_static_shared_bytes(row) if is_cxx else 0,
        dynamic_shared_bytes=Formula(row.dynamic_shared_bytes if is_cxx else "0"),
        needs=Needs(row.dtype, row.zero_points, tuple(Formula(text) for text in row.conditions)),
        roundings=row.roundings,
        weights_in_dtype=row.weights_in_dtype,
        resources={},
        early_start=early_start(row),
    )


def _static_shared_bytes(row: CxxVariant) -> int:
    """As the header of w4a16_skinny_wmma.hip gives it; the others' shared memory is dynamic."""
    if "TOKEN_TILES" not in row.defines:
        return 0
    return 1024 * row.defines["WAVES"] * row.defines["COLUMNS"] * row.defines["TOKEN_TILES"]
