"""Which specialisations of the Triton W4A16 GEMM are built for each arch, and when each is taken.

A tile becomes one variant per dtype, with and without zero points. Bias, M, N, K, strides and the group size are
run-time arguments: they cost nothing measurable there, and each would double the build.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from gristmill.kernels.variant import PolicyRow, TritonVariant

OP = "w4a16_gemm"
MODULE = "gristmill.kernels.w4a16_gemm"
FUNCTION = "w4a16_gemm"
ARCHES = ("gfx1151", "gfx1201", "sm80", "sm90")
WARP_SIZE = 32  # on all of them

TRITON_DTYPE = {"float16": "fp16", "bfloat16": "bf16"}
KINDS = tuple((dtype, zero_points) for dtype in TRITON_DTYPE for zero_points in (False, True))

# What 16-byte accesses need: pointers in bytes, strides in elements, K and N so that a mask never cuts an access.
ALIGNED = {
    "x": 16, "qweight": 16, "out": 16,
    "x_row_stride": 8, "qweight_row_stride": 4, "out_row_stride": 8,
    "K": 8, "N": 8,
}  # fmt: skip
ALIGNED_CONDITIONS = ("alignment % 16 == 0", "K % 8 == 0", "N % 8 == 0")


@dataclass(frozen=True, slots=True)
class Tile:
    """One shape of work for a block.

    With `scale_weights` the weights are scaled before the product, one column of scales per `narrowest_group` values
    of k, so that one variant takes every group from there up. Without, a tile lies in one group and its sum is scaled
    in float32: one rounding less, and a second set of accumulators.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int = 2
    scale_weights: bool = False
    narrowest_group: int = 32
    unroll: int = 1
    aligned: bool = True

    @property
    def scales(self) -> int:
        """Columns of scales a tile loads; see the kernel's `_scales` for the least."""
        least = max(1, self.num_warps * WARP_SIZE // self.block_n)
        return max(least, self.block_k // self.narrowest_group) if self.scale_weights else least

    @property
    def conditions(self) -> tuple[str, ...]:
        conditions = ALIGNED_CONDITIONS if self.aligned else ()
        width = self.block_k // self.scales
        if not self.scale_weights:
            return (*conditions, f"group_size % {self.block_k} == 0 or group_size >= K")
        if width == 8:
            return conditions
        return (
            *conditions,
            f"group_size % {self.block_k} == 0 or group_size >= K"
            f" or group_size % {width} == 0 and {self.block_k} % group_size == 0",
        )

    @property
    def suffix(self) -> str:
        parts = [f"{self.block_m}x{self.block_n}x{self.block_k}", f"w{self.num_warps}", f"s{self.num_stages}"]
        parts += [f"u{self.unroll}"] * (self.unroll > 1)
        parts += [f"g{self.block_k // self.scales}"] * self.scale_weights
        return "_".join(parts + ["unaligned"] * (not self.aligned))


@dataclass(frozen=True, slots=True)
class TileRule:
    when: str
    tiles: tuple[Tile, ...]
    origin: str


def variants(arch: str) -> list[TritonVariant]:
    """The rows to build for `arch`: each tile of its rules once per dtype, with and without zero points."""
    tiles = dict.fromkeys(tile for rule in _rules(arch) for tile in rule.tiles)
    return [_variant(tile, dtype, zero_points) for tile in tiles for dtype, zero_points in KINDS]


def policy(arch: str) -> list[PolicyRow]:
    """The rules for `arch` in order; the last one names the floor."""
    return [
        PolicyRow(
            rule.when,
            tuple(_name(tile, dtype, zero_points) for dtype, zero_points in KINDS for tile in rule.tiles),
            rule.origin,
        )
        for rule in _rules(arch)
    ]


def _name(tile: Tile, dtype: str, zero_points: bool) -> str:
    return f"{OP}_{TRITON_DTYPE[dtype]}{'_z' if zero_points else ''}_{tile.suffix}"


def _variant(tile: Tile, dtype: str, zero_points: bool) -> TritonVariant:
    pointer = f"*{TRITON_DTYPE[dtype]}"
    signature = {
        "x": pointer, "qweight": "*i32", "scales": pointer, "zero_points": pointer, "bias": pointer, "out": pointer,
        "M": "i32", "N": "i32", "K": "i32", "group_size": "i32",
        "x_row_stride": "i64", "qweight_row_stride": "i64", "scales_row_stride": "i64", "out_row_stride": "i64",
    }  # fmt: skip
    constexprs: dict[str, object] = {
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "GROUP_M": 8,
        "SCALE_WEIGHTS": tile.scale_weights,
        "SCALES": tile.scales,
        "UNROLL": tile.unroll,
    }
    if not zero_points:
        del signature["zero_points"]
        constexprs["zero_points"] = None
    return TritonVariant(
        name=_name(tile, dtype, zero_points),
        op=OP,
        module=MODULE,
        function=FUNCTION,
        signature=signature,
        constexprs=constexprs,
        divisibility=ALIGNED if tile.aligned else {},
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        grid=(f"ceil_div(M, {tile.block_m}) * ceil_div(N, {tile.block_n})", "1", "1"),
        dtype=dtype,
        zero_points=zero_points,
        conditions=tile.conditions,
        roundings=1 + zero_points + tile.scale_weights,
        weights_in_dtype=tile.scale_weights,
        options={"enable_fp_fusion": True},
    )


def _rules(arch: str) -> list[TileRule]:
    tables = {"gfx1151": _GFX1151, "gfx1201": _GFX12X, "sm80": _SM80, "sm90": _SM90}
    return [*tables[arch], *_LAST]


def _cut(*tiles: Tile) -> tuple[Tile, ...]:
    """Each tile, then its siblings for groups narrower than its K, wider ones first."""
    siblings: Iterable[Tile] = (
        replace(tile, block_k=block_k) for block_k in (128, 64, 32) for tile in tiles if block_k <= tile.block_k
    )
    return tuple(dict.fromkeys(siblings))


_GFX12X = [
    TileRule("M <= 32", _cut(Tile(16, 16, 128, 4)), "table for gfx12x, not measured here"),
    TileRule("M <= 64 and K >= 2 * N", _cut(Tile(64, 32, 128, 8)), "table for gfx12x, not measured here"),
    TileRule("M <= 64 and N > K", _cut(Tile(64, 32, 64, 8)), "table for gfx12x, not measured here"),
    TileRule("M <= 64", _cut(Tile(32, 64, 128, 4)), "table for gfx12x, not measured here"),
    TileRule("M <= 512", _cut(Tile(64, 64, 64, 8)), "table for gfx12x, not measured here"),
    TileRule("M > 512", _cut(Tile(128, 128, 32, 8)), "table for gfx12x, not measured here"),
]
_GFX1151 = [
    TileRule("M <= 32", _cut(Tile(32, 32, 128, 4)), "table for gfx1151, not measured here"),
    TileRule("M <= 128", _cut(Tile(64, 64, 64, 4)), "table for gfx1151, not measured here"),
    TileRule("M > 128", _cut(Tile(128, 64, 64, 8)), "table for gfx1151, not measured here"),
]
_SM80 = [
    TileRule("M <= 16", _cut(Tile(16, 64, 128, 4, 4)), "predicted, not measured"),
    TileRule("M <= 64", _cut(Tile(64, 64, 64, 4, 4)), "predicted, not measured"),
    TileRule("M > 64", _cut(Tile(128, 128, 32, 8, 3)), "predicted, not measured"),
]
_SM90 = [
    TileRule("M <= 16", _cut(Tile(16, 32, 128, 2, 4)), "measured on NVIDIA H200"),
    TileRule("M <= 64", _cut(Tile(32, 64, 128, 4, 4)), "measured on NVIDIA H200"),
    TileRule("M <= 256", _cut(Tile(128, 64, 128, 4, 3)), "measured on NVIDIA H200"),
    TileRule("M > 256", (Tile(256, 128, 64, 8, 3, scale_weights=True),), "measured on NVIDIA H200"),
]

# Every arch ends with tiles that assume no alignment, then with the floor: a scale per word, so any group size.
_LAST = [
    TileRule("M <= 32", _cut(Tile(32, 64, 64, 4, aligned=False)), "unaligned tensors, not measured"),
    TileRule("M > 32", (Tile(64, 128, 32, 8, aligned=False),), "unaligned tensors, not measured"),
    TileRule(
        "M >= 1",
        (Tile(32, 64, 32, 4, scale_weights=True, narrowest_group=8, aligned=False),),
        "floor: any shape, group and alignment",
    ),
]
