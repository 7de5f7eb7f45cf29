"""Which specialisations of the Triton W4A16 GEMM are built for each arch, and when each is taken.

A tile becomes one variant per dtype, with and without zero points. Bias, M, N, K, strides and the group
size are arguments: they cost little at run time, and each would multiply the build.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from gristmill.kernels.variant import PolicyRow, TritonVariant
from gristmill.kernels.w4a16_rows import DTYPE_SUFFIX, KINDS, OP, arguments, entry_name

MODULE = "gristmill.kernels.w4a16_gemm"
FUNCTION = "w4a16_gemm"
ARCHES = ("gfx1151", "gfx1201", "sm80", "sm90")
WARP_SIZE = 32  # on all of them

TRITON_INTEGERS = {"int32": "i32", "int64": "i64"}

# What 16-byte accesses need: pointers in bytes, strides in elements, K and N so that a mask never cuts an
# access.
ALIGNED = {
    "x": 16, "qweight": 16, "out": 16,
    "x_row_stride": 8, "qweight_row_stride": 4, "out_row_stride": 8,
    "K": 8, "N": 8,
}  # fmt: skip
ALIGNED_CONDITIONS = ("alignment % 16 == 0", "K % 8 == 0", "N % 8 == 0")


@dataclass(frozen=True, slots=True)
class Tile:
    """One shape of work for a block.

    With `scale_weights` the weights are scaled before the product, with a column of scales for each
    `narrowest_group` values of k, so that one variant takes every group from there up. Without, a tile lies
    in one group and its sum is scaled in float32: one rounding less, but a second set of accumulators.
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
    dtypes: tuple[str, ...] = tuple(DTYPE_SUFFIX)

    @property
    def kinds(self) -> list[tuple[str, bool]]:
        return [(dtype, zero_points) for dtype, zero_points in KINDS if dtype in self.dtypes]

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
        if self.unroll > 1:
            parts.append(f"u{self.unroll}")
        if self.scale_weights:
            parts.append(f"g{self.block_k // self.scales}")
        if not self.aligned:
            parts.append("unaligned")
        return "_".join(parts)


@dataclass(frozen=True, slots=True)
class TileRule:
    when: str
    tiles: tuple[Tile, ...]
    origin: str


def variants(arch: str) -> list[TritonVariant]:
    """The rows to build for `arch`: each tile of its rules once per dtype, with and without zero points."""
    tiles = dict.fromkeys(tile for rule in _rules(arch) for tile in rule.tiles)
    return [_variant(arch, tile, *kind) for tile in tiles for kind in tile.kinds]


def policy(arch: str) -> list[PolicyRow]:
    """The rules for `arch` in order; the last one names the floor."""
    return [
        PolicyRow(
            rule.when,
            tuple(_name(tile, *kind) for tile in rule.tiles for kind in tile.kinds),
            rule.origin,
        )
        for rule in _rules(arch)
    ]


def _name(tile: Tile, dtype: str, zero_points: bool) -> str:
    return entry_name(FUNCTION, dtype, zero_points, tile.suffix)


def _triton_type(name: str, type_: str, dtype: str) -> str:
    if type_ == "pointer":
        return "*i32" if name == "qweight" else f"*{DTYPE_SUFFIX[dtype]}"
    return TRITON_INTEGERS[type_]


def _variant(arch: str, tile: Tile, dtype: str, zero_points: bool) -> TritonVariant:
    constexprs: dict[str, object] = {
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "GROUP_M": 8,
        "SCALE_WEIGHTS": tile.scale_weights,
        "SCALES": tile.scales,
        "UNROLL": tile.unroll,
        "RDNA": arch.startswith("gfx"),
    }
    if not zero_points:
        constexprs["zero_points"] = None
    unpack_roundings = zero_points + tile.scale_weights  # q - z, then (q - z) * s
    if arch.startswith("gfx") and dtype == "bfloat16":
        unpack_roundings = min(unpack_roundings, 1)  # RDNA has no bfloat16 arithmetic: both in float32, rounded once
    return TritonVariant(
        name=_name(tile, dtype, zero_points),
        op=OP,
        module=MODULE,
        function=FUNCTION,
        signature={name: _triton_type(name, type_, dtype) for name, type_ in arguments(zero_points)},
        constexprs=constexprs,
        divisibility=ALIGNED if tile.aligned else {},
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        grid=(f"ceil_div(M, {tile.block_m}) * ceil_div(N, {tile.block_n})", "1", "1"),
        dtype=dtype,
        zero_points=zero_points,
        conditions=tile.conditions,
        roundings=unpack_roundings + 1,  # and the output's
        weights_in_dtype=tile.scale_weights,
    )


def _rules(arch: str) -> list[TileRule]:
    tables = {"gfx1151": _GFX1151, "gfx1201": _GFX12X, "sm80": _SM80, "sm90": _SM90}
    return [*tables[arch], *_last(block_k=32 if arch.startswith("gfx") else 64)]


def _cut(*tiles: Tile) -> tuple[Tile, ...]:
    """Each tile, then its siblings for groups narrower than its K, wider ones first."""
    cuts = (replace(tile, block_k=k) for k in (128, 64, 32) for tile in tiles if k <= tile.block_k)
    return tuple(dict.fromkeys(cuts))


def _weights(block_m: int, block_n: int, block_k: int, num_warps: int, num_stages: int = 2) -> Tile:
    return Tile(block_m, block_n, block_k, num_warps, num_stages, scale_weights=True)


def _last(block_k: int) -> list[TileRule]:
    """What every arch ends with.

    Tiles that assume no alignment, and the floor: a scale per word, for any group.
    """
    small = replace(_weights(32, 64, block_k, 4), aligned=False)
    large = replace(_weights(64, 128, block_k, 8), aligned=False)
    floor = Tile(32, 64, 32, 4, scale_weights=True, narrowest_group=8, aligned=False)
    return [
        TileRule("M <= 32", (small,), "unaligned tensors, not measured"),
        TileRule("M > 32", (large, small), "unaligned tensors, not measured"),
        TileRule("M >= 1", (floor,), "floor: any shape, group and alignment"),
    ]


# Tiles of vLLM's RDNA kernel, found by its authors on Radeon AI PRO R9700 at group size 128. Four have half
# the table's K here, since the whole spilled 3 to 48 registers: 32x64, 64x16, 128x128 and 256x64.
_GFX12X_ORIGIN = "table for gfx12x, not measured here"
_GFX12X = [
    TileRule(when, _cut(Tile(*tile)), _GFX12X_ORIGIN)
    for when, tile in (
        ("M <= 32", (16, 16, 128, 4)),
        ("M <= 64 and K >= 2 * N", (64, 32, 128, 8)),
        ("M <= 64 and N > K", (64, 32, 64, 8)),
        ("M <= 64", (32, 64, 64, 4)),
        ("M <= 128 and K >= 2 * N", (64, 16, 32, 1)),
        ("M <= 128 and N >= 2 * K", (64, 128, 64, 8)),
        ("M <= 128", (64, 64, 64, 8)),
        ("M <= 512 and K >= 2 * N", (128, 64, 64, 8)),
        ("M <= 512 and N >= 4 * K", (128, 128, 32, 8)),
        ("M <= 512", (64, 128, 64, 8)),
        ("K >= 2 * N", (128, 64, 64, 8)),
        ("N >= 4 * K", (256, 64, 32, 8)),
        ("M > 512", (128, 128, 32, 8)),
    )
]

# Likewise for Strix Halo; the exact shapes are layers of SmolLM2-1.7B and Qwen3-8B. Where the table has 64 or
# 128 values of k for 64 rows of x and more, ours has 32: the compiler fetches all of a tile's x before it
# multiplies, so wider tiles spilled 1 to 112 registers. The table's 128x512x32 tile needs 128 KiB of LDS here
# and is left out.
_GFX1151_ORIGIN = "table for gfx1151, not measured here"
_GFX1151_EXACT = [
    TileRule(f"M <= 128 and group_size == {group_size} and K == {K} and N == {N}", (tile,), _GFX1151_ORIGIN)
    for group_size, K, N, tile in (
        (32, 2048, 6144, _weights(128, 32, 32, 4, 4)),
        (32, 2048, 2048, _weights(128, 32, 32, 4, 4)),
        (32, 2048, 16384, _weights(128, 32, 32, 4, 4)),
        (32, 8192, 2048, Tile(128, 64, 32, 8)),
        (128, 4096, 6144, Tile(128, 64, 32, 8)),
        (128, 4096, 4096, _weights(128, 32, 32, 4, 4)),
        (128, 4096, 24576, Tile(64, 32, 32, 2)),
        (128, 12288, 4096, Tile(128, 64, 32, 8)),
    )
]
_FP16 = ("float16",)
_GFX1151_FP16 = [
    TileRule(when, (replace(_weights(*tile, 8, 1), dtypes=_FP16),), _GFX1151_ORIGIN)
    for when, tile in (
        ("M > 256 and M <= 512 and N <= 1024", (128, 32, 32)),
        ("M > 128 and M <= 256", (128, 128, 32)),
        ("M >= 2048 and N <= 2048 and K >= 4096", (64, 256, 32)),
        ("M > 256", (128, 256, 32)),
    )
]
_GFX1151 = [
    *_GFX1151_EXACT,
    *_GFX1151_FP16,
    *(
        TileRule(when, tiles, _GFX1151_ORIGIN)
        for when, tiles in (
            ("M <= 32", _cut(Tile(32, 32, 64, 4))),
            ("M <= 64", (Tile(64, 64, 32, 4),)),
            ("M <= 128 and K >= 2 * N", (Tile(64, 16, 32, 1),)),
            ("M <= 128 and N > K", (Tile(64, 64, 32, 4),)),
            ("M <= 128", (Tile(64, 32, 32, 4),)),
            ("M <= 1024 and K >= 2 * N", (Tile(64, 64, 32, 4),)),
            ("M <= 1024 and N >= 4 * K", (Tile(128, 64, 32, 8),)),
            ("M <= 1024", (Tile(64, 128, 32, 8),)),  # the table's four warps would spill with bfloat16
            ("M > 1024", (Tile(128, 64, 32, 8),)),
        )
    ),
]

# The PTX of these ran on an H200, which has sm80's matrix instructions: the order of tiles there is the
# prediction.
_SM80_ORIGIN = "predicted from sm80 code on NVIDIA H200, not measured on sm80"
_SM80_SMALL = (Tile(16, 64, 128, 4, 4), _weights(16, 64, 64, 4, 4))
_SM80_NARROW = _weights(64, 64, 64, 4, 3)
_SM80 = [
    TileRule("M <= 16 and K % 128 != 0 and K < 2048", _SM80_SMALL[1:], _SM80_ORIGIN),
    TileRule("M <= 16", _SM80_SMALL, _SM80_ORIGIN),
    TileRule("M <= 256 and K % 128 != 0 and K < 2048", (_SM80_NARROW,), _SM80_ORIGIN),
    TileRule("M <= 64 and N < 5120", (Tile(32, 64, 128, 4, 4), _SM80_NARROW), _SM80_ORIGIN),
    TileRule("M <= 256", (Tile(64, 64, 128, 4, 3), _SM80_NARROW), _SM80_ORIGIN),
    TileRule("M > 256", (_weights(128, 128, 32, 4, 4),), _SM80_ORIGIN),
]

# Medians over (K, N) = 4096x4096, 4096x28672, 14336x4096, 2560x6144, 576x1536 and M = 1 .. 4096. Where
# scaling the sum is within 5 % of scaling the weights, it is taken for its accuracy. `_weights` siblings
# serve narrower groups.
_SM90_ORIGIN = "measured on NVIDIA H200"
_16X64 = _weights(16, 64, 64, 4, 6)
_32X64 = _weights(32, 64, 128, 4, 4)
_64X64 = _weights(64, 64, 64, 4, 4)
_128X64 = _weights(128, 64, 64, 4, 4)
_128X128 = _weights(128, 128, 64, 4, 4)
_TILES_256X128 = "ceil_div(M, 256) * ceil_div(N, 128)"
_SM90 = [
    TileRule(when, tiles, _SM90_ORIGIN)
    for when, tiles in (
        ("M <= 16 and K % 128 != 0 and K < 2048", (_16X64,)),
        ("M <= 16", (Tile(16, 32, 128, 2, 3, unroll=4), _16X64)),
        ("M <= 128 and K % 128 != 0 and K < 2048", (_64X64,)),
        ("M > 32 and M <= 64 and N >= 16384", (Tile(64, 128, 128, 4, 3), _64X64)),
        ("M > 32 and M <= 64 and N >= 5120", (Tile(64, 64, 128, 4, 4), _64X64)),
        ("M <= 64", (Tile(32, 64, 128, 4, 4), _32X64)),
        ("M <= 128 and N <= 5120", (Tile(64, 64, 128, 4, 4), _64X64)),
        ("M <= 256 and N <= 8192", (Tile(128, 64, 128, 4, 3), _128X64)),
        (f"M <= 128 or K < 1024 or {_TILES_256X128} < 96", (_128X128,)),
        (
            f"{_TILES_256X128} > multiprocessor_count and 2 * {_TILES_256X128} <= 3 * multiprocessor_count",
            (_128X128,),  # between one wave and one and a half: a second wave half empty
        ),
        ("M <= 2048", (_weights(256, 128, 64, 8, 4),)),
        ("M > 2048", (_weights(256, 128, 64, 8, 3),)),
    )
]
