"""Which specialisations of the HIP decode kernels are built, and when each is taken.

Two kernels: `csrc/hip/w4a16_skinny.hip` (packed dot products, M = 1..8) and `csrc/hip/w4a16_skinny_wmma.hip`
(M = 9..32). Nothing here was measured on a device: the rules rest on the counts in w4a16_skinny_hip_counts.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from gristmill.csrc.w4a16_skinny_hip_counts import figures
from gristmill.kernels.variant import CxxVariant, PolicyRow
from gristmill.kernels.w4a16_rows import KINDS, OP, arguments, entry_name

ARCHES = ("gfx1151", "gfx1201")
ORIGIN = "predicted from instruction counts, not measured"

# One chunk of 32 weights lies in one group, and a shift finds the group.
POWER_GROUPS = "group_size >= K or " + " or ".join(f"group_size == {2**i}" for i in range(5, 12))

# Roundings to the activation dtype that a product passes: the output's, and q - z with real zero points.
ROUNDINGS = {False: 1, True: 2}


@dataclass(frozen=True, slots=True)
class Dot:
    """A specialisation of w4a16_skinny.hip; it becomes a variant per dtype, with and without zero points."""

    tokens: int
    rows: int = 2
    depth: int = 4
    waves: int = 16
    waves_per_simd: int = 8  # that registers are to allow: two blocks on a multiprocessor
    any_group: bool = False

    @property
    def suffix(self) -> str:
        return f"m{self.tokens}_any_group" if self.any_group else f"m{self.tokens}"

    @property
    def step_bytes(self) -> int:
        """LDS that the activations of one step take: 1024 values of each token."""
        return self.tokens * 2048


@dataclass(frozen=True, slots=True)
class Wmma:
    """A specialisation of w4a16_skinny_wmma.hip."""

    token_tiles: int  # of 16 tokens
    columns: int = 2  # tiles of 16 output columns
    depth: int = 4
    waves: int = 8
    waves_per_simd: int = 6  # that registers are to allow: three blocks on a multiprocessor

    @property
    def suffix(self) -> str:
        return f"wmma_m{16 * self.token_tiles}"


# M = 5 and 7 run in the code for 6 and 8: a token that is not there costs dot products, and those do not
# bind. Group sizes that are no power of two are rare: two sizes of code for them.
DOTS = (Dot(1), Dot(2), Dot(3), Dot(4), Dot(6), Dot(8))
ANY_GROUP_DOTS = (Dot(2, any_group=True), Dot(8, depth=3, any_group=True))
WMMAS = (Wmma(1), Wmma(2, depth=3))


def variants(arch: str) -> list[CxxVariant]:
    """The rows to build for `arch`."""
    if arch not in ARCHES:
        return []
    rows = [_dot(dot, dtype, zero_points) for dot in (*DOTS, *ANY_GROUP_DOTS) for dtype, zero_points in KINDS]
    rows += [_wmma(wmma, dtype, zero_points) for wmma in WMMAS for dtype, zero_points in KINDS]
    return [replace(row, figures=figures(arch, row.name, row.zero_points)) for row in rows]


def policy(arch: str) -> list[PolicyRow]:
    """The rules for `arch`, to stand before those of the tile kernels, which take all that is left."""
    if arch not in ARCHES:
        return []
    rules = []
    for dot in DOTS:
        general = next(other for other in ANY_GROUP_DOTS if other.tokens >= dot.tokens)
        rules.append(PolicyRow(f"M <= {dot.tokens}", (*_names(dot), *_names(general)), ORIGIN))
    return rules + [PolicyRow(f"M <= {16 * wmma.token_tiles}", _names(wmma), ORIGIN) for wmma in WMMAS]


def _name(kernel: Dot | Wmma, dtype: str, zero_points: bool) -> str:
    return entry_name("w4a16_skinny", dtype, zero_points, kernel.suffix)


def _names(kernel: Dot | Wmma) -> tuple[str, ...]:
    return tuple(_name(kernel, dtype, zero_points) for dtype, zero_points in KINDS)


def _dot(dot: Dot, dtype: str, zero_points: bool) -> CxxVariant:
    # The last: its division by the group's words is exact below 2^19.
    groups = ("K < 524288",) if dot.any_group else (POWER_GROUPS,)
    return CxxVariant(
        name=_name(dot, dtype, zero_points),
        op=OP,
        source="csrc/hip/w4a16_skinny.hip",
        symbol="w4a16_skinny",
        defines={
            "TOKENS": dot.tokens,
            "ROWS": dot.rows,
            "DEPTH": dot.depth,
            "WAVES": dot.waves,
            "WAVES_PER_SIMD": dot.waves_per_simd,
            "BF16": int(dtype == "bfloat16"),
            "ZEROS": int(zero_points),
            "ANY_GROUP": int(dot.any_group),
        },
        arguments=arguments(zero_points),
        block=(32 * dot.waves, 1, 1),
        grid=(f"min(multiprocessor_count, ceil_div(N, {dot.rows}))", "1", "1"),
        # All activations if they fit the device's LDS, else as many steps of K as do: the kernel reads the
        # figure of its own launch and walks K in bands of that many.
        dynamic_shared_bytes=f"min(lds_bytes // {dot.step_bytes}, ceil_div(K, 1024)) * {dot.step_bytes}",
        dtype=dtype,
        zero_points=zero_points,
        conditions=(f"M <= {dot.tokens}", "K >= 32", f"lds_bytes >= {dot.step_bytes}", *groups),
        roundings=ROUNDINGS[zero_points],
        weights_in_dtype=False,
    )


def _wmma(wmma: Wmma, dtype: str, zero_points: bool) -> CxxVariant:
    return CxxVariant(
        name=_name(wmma, dtype, zero_points),
        op=OP,
        source="csrc/hip/w4a16_skinny_wmma.hip",
        symbol="w4a16_skinny_wmma",
        defines={
            "TOKEN_TILES": wmma.token_tiles,
            "COLUMNS": wmma.columns,
            "DEPTH": wmma.depth,
            "WAVES": wmma.waves,
            "WAVES_PER_SIMD": wmma.waves_per_simd,
            "BF16": int(dtype == "bfloat16"),
            "ZEROS": int(zero_points),
        },
        arguments=arguments(zero_points),
        block=(32 * wmma.waves, 1, 1),
        grid=(f"ceil_div(N, {16 * wmma.columns})", "1", "1"),
        dynamic_shared_bytes="0",
        dtype=dtype,
        zero_points=zero_points,
        conditions=(f"M <= {16 * wmma.token_tiles}", "K >= 32", "K % 8 == 0", "alignment % 4 == 0", POWER_GROUPS),
        roundings=ROUNDINGS[zero_points],
        weights_in_dtype=False,
    )
