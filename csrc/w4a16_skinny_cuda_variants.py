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

# K % 8: rows of x are copied in pieces of 16 bytes. Alignment: of those pieces and of the loads of weights.
CONDITIONS = ("K % 8 == 0", "alignment % 16 == 0")

# Roundings to the activation dtype that a product passes: the output's, and q - z with real zero points.
ROUNDINGS = {False: 1, True: 2}

MEASURED = "shapes measured on NVIDIA H200 with an earlier version of the kernel"
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
    persistent: bool = False  # as many blocks as run at once, each with several turns and one copy of x

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
        text += f"_b{self.min_blocks}" if self.min_blocks > 1 else ""
        return f"{text}_p" if self.persistent else text

    @property
    def shared_bytes(self) -> str:
        """Formula of the dynamic shared memory; see the kernel's header."""
        tokens = "min(M, 8)" if self.tokens == 8 else str(self.tokens)
        sums = 4 * self.cluster * self.warps_k * self.tokens * (self.rows // self.cluster + 4)
        return f"256 * {tokens} * ceil_div(ceil_div(K, 128), {self.cluster}) + {sums}"

    @property
    def grid(self) -> tuple[str, str, str]:
        clusters = f"ceil_div(N, {self.rows})"
        if self.persistent:
            # A cluster has to fit into one part of the chip, where a few multiprocessors then stay free.
            usable = "multiprocessor_count" if self.cluster <= 2 else "multiprocessor_count * 10 // 11"
            clusters = f"min({clusters}, max(1, {usable} * {self.min_blocks} // {self.cluster}))"
        return f"{self.cluster} * {clusters}", f"ceil_div(M, {self.tokens})", "1"


@dataclass(frozen=True, slots=True)
class Choice:
    """Where `when` holds, the first of `shapes` whose shared memory the device has."""

    when: str
    shapes: tuple[Shape, ...]


def variants(arch: str) -> list[CxxVariant]:
    """The rows to build for `arch`; none where the kernel does not run."""
    ruled = (shape for choice in _CHOICES.get(arch, ()) for shape in choice.shapes)
    shapes = dict.fromkeys((*ruled, *_CANDIDATES.get(arch, ())))
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
            MEASURED if arch == "sm90" else PREDICTED,
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


# M <= 8. Whole K in a block for wide layers, which have blocks enough; else K over a cluster, which also
# divides what each multiprocessor has to copy of x. ONE keeps its registers down to 64: 32 warps hide each
# other's waiting.
ONE = Shape(8, 1, 2, 8, depth=2, min_blocks=2)
TWO = Shape(8, 2, 4, 2, depth=2, cluster=2, min_blocks=2)
TWO_DEEP = Shape(8, 1, 4, 4, depth=4, cluster=2)
FOUR = Shape(8, 2, 4, 2, depth=2, cluster=4, min_blocks=2)

# M <= 16: two tiles a warp, which halves what is read of x per mma.
M16_ONE = Shape(16, 2, 8, 2, depth=2)
M16_TWO = Shape(16, 2, 8, 2, depth=2, cluster=2)
M16_FOUR = Shape(16, 2, 8, 2, depth=2, cluster=4)
M16_EIGHT = Shape(16, 2, 8, 2, depth=2, cluster=8)

# More tokens: x of one slice of K fills the shared memory, so a block keeps it and takes several turns.
M32_TWO = Shape(32, 2, 8, 1, depth=2, cluster=2, persistent=True)
M32_FOUR = Shape(32, 2, 8, 1, depth=2, cluster=4, persistent=True)
M32_EIGHT = Shape(32, 2, 8, 1, depth=2, cluster=8)
M48_FOUR = Shape(48, 2, 8, 1, depth=2, cluster=4, persistent=True)
M64_FOUR = Shape(64, 2, 8, 1, depth=2, cluster=4, persistent=True)

_CHOICES = {
    "sm90": (
        Choice("M <= 8 and N >= 192 * multiprocessor_count", (ONE, TWO, FOUR)),
        Choice("M <= 8 and K >= 12288", (TWO_DEEP, FOUR)),
        Choice("M <= 8 and (K >= 8192 or N <= 3072)", (FOUR,)),
        Choice("M <= 8", (TWO, FOUR)),
        Choice("M <= 16 and K >= 12288", (M16_EIGHT,)),
    ),
    # No clusters: K that does not fit one block's shared memory is left to the tile kernel.
    "sm80": (Choice("M <= 8", (ONE,)),),
}

# Built so that `gristmill bench --every-entry` times them; one gets a rule where it is measured to be the
# fastest. The kernel's first version was slower than our tile kernel there: 34.5 us against 29.8 at M = 16,
# 76 against 43.5 at M = 64, K x N 4096x28672 (NVIDIA H200).
_CANDIDATES = {
    "sm90": (M16_ONE, M16_TWO, M16_FOUR, M32_TWO, M32_FOUR, M32_EIGHT, M48_FOUR, M64_FOUR),
    "sm80": (),
}

_GENERAL = {"sm90": (ONE, TWO, FOUR, M16_EIGHT), "sm80": (ONE,)}
