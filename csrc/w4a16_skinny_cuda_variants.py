"""Which specialisations of the skinny CUDA kernel are built for each arch, and when each is taken."""

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

ARCHES = ("sm80", "sm90")
SOURCE = "csrc/cuda/w4a16_skinny.cu"
SYMBOL = "w4a16_skinny"

PREDICTED = "predicted from the same source on NVIDIA H200"


@dataclass(frozen=True, slots=True)
class Shape:
    """How the work is divided; it becomes a variant per groups and dtype, with and without zero points."""

    tokens: int  # per block
    tiles: int  # of 16 output features per warp
    warps_n: int  # side by side along the output features
    warps_k: int  # one after the other along K
    depth: int  # units in a warp's ring; one fewer is on its way
    cluster: int = 1  # blocks that divide K
    blocks: int = 1  # per multiprocessor, which bounds the registers
    chunks: int = 1  # of 128 k in a unit, which is what a warp copies at a time

    @property
    def rows(self) -> int:
        return 16 * self.tiles * self.warps_n

    @property
    def warps(self) -> int:
        return self.warps_n * self.warps_k

    @property
    def suffix(self) -> str:
        text = f"m{self.tokens}_n{self.tiles}x{self.warps_n}_k{self.warps_k}_d{self.depth}"
        text += f"x{self.chunks}" if self.chunks > 1 else ""
        text += f"_c{self.cluster}" if self.cluster > 1 else ""
        return f"{text}_b{self.blocks}" if self.blocks > 1 else text

    def shared_bytes(self, groups: Groups, zero_points: bool) -> str:
        """Formula of the dynamic shared memory; see the kernel's header."""
        slot = 16 * self.tiles * self.chunks * (64 + 4 * (128 // groups.span) * (1 + zero_points))
        buffers = 2 if self.tokens == 8 else 1
        sums = 4 * buffers * self.cluster * self.warps_k * self.tokens * (self.rows // self.cluster + 4)
        tokens = "min(M, 8)" if self.tokens == 8 else str(self.tokens)
        units = f"ceil_div(K, {128 * self.chunks})"
        units = units if self.cluster == 1 else f"ceil_div({units}, {self.cluster})"
        x = f"{256 * self.chunks} * {tokens} * {units}"
        return f"{x} + {self.warps * self.depth * slot + sums}"

    def grid(self, groups: Groups, zero_points: bool) -> tuple[str, str, str]:
        """As many clusters as run at once: each takes tile after tile of rows, and the next kernel can start early."""
        blocks = "multiprocessor_count"
        if self.blocks > 1:
            # A block takes a KiB beside its own, and so does the limit of one block.
            fitting = f"(lds_bytes + 1024) // ({self.shared_bytes(groups, zero_points)} + 1024)"
            blocks += f" * min({self.blocks}, {fitting})"
        clusters = clusters_at_once(self.cluster, blocks)
        factor = f"{self.cluster} * " if self.cluster > 1 else ""
        return f"{factor}min(ceil_div(N, {self.rows}), {clusters})", f"ceil_div(M, {self.tokens})", "1"


def variants(arch: str) -> list[CxxVariant]:
    """The rows to build for `arch`; none where the kernel does not run."""
    return [_variant(arch, *wanted) for wanted in specialisations(_CHOICES.get(arch, ()))]


def policy(arch: str) -> list[PolicyRow]:
    """The rules for `arch`, to stand before those of the tile kernel, which takes all that is left."""
    return policy_rows(SYMBOL, _CHOICES.get(arch, ()))


def _variant(arch: str, shape: Shape, groups: Groups, dtype: str, zero_points: bool) -> CxxVariant:
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
            "TILES": shape.tiles,
            "WARPS_N": shape.warps_n,
            "WARPS_K": shape.warps_k,
            "DEPTH": shape.depth,
            "CHUNKS": shape.chunks,
            "CLUSTER": shape.cluster,
            "MIN_BLOCKS": shape.blocks,
        },
        arguments=arguments(zero_points),
        block=(32 * shape.warps, 1, 1),
        grid=shape.grid(groups, zero_points),
        dynamic_shared_bytes=shape.shared_bytes(groups, zero_points),
        dtype=dtype,
        zero_points=zero_points,
        conditions=(*CONDITIONS, groups.condition),
        roundings=1 + zero_points,  # of the output, of q - z
        weights_in_dtype=False,
        early_start=arch == "sm90",
    )


# M <= 8. Two tiles of rows a warp halve what is read of x per weight; one makes smaller tiles. Units of two chunks copy
# whole lines of 128 bytes, and two scales of groups of 128 in one piece. Without a cluster a block walks all of K.
PLAIN = Shape(8, 2, 1, 8, depth=4, blocks=2)
SIX = Shape(8, 2, 1, 6, depth=2, chunks=2, blocks=2)
DEEP = Shape(8, 2, 1, 8, depth=3, chunks=2)
TWELVE = Shape(8, 2, 1, 12, depth=2, chunks=2)
WIDE_64 = Shape(8, 2, 2, 4, depth=2, chunks=2)
WIDE_96 = Shape(8, 2, 3, 4, depth=2, chunks=2)
WIDE_160 = Shape(8, 2, 5, 2, depth=2, chunks=2)
# A cluster divides K, and with it what each multiprocessor has to read of x.
PAIR = Shape(8, 2, 2, 4, depth=2, chunks=2, cluster=2)
PAIR_SINGLE = Shape(8, 1, 4, 4, depth=2, chunks=2, cluster=2)
PAIR_96 = Shape(8, 2, 3, 4, depth=2, chunks=2, cluster=2)
PAIR_96_SINGLE = Shape(8, 1, 6, 2, depth=2, chunks=2, cluster=2)
FOUR_96 = Shape(8, 1, 6, 2, depth=2, chunks=2, cluster=4)
FOUR = Shape(8, 2, 4, 2, depth=4, cluster=4, blocks=2)
# Little shared memory: 99 KiB of compute capability 8.6 and 8.9.
SMALL = Shape(8, 2, 1, 4, depth=4, blocks=2)

# M <= 16, by the output features of a tile.
M16_160 = Shape(16, 2, 5, 3, depth=2)
M16_PAIR_64 = Shape(16, 1, 4, 3, depth=2, chunks=2, cluster=2)
M16_PAIR_96 = Shape(16, 1, 6, 2, depth=2, chunks=2, cluster=2)
M16_PAIR_160 = Shape(16, 2, 5, 3, depth=2, cluster=2)
M16_PAIR_224 = Shape(16, 2, 7, 2, depth=2, cluster=2)
M16_FOUR_96 = Shape(16, 1, 6, 2, depth=2, chunks=2, cluster=4)
M16_FOUR_160 = Shape(16, 2, 5, 3, depth=2, cluster=4)


def _large_tiles(when: str, shape: Shape, k_limit_of_g64: int = 8192) -> tuple[Choice[Shape], ...]:
    """With zero points only where K is small, as measured; in groups of 32 never.

    In groups of 128 each row's scales are a line of memory from K = 8192 on, and so are its zero points: for 160 rows
    that is more than the L1 holds beside this kernel's shared memory.
    """
    return (
        Choice(when, (shape,), kinds=WITHOUT_ZERO_POINTS),
        Choice(f"{when} and K < 8192", (shape,), groups=(G128,), kinds=WITH_ZERO_POINTS),
        Choice(f"{when} and K < {k_limit_of_g64}", (shape,), groups=(G64,), kinds=WITH_ZERO_POINTS),
    )


def _one_full_turn(rows: int) -> str:
    return f"{one_turn(rows, 1)} and {full_turns(rows, 1)}"


# Of clusters of two at tiles of 96 rows, where tiles of 64 take two.
ONE_TURN_OF_96 = f"{one_turn(96, 2)} and not {one_turn(64, 2)}"

# What matters most is that the last turn of tiles is full: 6144 output features in tiles of 64 are 96, of which 66
# clusters of two, all that an H200 runs at once, leave 30 for a second turn; in tiles of 96 they are 64. So there are
# tiles of many sizes, and conditions of N that say which fills its turns. Found by timing 1045 shapes at M = 1, 4, 8
# and 16 in the eight layers of `gristmill bench`, and 32 of them in 14 more, for groups of 128, 64 and 32, with zero
# points and without (NVIDIA H200, float16, graph replay, weights rotated past L2, medians): in these, rules take an
# entry that is 0 to 2 % slower than the fastest of the 32, in geometric means over the layers. What is left of M <= 16
# on sm90 goes to the wgmma kernel.
_CHOICES = {
    "sm90": (
        Choice(f"M <= 8 and K < 8192 and {_one_full_turn(160)}", (WIDE_160,)),
        Choice(f"M <= 8 and K < 8192 and {_one_full_turn(96)}", (WIDE_96,)),
        Choice(f"M <= 8 and K < 8192 and {_one_full_turn(64)}", (WIDE_64,)),
        Choice("M <= 8 and K < 3072 and N <= 16 * multiprocessor_count", (DEEP,)),
        Choice(f"M <= 2 and K >= 8192 and {one_turn(96, 4)}", (FOUR_96,)),
        Choice(f"M <= 2 and K >= 6144 and {one_turn(32, 1)}", (TWELVE, PAIR_SINGLE, FOUR)),
        Choice(f"M <= 2 and {ONE_TURN_OF_96} and K >= 8192", (PAIR_96,), groups=(G64, G32)),
        Choice(f"M <= 4 and {ONE_TURN_OF_96} and K >= 8192", (PAIR_96,), groups=(G128,)),
        Choice("M <= 2 and K >= 8192", (DEEP, PAIR_SINGLE, FOUR_96)),
        Choice(f"M <= 2 and K >= 3072 and ({one_turn(96, 4)} or N > 120 * multiprocessor_count)", (DEEP,)),
        Choice(f"(M <= 2 or (M <= 4 and K < 3072)) and not {one_turn(32, 1)}", (SIX,)),
        Choice("M <= 2 and K >= 3072", (PAIR,), groups=(G32,), kinds=WITH_ZERO_POINTS),
        Choice("M <= 2 or (M <= 4 and K < 3072)", (PLAIN,)),
        Choice(f"M <= 8 and K >= 3072 and {one_turn(96, 4)}", (FOUR_96,)),
        # Two blocks have room on a multiprocessor up to this M.
        Choice(
            f"M <= 3 and K >= 3072 and K <= 4096 and {one_turn(32, 1)}",
            (PLAIN,),
            groups=(G128,),
            kinds=WITHOUT_ZERO_POINTS,
        ),
        Choice(f"M <= 8 and K < 3072 and {one_turn(128, 4)}", (FOUR,), groups=(G128, G64)),
        Choice(f"M <= 8 and K < 3072 and {one_turn(128, 4)}", (TWELVE,), groups=(G32,)),
        Choice(f"M <= 8 and K < 8192 and {one_turn(64, 2)}", (PAIR,)),
        Choice(f"M <= 8 and {one_turn(64, 2)}", (PAIR_SINGLE, FOUR)),
        Choice(f"M <= 8 and {one_turn(96, 2)}", (PAIR_96_SINGLE, FOUR_96)),
        Choice("M <= 8 and K < 3072", (TWELVE,)),
        Choice("M <= 8 and (M <= 4 or K < 8192)", (DEEP, PAIR_SINGLE, FOUR_96, FOUR)),
        Choice("M <= 8", (PAIR_SINGLE, FOUR_96, FOUR)),
        Choice(f"M <= 16 and K >= 3072 and {one_turn(96, 4)}", (M16_FOUR_96,)),
        Choice(
            f"M <= 16 and K >= 8192 and {one_turn(160, 4)}", (M16_FOUR_160,), groups=(G128,), kinds=WITHOUT_ZERO_POINTS
        ),
        Choice(f"M <= 16 and {one_turn(64, 2)}", (M16_PAIR_64,)),
        # Up to one turn of 64 only a large K comes here, which two turns of M16_FOUR_96 do no faster than wgmma.
        Choice(f"M <= 16 and {one_turn(96, 2)} and (K < 8192 or not {one_turn(64, 2)})", (M16_PAIR_96, M16_FOUR_96)),
        *_large_tiles(f"M <= 16 and {_one_full_turn(160)}", M16_160, k_limit_of_g64=3072),
        *_large_tiles(f"M <= 16 and {full_turns(224, 2)}", M16_PAIR_224),
        Choice(f"M <= 16 and {full_turns(96, 2)}", (M16_PAIR_96,)),
        *_large_tiles(f"M <= 16 and {one_turn(160, 2)}", M16_PAIR_160),
    ),
    "sm80": (Choice("M <= 8", (PLAIN, SMALL), PREDICTED),),
}
