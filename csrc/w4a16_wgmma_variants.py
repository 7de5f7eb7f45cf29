"""Which specialisations of the wgmma kernel are built for sm90, and when each is taken."""

from __future__ import annotations

from dataclasses import dataclass

from gristmill.csrc.w4a16_cuda_rows import CONDITIONS, MEASURED, clusters_at_once
from gristmill.kernels.variant import CxxVariant, PolicyRow
from gristmill.kernels.w4a16_rows import KINDS, OP, arguments, entry_name

ARCH = "sm90"
SOURCE = "csrc/cuda/w4a16_wgmma.cu"
SYMBOL = "w4a16_wgmma"

# k in one group for sure -> the group sizes that a span of it is right for. The kernel finds the group by a
# multiplication that is exact below K = 2^20.
SPANS = {span: f"(group_size >= K or group_size % {span} == 0) and K < 1048576" for span in (128, 32)}

SHARED_BYTES = 232448  # that a block can have: the opt-in limit of compute capability 9.0, 227 KiB
MOST_SLOTS = 16  # for chunks of x
UNIT = 256  # k that a warp copies at a time


@dataclass(frozen=True, slots=True)
class Shape:
    """How the work is divided; it becomes a variant per span and dtype, with and without zero points."""

    tokens: int  # per block
    groups_n: int  # warpgroups side by side along the output features, 64 each
    groups_k: int  # warpgroups one after the other along K
    cluster: int  # blocks that divide K
    depth: int  # units in a warp's ring
    stagers: int = 4  # warps that stage x

    @property
    def warpgroups(self) -> int:
        return self.groups_n * self.groups_k

    @property
    def rows(self) -> int:
        return 64 * self.groups_n

    @property
    def suffix(self) -> str:
        text = f"m{self.tokens}_n{self.groups_n}_k{self.groups_k}_c{self.cluster}_d{self.depth}"
        return f"{text}_s{self.stagers}" if self.stagers != 4 else text

    def other_bytes(self, span: int, zero_points: bool) -> int:
        """Shared memory beside that for x: barriers, sums, weights and scales."""
        ring = self.depth * (UNIT // 2 * 16 + 64 * (UNIT // span) * (1 + zero_points))
        return 16 * MOST_SLOTS + 128 + 256 * self.tokens * self.warpgroups + 4 * self.warpgroups * ring

    def x_slots(self, span: int, zero_points: bool) -> int:
        """For chunks of 128 k of x: as many as there is room for."""
        room = (SHARED_BYTES - self.other_bytes(span, zero_points)) // (256 * self.tokens)
        return min(MOST_SLOTS, room)

    def shared_bytes(self, span: int, zero_points: bool) -> str:
        """Formula of the dynamic shared memory: the kernel's header, with the barriers of MOST_SLOTS slots.

        X_SLOTS follows from what is left beside them.
        """
        units = f"ceil_div(ceil_div(K, {UNIT}), {self.cluster})"
        slots = f"min({self.x_slots(span, zero_points)}, 2 * {units})"
        return f"{256 * self.tokens} * {slots} + {self.other_bytes(span, zero_points)}"

    @property
    def grid(self) -> tuple[str, str, str]:
        """As many clusters as run at once, a block on a multiprocessor: each takes tile after tile of rows."""
        clusters = clusters_at_once(self.cluster)
        return f"{self.cluster} * min(ceil_div(N, {self.rows}), {clusters})", f"ceil_div(M, {self.tokens})", "1"


@dataclass(frozen=True, slots=True)
class Choice:
    """Where `when` holds, `shape` is taken."""

    when: str
    shape: Shape


def variants(arch: str) -> list[CxxVariant]:
    """The rows to build for `arch`; none but for Hopper."""
    if arch != ARCH:
        return []
    shapes = dict.fromkeys(choice.shape for choice in _CHOICES)
    return [
        _variant(shape, span, dtype, zero_points) for shape in shapes for span in SPANS for dtype, zero_points in KINDS
    ]


def policy(arch: str) -> list[PolicyRow]:
    """The rules for `arch`, to stand after those of the kernel for fewer tokens and before those of the tiles."""
    if arch != ARCH:
        return []
    return [
        PolicyRow(
            choice.when,
            tuple(_name(choice.shape, span, dtype, zero_points) for dtype, zero_points in KINDS for span in SPANS),
            MEASURED,
        )
        for choice in _CHOICES
    ]


def _name(shape: Shape, span: int, dtype: str, zero_points: bool) -> str:
    return entry_name(SYMBOL, dtype, zero_points, f"g{span}_{shape.suffix}")


def _variant(shape: Shape, span: int, dtype: str, zero_points: bool) -> CxxVariant:
    return CxxVariant(
        name=_name(shape, span, dtype, zero_points),
        op=OP,
        source=SOURCE,
        symbol=SYMBOL,
        defines={
            "BF16": int(dtype == "bfloat16"),
            "ZEROS": int(zero_points),
            "SPAN": span,
            "TOKENS": shape.tokens,
            "WG_N": shape.groups_n,
            "WG_K": shape.groups_k,
            "CLUSTER": shape.cluster,
            "DEPTH": shape.depth,
            "STAGERS": shape.stagers,
            "X_SLOTS": shape.x_slots(span, zero_points),
        },
        arguments=arguments(zero_points),
        block=(128 * shape.warpgroups + 32 * shape.stagers + 128, 1, 1),
        grid=shape.grid,
        dynamic_shared_bytes=shape.shared_bytes(span, zero_points),
        dtype=dtype,
        zero_points=zero_points,
        conditions=(*CONDITIONS, SPANS[span]),
        roundings=2 + zero_points,  # of the output, of (q - z) * s, of q - z
        weights_in_dtype=True,
        early_start=True,
        features="a",
    )


M16 = Shape(16, 1, 2, cluster=2, depth=4)
M32 = Shape(32, 1, 2, cluster=2, depth=3)
M32_FOUR = Shape(32, 2, 1, cluster=4, depth=4)
M64 = Shape(64, 1, 2, cluster=2, depth=3, stagers=8)
M64_TWO = Shape(64, 2, 1, cluster=2, depth=3)
M64_FOUR = Shape(64, 2, 1, cluster=4, depth=2)

NARROW = "N <= 35 * multiprocessor_count"
MIDDLE = "N > 35 * multiprocessor_count and N <= 60 * multiprocessor_count"

# The fastest of 25 shapes, or within 6 % of it, at M = 16, 32 and 64 in the eight layers of `gristmill bench` (NVIDIA
# H200, float16, group size 128, graph replay, weights rotated past L2, medians). Other layers at M > 32 are left to the
# tiles.
_CHOICES = (
    Choice("M <= 16", M16),
    Choice(f"M <= 32 and ((K >= 8192 and N <= 3072) or (K >= 3072 and K < 8192 and {MIDDLE}))", M32_FOUR),
    Choice("M <= 32", M32),
    Choice(f"M <= 64 and ((K >= 8192 and N <= 3072) or (K < 3072 and {NARROW}))", M64_FOUR),
    Choice(f"M <= 64 and {NARROW}", M64),
    Choice("M <= 64 and K < 3072", M64_TWO),
    Choice(f"M <= 64 and K < 8192 and {MIDDLE}", M64_FOUR),
)
