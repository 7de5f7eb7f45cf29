"""Which specialisations of the Triton W4A16 GEMM are built for each arch, and when each is taken."""

from __future__ import annotations

from dataclasses import dataclass

from gristmill.kernels.variant import PolicyRow, TritonVariant

OP = "w4a16_gemm"
MODULE = "gristmill.kernels.w4a16_gemm"
FUNCTION = "w4a16_gemm"
ARCHES = ("gfx1151", "gfx1201", "sm80", "sm90")

TRITON_DTYPE = {"float16": "fp16", "bfloat16": "bf16"}
KINDS = tuple((dtype, zero_points) for dtype in TRITON_DTYPE for zero_points in (False, True))

# What a 16-byte access needs: pointers in bytes, strides in elements.
ALIGNED = {
    "x": 16, "qweight": 16, "out": 16,
    "x_row_stride": 8, "qweight_row_stride": 4, "out_row_stride": 8,
    "K": 8, "N": 8,
}  # fmt: skip
ALIGNED_CONDITIONS = ("alignment % 16 == 0", "K % 8 == 0", "N % 8 == 0")

# Roundings of a product on its way to the output, by the kernel's SCALE: without and with zero points.
ROUNDINGS = {"after": (1, 2), "before": (2, 3), "word": (2, 3)}


@dataclass(frozen=True, slots=True)
class Tile:
    """One shape of work for a block; it becomes a variant per dtype, with and without zero points."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int = 2
    scale: str = "after"
    aligned: bool = True

    @property
    def suffix(self) -> str:
        text = f"{self.block_m}x{self.block_n}x{self.block_k}_w{self.num_warps}_s{self.num_stages}"
        text += "" if self.scale == "after" else f"_{self.scale}"
        return text if self.aligned else f"{text}_unaligned"

    def cut(self, block_k: int) -> Tile:
        return Tile(self.block_m, self.block_n, block_k, self.num_warps, self.num_stages, self.scale, self.aligned)


@dataclass(frozen=True, slots=True)
class TileRule:
    when: str
    tiles: tuple[Tile, ...]
    origin: str


def variants(arch: str) -> list[TritonVariant]:
    """The rows to build for `arch`, each tile of its rules once per dtype, with and without zero points."""
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
        "SCALE": tile.scale,
    }
    if not zero_points:
        del signature["zero_points"]
        constexprs["zero_points"] = None
    conditions = ALIGNED_CONDITIONS if tile.aligned else ()
    if tile.scale != "word":
        conditions += (f"group_size % {tile.block_k} == 0 or group_size >= K",)
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
        conditions=conditions,
        roundings=ROUNDINGS[tile.scale][zero_points],
        weights_in_dtype=tile.scale != "after",
        options={"enable_fp_fusion": True},
    )


def _rules(arch: str) -> list[TileRule]:
    tables = {"gfx1151": _GFX1151, "gfx1201": _GFX12X, "sm80": _SM80, "sm90": _SM90}
    return [*tables[arch], *_LAST]


def _cuts(*tiles: Tile) -> tuple[Tile, ...]:
    """Each tile, then its siblings for groups narrower than its K."""
    cut = [tile.cut(block_k) for block_k in (128, 64, 32) for tile in tiles if block_k <= tile.block_k]
    return tuple(dict.fromkeys(cut))


_GFX12X = [
    TileRule("M <= 32", _cuts(Tile(16, 16, 128, 4)), "table for gfx12x, not measured here"),
    TileRule("M <= 64 and K >= 2 * N", _cuts(Tile(64, 32, 128, 8)), "table for gfx12x, not measured here"),
    TileRule("M <= 64 and N > K", _cuts(Tile(64, 32, 64, 8)), "table for gfx12x, not measured here"),
    TileRule("M <= 64", _cuts(Tile(32, 64, 128, 4)), "table for gfx12x, not measured here"),
    TileRule("M <= 512", _cuts(Tile(64, 64, 64, 8)), "table for gfx12x, not measured here"),
    TileRule("M > 512", _cuts(Tile(128, 128, 32, 8)), "table for gfx12x, not measured here"),
]
_GFX1151 = [
    TileRule("M <= 32", _cuts(Tile(32, 32, 128, 4)), "table for gfx1151, not measured here"),
    TileRule("M <= 128", _cuts(Tile(64, 64, 64, 4)), "table for gfx1151, not measured here"),
    TileRule("M > 128", _cuts(Tile(128, 64, 64, 8)), "table for gfx1151, not measured here"),
]
_SM80 = [
    TileRule("M <= 16", _cuts(Tile(16, 64, 128, 4, 4)), "guess"),
    TileRule("M <= 64", _cuts(Tile(64, 64, 64, 4, 4)), "guess"),
    TileRule("M > 64", _cuts(Tile(128, 128, 64, 8, 3)), "guess"),
]
_SM90 = [
    TileRule("M <= 16", _cuts(Tile(16, 64, 128, 4, 4)), "guess"),
    TileRule("M <= 64", _cuts(Tile(64, 64, 64, 4, 4)), "guess"),
    TileRule("M > 64", _cuts(Tile(128, 128, 64, 8, 4)), "guess"),
]

# Every arch ends with tiles that assume no alignment, then with the floor, which also takes any group size.
_LAST = [
    TileRule("M <= 32", _cuts(Tile(32, 64, 64, 4, aligned=False)), "unaligned, not measured"),
    TileRule("M > 32", _cuts(Tile(64, 128, 64, 8, aligned=False)), "unaligned, not measured"),
    TileRule("M >= 1", (Tile(32, 64, 32, 4, scale="word", aligned=False),), "floor: any shape, group and alignment"),
]
