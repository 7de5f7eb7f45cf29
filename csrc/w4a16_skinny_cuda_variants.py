"""Which specialisations of the skinny CUDA kernel are built for each arch, and when each is taken."""

from __future__ import annotations

from dataclasses import dataclass

from gristmill.kernels.variant import CxxVariant, PolicyRow

OP = "w4a16_gemm"
ARCHES = ("sm80", "sm90")
SOURCE = "csrc/cuda/w4a16_skinny.cu"

DTYPE_SUFFIX = {"float16": "fp16", "bfloat16": "bf16"}
KINDS = tuple((dtype, zero_points) for dtype in DTYPE_SUFFIX for zero_points in (False, True))

# k of which all lanes of a row share one group -> the group sizes it is right for. With 128 the kernel finds
# the group by a shift; with 64 and 32 by a multiplication that is exact below K = 2^20.
SPANS = {
    128: "group_size >= K or (group_size % 128 == 0 and 4096 % group_size == 0)",
    64: "group_size % 64 == 0 and K < 1048576",
    32: "group_size % 32 == 0 and K < 1048576",
}

# K % 32: weights are read 16 bytes, 32 values, at a time, and nothing needs to lie behind the last row. Alignment: of
# those pieces, and of the ones that x is copied in.
CONDITIONS = ("K % 32 == 0", "alignment % 16 == 0")

# Roundings to the activation dtype that a product passes: the output's, and q - z with real zero points.
ROUNDINGS = {False: 1, True: 2}

MEASURED = "measured on NVIDIA H200"
NARROW_GROUPS = "predicted on NVIDIA H200: narrow groups cost the tile kernel 75 %, this one little"
PREDICTED = "predicted from the same source on NVIDIA H200"


@dataclass(frozen=True, slots=True)
class Shape:
    """How the work is divided; it becomes a variant per span and dtype, with and without zero points."""

    tokens: int  # per block
    tiles: int  # of 16 output features per warp
    warps_n: int  # side by side along the output features
    warps_k: int  # one after the other along K
    depth: int  # chunks of 128 k that a warp has on their way
    cluster: int = 1  # blocks that divide K
    min_blocks: int = 1  # per multiprocessor, which bounds the registers

    @property
    def rows(self) -> int:
        return 16 * self.tiles * self.warps_n

    @property
    def threads(self) -> int:
        return 32 * self.warps_n * self.warps_k

    @property
    def suffix(self) -> str:
        text = f"m{self.tokens}_n{self.tiles}x{self.warps_n}_k{self.warps_k}_d{self.depth}"
        text += f"_c{self.cluster}" if self.cluster > 1 else ""
        return f"{text}_b{self.min_blocks}" if self.min_blocks > 1 else text

    @property
    def shared_bytes(self) -> str:
        """Formula of the dynamic shared memory; see the kernel's header."""
        tokens = "min(M, 8)" if self.tokens == 8 else str(self.tokens)
        sums = 4 * self.cluster * self.warps_k * self.tokens * (self.rows // self.cluster + 4)
        return f"256 * {tokens} * ceil_div(ceil_div(K, 128), {self.cluster}) + {sums}"

    @property
    def grid(self) -> tuple[str, str, str]:
        return f"{self.cluster} * ceil_div(N, {self.rows})", f"ceil_div(M, {self.tokens})", "1"


@dataclass(frozen=True, slots=True)
class Choice:
    """Where `when` holds, the first of `shapes` whose shared memory the device has."""

    when: str
    shapes: tuple[Shape, ...]
    origin: str = MEASURED


def variants(arch: str) -> list[CxxVariant]:
    """The rows to build for `arch`; none where the kernel does not run."""
    shapes = dict.fromkeys(shape for choice in _CHOICES.get(arch, ()) for shape in choice.shapes)
    return [
        _variant(shape, span, dtype, zero_points)
        for shape in shapes
        for span in _spans(arch, shape)
        for dtype, zero_points in KINDS
    ]


def policy(arch: str) -> list[PolicyRow]:
    """The rules for `arch`, to stand before those of the tile kernel, which takes all that is left."""
    return [
        PolicyRow(
            choice.when,
            tuple(
                _name(shape, span, dtype, zero_points)
                for dtype, zero_points in KINDS
                for span in SPANS
                for shape in choice.shapes
                if span in _spans(arch, shape)
            ),
            choice.origin,
        )
        for choice in _CHOICES.get(arch, ())
    ]


def _name(shape: Shape, span: int, dtype: str, zero_points: bool) -> str:
    return f"w4a16_skinny_{DTYPE_SUFFIX[dtype]}{'_z' if zero_points else ''}_g{span}_{shape.suffix}"


def _spans(arch: str, shape: Shape) -> tuple[int, ...]:
    """Narrow groups are rarer: they get the shapes that every K can use, not those for one kind of layer."""
    return tuple(SPANS) if shape in _GENERAL[arch] else (128,)


def _variant(shape: Shape, span: int, dtype: str, zero_points: bool) -> CxxVariant:
    pointers = ("x", "qweight", "scales", *(("zero_points",) if zero_points else ()), "bias", "out")
    strides = ("x_row_stride", "qweight_row_stride", "scales_row_stride", "out_row_stride")
    return CxxVariant(
        name=_name(shape, span, dtype, zero_points),
        op=OP,
        source=SOURCE,
        symbol="w4a16_skinny",
        defines={
            "BF16": int(dtype == "bfloat16"),
            "ZEROS": int(zero_points),
            "SPAN": span,
            "TOKENS": shape.tokens,
            "TILES": shape.tiles,
            "WARPS_N": shape.warps_n,
            "WARPS_K": shape.warps_k,
            "DEPTH": shape.depth,
            "CLUSTER": shape.cluster,
            "MIN_BLOCKS": shape.min_blocks,
        },
        arguments=(
            *((name, "pointer") for name in pointers),
            *((name, "int32") for name in ("M", "N", "K", "group_size")),
            *((name, "int64") for name in strides),
        ),
        block=(shape.threads, 1, 1),
        grid=shape.grid,
        dynamic_shared_bytes=shape.shared_bytes,
        dtype=dtype,
        zero_points=zero_points,
        conditions=(*CONDITIONS, SPANS[span]),
        roundings=ROUNDINGS[zero_points],
        weights_in_dtype=False,
    )


# M <= 8. A wide layer has blocks enough: each takes the whole of K. Others divide K over a cluster, which also divides
# what each multiprocessor has to copy of x. Deep layers get more warps along K and fewer output features a block.
WIDE = Shape(8, 2, 8, 2, depth=2)
DEEP = Shape(8, 2, 2, 8, depth=2, cluster=2)
MIDDLING = Shape(8, 2, 2, 4, depth=2, cluster=4, min_blocks=2)
FOUR = Shape(8, 2, 4, 2, depth=2, cluster=4, min_blocks=2)

# M <= 16: two tiles a warp, which halves what is read of x per mma.
M16_FOUR = Shape(16, 2, 8, 2, depth=2, cluster=4)
M16_EIGHT = Shape(16, 2, 8, 2, depth=2, cluster=8)

# Without clusters. It keeps its registers down to 64: 32 warps hide each other's waiting.
ONE = Shape(8, 1, 2, 8, depth=2, min_blocks=2)

# The fastest of 45 shapes, or within 6 % of it, at M = 1, 8 and 16 in the eight layers of `gristmill bench` (NVIDIA
# H200, float16, group size 128, graph replay, weights rotated past L2, medians). For M = 9..16 the tile kernel is level
# or ahead where K is neither deep nor N small: 10.4 us against 10.8 at 4096x4096, in bfloat16 10.6 against 12.4.
_CHOICES = {
    "sm90": (
        Choice("M <= 8 and N >= 140 * multiprocessor_count", (WIDE, FOUR)),
        Choice("M <= 8 and K >= 12288", (DEEP, FOUR)),
        Choice("M <= 8 and K >= 8192", (MIDDLING, FOUR)),
        Choice("M <= 8", (FOUR,)),
        Choice("M <= 16 and K >= 12288", (M16_FOUR,)),
        Choice("M <= 16 and N <= 3072", (M16_EIGHT, M16_FOUR)),
        Choice("M <= 16 and group_size < 128", (M16_FOUR,), NARROW_GROUPS),
    ),
    # No clusters: K that does not fit one block's shared memory is left to the tile kernel.
    "sm80": (Choice("M <= 8", (ONE,), PREDICTED),),
}

_GENERAL = {"sm90": (FOUR, M16_FOUR), "sm80": (ONE,)}
