"""Which specialisations of the HIP decode kernels are built, when each is taken, and what binds them.

Two kernels: `csrc/hip/w4a16_skinny.hip` (packed dot products, M = 1..8) and `csrc/hip/w4a16_skinny_wmma.hip`
(M = 9..32). Nothing here was measured on a device. Rules are ordered by the instruction counts at the end of
this file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

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

    tiles: int  # of 16 tokens
    columns: int = 2  # tiles of 16 output columns
    depth: int = 4
    waves: int = 8

    @property
    def suffix(self) -> str:
        return f"wmma_m{16 * self.tiles}"


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
    return [replace(row, figures=_figures(arch, row)) for row in rows]


def policy(arch: str) -> list[PolicyRow]:
    """The rules for `arch`, to stand before those of the tile kernels, which take all that is left."""
    if arch not in ARCHES:
        return []
    rules = []
    for dot in DOTS:
        general = next(other for other in ANY_GROUP_DOTS if other.tokens >= dot.tokens)
        rules.append(PolicyRow(f"M <= {dot.tokens}", (*_names(dot), *_names(general)), ORIGIN))
    return rules + [PolicyRow(f"M <= {16 * wmma.tiles}", _names(wmma), ORIGIN) for wmma in WMMAS]


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
            "BFLOAT16": int(dtype == "bfloat16"),
            "ZERO_POINTS": int(zero_points),
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
            "TILES": wmma.tiles,
            "COLUMNS": wmma.columns,
            "DEPTH": wmma.depth,
            "WAVES": wmma.waves,
            "BFLOAT16": int(dtype == "bfloat16"),
            "ZERO_POINTS": int(zero_points),
        },
        arguments=arguments(zero_points),
        block=(32 * wmma.waves, 1, 1),
        grid=(f"ceil_div(N, {16 * wmma.columns})", "1", "1"),
        dynamic_shared_bytes="0",
        dtype=dtype,
        zero_points=zero_points,
        conditions=(f"M <= {16 * wmma.tiles}", "K >= 32", "K % 8 == 0", "alignment % 4 == 0", POWER_GROUPS),
        roundings=ROUNDINGS[zero_points],
        weights_in_dtype=False,
    )


# --- What binds ---------------------------------------------------------------------------------------------
# Issue slots against memory, by count: a prediction of which of the two is used up first, not of a time.


@dataclass(frozen=True, slots=True)
class Counts:
    """Instructions a weight and lane that the main loop executes, as the emulator counts them.

    A lane multiplies each of its weights by all tokens. A dual-issue instruction counts once.
    """

    valu: float  # vector ALU without WMMA
    wmma: float
    lds: float  # 128-bit reads
    global_memory: float


@dataclass(frozen=True, slots=True)
class Device:
    """Public figures of a common part: what one arch can issue and read."""

    name: str
    simds: int  # 32 lanes wide; two a compute unit
    ghz: float
    gbps: float  # of memory, on paper
    wmma_cycles: int  # that a 16x16x16 multiplication keeps a SIMD busy

    def issue_over_memory(self, counts: Counts, weight_bytes: float) -> float:
        """Time to issue over time to read, for each weight; below 1 memory binds."""
        slots = counts.valu + counts.wmma * self.wmma_cycles
        issue = slots / (32 * self.simds * self.ghz)
        return issue / (weight_bytes / self.gbps)

    def lds_over_memory(self, counts: Counts, weight_bytes: float) -> float:
        """The same for LDS, which gives a compute unit 128 bytes a cycle."""
        lds = counts.lds * 16 / (64 * self.simds * self.ghz)
        return lds / (weight_bytes / self.gbps)


DEVICES = {
    # 40 compute units; LPDDR5X-8000 on 256 bits, of which 212 GB/s were measured.
    "gfx1151": Device("Radeon 8060S", 80, 2.9, 256, 32),
    # 64 compute units; GDDR6 at 20 Gbit/s on 256 bits.
    "gfx1201": Device("Radeon RX 9070 XT", 128, 2.9, 640, 16),
}


def weight_bytes(group_size: int, zero_points: bool) -> float:
    """Bytes of memory that one weight takes, its share of scale and zero point included."""
    return 0.5 + (4 if zero_points else 2) / group_size


def _figures(arch: str, row: CxxVariant) -> Mapping[str, int]:
    """Counts and prediction as `gristmill list --resources` shows them: per 1000 weights, and in percent."""
    counts = COUNTS[arch].get(row.name)
    if counts is None:
        return {}
    read = weight_bytes(128, row.zero_points)
    return {
        "valu_per_1000_weights": round(1000 * counts.valu),
        "wmma_per_1000_weights": round(1000 * counts.wmma),
        "lds_reads_per_1000_weights": round(1000 * counts.lds),
        "global_loads_per_1000_weights": round(1000 * counts.global_memory),
        "issue_percent_of_memory_time_predicted": round(100 * DEVICES[arch].issue_over_memory(counts, read)),
        "lds_percent_of_memory_time_predicted": round(100 * DEVICES[arch].lds_over_memory(counts, read)),
    }


# Counted by `python tests/hip_kernels.py counts`; a test compares some of them with what the kernels are now.
COUNTS = {
    "gfx1151": {
        "w4a16_skinny_fp16_m1": Counts(1.816, 0.0, 0.062, 0.078),
        "w4a16_skinny_fp16_z_m1": Counts(2.449, 0.0, 0.062, 0.109),
        "w4a16_skinny_bf16_m1": Counts(3.508, 0.0, 0.062, 0.078),
        "w4a16_skinny_bf16_z_m1": Counts(3.715, 0.0, 0.062, 0.109),
        "w4a16_skinny_fp16_m2": Counts(2.348, 0.0, 0.125, 0.078),
        "w4a16_skinny_fp16_z_m2": Counts(2.961, 0.0, 0.125, 0.109),
        "w4a16_skinny_bf16_m2": Counts(3.988, 0.0, 0.125, 0.078),
        "w4a16_skinny_bf16_z_m2": Counts(4.27, 0.0, 0.125, 0.109),
        "w4a16_skinny_fp16_m3": Counts(2.93, 0.0, 0.188, 0.078),
        "w4a16_skinny_fp16_z_m3": Counts(3.516, 0.0, 0.188, 0.109),
        "w4a16_skinny_bf16_m3": Counts(4.504, 0.0, 0.188, 0.078),
        "w4a16_skinny_bf16_z_m3": Counts(4.793, 0.0, 0.188, 0.109),
        "w4a16_skinny_fp16_m4": Counts(3.445, 0.0, 0.25, 0.078),
        "w4a16_skinny_fp16_z_m4": Counts(3.938, 0.0, 0.25, 0.109),
        "w4a16_skinny_bf16_m4": Counts(4.98, 0.0, 0.25, 0.078),
        "w4a16_skinny_bf16_z_m4": Counts(5.324, 0.0, 0.25, 0.109),
        "w4a16_skinny_fp16_m6": Counts(4.426, 0.0, 0.375, 0.078),
        "w4a16_skinny_fp16_z_m6": Counts(5.027, 0.0, 0.375, 0.109),
        "w4a16_skinny_bf16_m6": Counts(6.082, 0.0, 0.375, 0.078),
        "w4a16_skinny_bf16_z_m6": Counts(6.383, 0.0, 0.375, 0.109),
        "w4a16_skinny_fp16_m8": Counts(5.426, 0.0, 0.5, 0.078),
        "w4a16_skinny_fp16_z_m8": Counts(5.996, 0.0, 0.5, 0.109),
        "w4a16_skinny_bf16_m8": Counts(7.086, 0.0, 0.5, 0.078),
        "w4a16_skinny_bf16_z_m8": Counts(7.453, 0.0, 0.5, 0.109),
        "w4a16_skinny_fp16_m2_any_group": Counts(2.934, 0.0, 0.125, 0.172),
        "w4a16_skinny_fp16_z_m2_any_group": Counts(3.926, 0.0, 0.125, 0.297),
        "w4a16_skinny_bf16_m2_any_group": Counts(4.527, 0.0, 0.125, 0.172),
        "w4a16_skinny_bf16_z_m2_any_group": Counts(5.031, 0.0, 0.125, 0.297),
        "w4a16_skinny_fp16_m8_any_group": Counts(6.891, 0.0, 0.5, 0.172),
        "w4a16_skinny_fp16_z_m8_any_group": Counts(7.87, 0.0, 0.5, 0.297),
        "w4a16_skinny_bf16_m8_any_group": Counts(8.177, 0.0, 0.5, 0.172),
        "w4a16_skinny_bf16_z_m8_any_group": Counts(8.781, 0.0, 0.5, 0.297),
        "w4a16_skinny_fp16_wmma_m16": Counts(3.094, 0.125, 0.0, 0.25),
        "w4a16_skinny_fp16_z_wmma_m16": Counts(4.406, 0.125, 0.0, 0.312),
        "w4a16_skinny_bf16_wmma_m16": Counts(6.086, 0.125, 0.0, 0.25),
        "w4a16_skinny_bf16_z_wmma_m16": Counts(6.891, 0.125, 0.0, 0.312),
        "w4a16_skinny_fp16_wmma_m32": Counts(3.667, 0.25, 0.0, 0.375),
        "w4a16_skinny_fp16_z_wmma_m32": Counts(4.979, 0.25, 0.0, 0.438),
        "w4a16_skinny_bf16_wmma_m32": Counts(6.625, 0.25, 0.0, 0.375),
        "w4a16_skinny_bf16_z_wmma_m32": Counts(7.479, 0.25, 0.0, 0.438),
    },
    "gfx1201": {
        "w4a16_skinny_fp16_m1": Counts(1.84, 0.0, 0.062, 0.078),
        "w4a16_skinny_fp16_z_m1": Counts(2.465, 0.0, 0.062, 0.109),
        "w4a16_skinny_bf16_m1": Counts(3.398, 0.0, 0.062, 0.078),
        "w4a16_skinny_bf16_z_m1": Counts(3.68, 0.0, 0.062, 0.109),
        "w4a16_skinny_fp16_m2": Counts(2.371, 0.0, 0.125, 0.078),
        "w4a16_skinny_fp16_z_m2": Counts(2.996, 0.0, 0.125, 0.109),
        "w4a16_skinny_bf16_m2": Counts(3.945, 0.0, 0.125, 0.078),
        "w4a16_skinny_bf16_z_m2": Counts(4.223, 0.0, 0.125, 0.109),
        "w4a16_skinny_fp16_m3": Counts(2.902, 0.0, 0.188, 0.078),
        "w4a16_skinny_fp16_z_m3": Counts(3.527, 0.0, 0.188, 0.109),
        "w4a16_skinny_bf16_m3": Counts(4.457, 0.0, 0.188, 0.078),
        "w4a16_skinny_bf16_z_m3": Counts(4.766, 0.0, 0.188, 0.109),
        "w4a16_skinny_fp16_m4": Counts(3.434, 0.0, 0.25, 0.078),
        "w4a16_skinny_fp16_z_m4": Counts(4.059, 0.0, 0.25, 0.109),
        "w4a16_skinny_bf16_m4": Counts(4.996, 0.0, 0.25, 0.078),
        "w4a16_skinny_bf16_z_m4": Counts(5.289, 0.0, 0.25, 0.109),
        "w4a16_skinny_fp16_m6": Counts(4.496, 0.0, 0.375, 0.078),
        "w4a16_skinny_fp16_z_m6": Counts(5.121, 0.0, 0.375, 0.109),
        "w4a16_skinny_bf16_m6": Counts(6.043, 0.0, 0.375, 0.078),
        "w4a16_skinny_bf16_z_m6": Counts(6.371, 0.0, 0.375, 0.109),
        "w4a16_skinny_fp16_m8": Counts(5.555, 0.0, 0.5, 0.078),
        "w4a16_skinny_fp16_z_m8": Counts(6.184, 0.0, 0.5, 0.109),
        "w4a16_skinny_bf16_m8": Counts(7.09, 0.0, 0.5, 0.078),
        "w4a16_skinny_bf16_z_m8": Counts(7.418, 0.0, 0.5, 0.109),
        "w4a16_skinny_fp16_m2_any_group": Counts(2.855, 0.0, 0.125, 0.172),
        "w4a16_skinny_fp16_z_m2_any_group": Counts(3.855, 0.0, 0.125, 0.297),
        "w4a16_skinny_bf16_m2_any_group": Counts(4.477, 0.0, 0.125, 0.172),
        "w4a16_skinny_bf16_z_m2_any_group": Counts(5.055, 0.0, 0.125, 0.297),
        "w4a16_skinny_fp16_m8_any_group": Counts(6.609, 0.0, 0.5, 0.172),
        "w4a16_skinny_fp16_z_m8_any_group": Counts(7.604, 0.0, 0.5, 0.297),
        "w4a16_skinny_bf16_m8_any_group": Counts(8.167, 0.0, 0.5, 0.172),
        "w4a16_skinny_bf16_z_m8_any_group": Counts(8.75, 0.0, 0.5, 0.297),
        "w4a16_skinny_fp16_wmma_m16": Counts(1.938, 0.125, 0.0, 0.188),
        "w4a16_skinny_fp16_z_wmma_m16": Counts(2.75, 0.125, 0.0, 0.25),
        "w4a16_skinny_bf16_wmma_m16": Counts(3.461, 0.125, 0.0, 0.188),
        "w4a16_skinny_bf16_z_wmma_m16": Counts(3.938, 0.125, 0.0, 0.25),
        "w4a16_skinny_fp16_wmma_m32": Counts(2.5, 0.25, 0.0, 0.25),
        "w4a16_skinny_fp16_z_wmma_m32": Counts(3.312, 0.25, 0.0, 0.312),
        "w4a16_skinny_bf16_wmma_m32": Counts(3.677, 0.25, 0.0, 0.25),
        "w4a16_skinny_bf16_z_wmma_m32": Counts(4.375, 0.25, 0.0, 0.312),
    },
}
