"""Which specialisations of the wgmma kernel are built for sm90, and when each is taken."""

from __future__ import annotations

from dataclasses import dataclass

from gristmill.csrc.w4a16_cuda_rows import (
    CONDITIONS,
    G32,
    G64,
    G128,
    WITH_ZERO_POINTS,
    WITHOUT_ZERO_POINTS,
    Choice,
    Groups,
    clusters_at_once,
    full_turns,
    name_of,
    one_turn,
    policy_rows,
    specialisations,
)
from gristmill.kernels.variant import CxxVariant, PolicyRow
from gristmill.kernels.w4a16_rows import OP, arguments

ARCH = "sm90"
SOURCE = "csrc/cuda/w4a16_wgmma.cu"
SYMBOL = "w4a16_wgmma"

SHARED_BYTES = 232448  # that a block can have: the opt-in limit of compute capability 9.0, 227 KiB
MOST_SLOTS = 16  # for chunks of x


@dataclass(frozen=True, slots=True)
class Shape:
    """How the work is divided; it becomes a variant per groups and dtype, with and without zero points."""

    tokens: int  # per block
    groups_n: int  # warpgroups side by side along the output features, 64 each
    groups_k: int  # warpgroups one after the other along K
    cluster: int  # blocks that divide K
    depth: int  # units in a warp's ring
    stagers: int = 4  # warps that stage x
    chunks: int = 2  # of 128 k in a unit, which is what a warp copies at a time

    @property
    def warpgroups(self) -> int:
        return self.groups_n * self.groups_k

    @property
    def rows(self) -> int:
        return 64 * self.groups_n

    @property
    def suffix(self) -> str:
        text = f"m{self.tokens}_n{self.groups_n}_k{self.groups_k}_c{self.cluster}_d{self.depth}x{self.chunks}"
        return f"{text}_s{self.stagers}" if self.stagers != 4 else text

    def scales_sums(self, groups: Groups) -> bool:
        """Whether the kernel scales sums, not weights; see its SCALE_SUMS."""
        return groups.span == 128 and self.tokens <= 32

    def other_bytes(self, groups: Groups, zero_points: bool) -> int:
        """Shared memory beside that for x: barriers, sums, weights and scales."""
        ring = self.depth * self.chunks * (64 * 16 + 64 * (128 // groups.span) * (1 + zero_points))
        sums = 4 * self.tokens * (self.rows // self.cluster) * (2 * self.cluster - 1)
        return 16 * MOST_SLOTS + 128 + sums + 4 * self.warpgroups * ring

    def x_slots(self, groups: Groups, zero_points: bool) -> int:
        """For chunks of 128 k of x: as many as there is room for."""
        room = (SHARED_BYTES - self.other_bytes(groups, zero_points)) // (256 * self.tokens)
        return min(MOST_SLOTS, room)

    def shared_bytes(self, groups: Groups, zero_points: bool) -> str:
        """Formula of the dynamic shared memory: the kernel's header, with the barriers of MOST_SLOTS slots.

        X_SLOTS follows from what is left beside them.
        """
        units = f"ceil_div(ceil_div(K, {128 * self.chunks}), {self.cluster})"
        slots = f"min({self.x_slots(groups, zero_points)}, {self.chunks} * {units})"
        return f"{256 * self.tokens} * {slots} + {self.other_bytes(groups, zero_points)}"

    @property
    def grid(self) -> tuple[str, str, str]:
        """As many clusters as run at once, a block on a multiprocessor: each takes tile after tile of rows."""
        clusters = clusters_at_once(self.cluster)
        return f"{self.cluster} * min(ceil_div(N, {self.rows}), {clusters})", f"ceil_div(M, {self.tokens})", "1"


def variants(arch: str) -> list[CxxVariant]:
    """The rows to build for `arch`; none but for Hopper."""
    return [_variant(*wanted) for wanted in specialisations(_CHOICES)] if arch == ARCH else []


def policy(arch: str) -> list[PolicyRow]:
    """The rules for `arch`, to stand after those of the kernel for fewer tokens and before those of the tiles."""
    return policy_rows(SYMBOL, _CHOICES) if arch == ARCH else []


def _variant(shape: Shape, groups: Groups, dtype: str, zero_points: bool) -> CxxVariant:
    return CxxVariant(
        name=name_of(SYMBOL, shape, groups, dtype, zero_points),
        op=OP,
        source=SOURCE,
        symbol=SYMBOL,
        defines={
            "BF16": int(dtype == "bfloat16"),
            "ZEROS": int(zero_points),
            "SPAN": groups.span,
            "TOKENS": shape.tokens,
            "WG_N": shape.groups_n,
            "WG_K": shape.groups_k,
            "CLUSTER": shape.cluster,
            "DEPTH": shape.depth,
            "STAGERS": shape.stagers,
            "CHUNKS": shape.chunks,
            "X_SLOTS": shape.x_slots(groups, zero_points),
        },
        arguments=arguments(zero_points),
        block=(128 * shape.warpgroups + 32 * shape.stagers + 128, 1, 1),
        grid=shape.grid,
        dynamic_shared_bytes=shape.shared_bytes(groups, zero_points),
        dtype=dtype,
        zero_points=zero_points,
        conditions=(*CONDITIONS, groups.condition),
        # Of the output, of q - z, and of (q - z) * s where not the sums are scaled.
        roundings=1 + zero_points + (not shape.scales_sums(groups)),
        weights_in_dtype=not shape.scales_sums(groups),
        early_start=True,
        features="a",
    )


M16 = Shape(16, 1, 2, cluster=2, depth=2, stagers=8)
M16_TWO = Shape(16, 2, 1, cluster=2, depth=2, stagers=8)
M32 = Shape(32, 1, 2, cluster=2, depth=2, stagers=8)
M32_TWO = Shape(32, 2, 1, cluster=2, depth=2)
M32_FOUR = Shape(32, 2, 1, cluster=4, depth=2)
M32_FOUR_192 = Shape(32, 3, 1, cluster=4, depth=2)
M32_SMALL = Shape(32, 2, 1, cluster=4, depth=3, chunks=1)
M64 = Shape(64, 1, 2, cluster=2, depth=2, stagers=8)
M64_TWO = Shape(64, 2, 1, cluster=2, depth=2, stagers=8)
M64_FOUR = Shape(64, 2, 1, cluster=4, depth=2)
M64_FOUR_64 = Shape(64, 1, 2, cluster=4, depth=2)
M64_SMALL = Shape(64, 2, 1, cluster=4, depth=3, chunks=1)
# Units of one chunk have half the scales on their way, which leaves x more slots.
M64_ONE = Shape(64, 1, 2, cluster=2, depth=2, stagers=8, chunks=1)
M64_FOUR_64_ONE = Shape(64, 1, 2, cluster=4, depth=2, chunks=1)

# Tiles of 128 rows for nearly all clusters of two: from 62 on for the 66 that an H200 runs at once.
MANY_ROWS = "N > 60 * multiprocessor_count"
# And not for more.
ONE_TURN_OF_TWO = f"{MANY_ROWS} and {one_turn(128, 2)}"


def _by_scales(when: str, shape: Shape, fewer_scales: Shape) -> tuple[Choice[Shape], ...]:
    """`fewer_scales` is for weights with many: it holds fewer of them at a time."""
    return (
        Choice(when, (shape,), groups=(G128,)),
        Choice(when, (shape,), groups=(G64,), kinds=WITHOUT_ZERO_POINTS),
        Choice(when, (fewer_scales,), groups=(G64,), kinds=WITH_ZERO_POINTS),
        Choice(when, (fewer_scales,), groups=(G32,)),
    )


# The fastest of 204 shapes at M = 32 and 64, or within 6 % of it, in the eight layers of `gristmill bench` and in
# twelve more, for groups of 128; then of 22 in these and two more, for groups of 128, 64 and 32, with zero points and
# without: rules take an entry that is 0 to 2 % slower than the fastest, in geometric means over the layers (NVIDIA
# H200, float16, graph replay, weights rotated past L2, medians). What is left of M <= 64 goes to the tiles, which are
# ahead there.
_CHOICES = (
    Choice(f"M <= 16 and K >= 8192 and {full_turns(128, 2)}", (M16_TWO,)),
    Choice("M <= 16", (M16,)),
    Choice(f"M <= 32 and K < 3072 and {one_turn(128, 4)}", (M32_SMALL,)),
    Choice(f"M <= 32 and {one_turn(128, 4)}", (M32_FOUR,)),
    Choice(f"M <= 32 and {one_turn(64, 2)}", (M32,)),
    Choice(f"M <= 32 and {one_turn(192, 4)}", (M32_FOUR_192,)),
    Choice(f"M <= 32 and (K < 3072 or ({ONE_TURN_OF_TWO}))", (M32_TWO,)),
    Choice("M <= 32 and N > 200 * multiprocessor_count", (M32_FOUR_192,)),
    Choice("M <= 32 and N <= 140 * multiprocessor_count", (M32_FOUR,)),
    Choice("M <= 32", (M32,)),
    Choice(f"M <= 64 and K < 3072 and not {MANY_ROWS}", (M64_SMALL,)),
    Choice(f"M <= 64 and K < 3072 and {full_turns(128, 2)}", (M64_TWO,)),
    Choice("M <= 64 and K < 3072", (M64_ONE,), groups=(G32,), kinds=WITH_ZERO_POINTS),
    Choice("M <= 64 and K < 3072", (M64,)),
    Choice(f"M <= 64 and {one_turn(64, 4)}", (M64_FOUR_64,)),
    Choice(f"M <= 64 and {one_turn(128, 4)}", (M64_FOUR,)),
    Choice(f"M <= 64 and {one_turn(64, 2)}", (M64,)),
    Choice(f"M <= 64 and {ONE_TURN_OF_TWO}", (M64_TWO,)),
    Choice("M <= 64 and K <= 4096", (M64_FOUR_64,), groups=(G32,), kinds=WITH_ZERO_POINTS),
    *_by_scales("M <= 64 and K > 4096 and K <= 8192 and N <= 140 * multiprocessor_count", M64_FOUR_64, M64_FOUR_64_ONE),
    Choice("M <= 64 and (K <= 4096 or N < 140 * multiprocessor_count)", (M64_FOUR,)),
)
