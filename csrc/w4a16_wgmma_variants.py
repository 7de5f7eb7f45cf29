"""Which specialisations of the wgmma kernel are built for sm90, and when each is taken."""

from __future__ import annotations

from dataclasses import dataclass

from gristmill.csrc.w4a16_cuda_rows import (
    CONDITIONS,
    G32_MULTIPLES,
    MANY_ROWS,
    PREDICTED,
    Choice,
    Groups,
    clusters_at_once,
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
            **groups.defines,
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
        roundings=2 + zero_points,  # of the output, of (q - z) * s, of q - z
        weights_in_dtype=True,
        early_start=True,
        features="a",
    )


M16 = Shape(16, 1, 2, cluster=2, depth=3, stagers=8)
M32 = Shape(32, 1, 2, cluster=2, depth=2, stagers=8)
M32_TWO = Shape(32, 2, 1, cluster=2, depth=2)
M32_FOUR = Shape(32, 2, 1, cluster=4, depth=2)
M32_FOUR_192 = Shape(32, 3, 1, cluster=4, depth=2)
M64 = Shape(64, 1, 2, cluster=2, depth=2, stagers=8)
M64_TWO = Shape(64, 2, 1, cluster=2, depth=2, stagers=8)
M64_FOUR = Shape(64, 2, 1, cluster=4, depth=2)
M64_FOUR_64 = Shape(64, 1, 2, cluster=4, depth=2)
M64_SMALL = Shape(64, 2, 1, cluster=4, depth=3, chunks=1)

# Nearly all clusters of two work at tiles of 128 rows.
ONE_TURN_OF_TWO = f"{MANY_ROWS} and {one_turn(128, 2)}"

# The fastest of 204 shapes at M = 32 and 64, or within 6 % of it, in the eight layers of `gristmill bench` and in
# twelve more; of 33 at M = 16 (NVIDIA H200, float16, group size 128, graph replay, weights rotated past L2, medians).
# What is left of M <= 64 goes to the tiles, which are ahead there.
_CHOICES = (
    Choice("M <= 16", (M16,)),
    Choice(f"M <= 32 and {one_turn(128, 4)}", (M32_FOUR,)),
    Choice(f"M <= 32 and {one_turn(64, 2)}", (M32,)),
    Choice(f"M <= 32 and {one_turn(192, 4)}", (M32_FOUR_192,)),
    Choice(f"M <= 32 and (K < 3072 or ({ONE_TURN_OF_TWO}))", (M32_TWO,)),
    Choice("M <= 32 and N > 200 * multiprocessor_count", (M32_FOUR_192,)),
    Choice("M <= 32 and N <= 140 * multiprocessor_count", (M32_FOUR,)),
    Choice("M <= 32", (M32,)),
    Choice(f"M <= 64 and K < 3072 and not {MANY_ROWS}", (M64_SMALL,)),
    Choice("M <= 64 and K < 3072", (M64,)),
    Choice(f"M <= 64 and {one_turn(64, 4)}", (M64_FOUR_64,)),
    Choice(f"M <= 64 and {one_turn(128, 4)}", (M64_FOUR,)),
    Choice(f"M <= 64 and {one_turn(64, 2)}", (M64,)),
    Choice(f"M <= 64 and {ONE_TURN_OF_TWO}", (M64_TWO,)),
    Choice("M <= 64 and K > 4096 and K <= 8192 and N <= 140 * multiprocessor_count", (M64_FOUR_64,)),
    Choice("M <= 64 and (K <= 4096 or N < 140 * multiprocessor_count)", (M64_FOUR,)),
    *(Choice(f"M <= {shape.tokens}", (shape,), PREDICTED, (G32_MULTIPLES,)) for shape in (M16, M32, M64)),
)
