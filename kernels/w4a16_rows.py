"""What the rows of all W4A16 kernels share, in C++ and in Triton: kinds, names of entries, arguments."""

from __future__ import annotations

OP = "w4a16_gemm"

DTYPE_SUFFIX = {"float16": "fp16", "bfloat16": "bf16"}  # in the names of entries; Triton calls them so too

# What each shape of work is built for, as (dtype, zero_points).
KINDS = tuple((dtype, zero_points) for dtype in DTYPE_SUFFIX for zero_points in (False, True))


def entry_name(kernel: str, dtype: str, zero_points: bool, suffix: str) -> str:
    return f"{kernel}_{DTYPE_SUFFIX[dtype]}{'_z' if zero_points else ''}_{suffix}"


def arguments(zero_points: bool) -> tuple[tuple[str, str], ...]:
    """(name, type) of each run-time argument, in the order that every kernel takes them."""
    pointers = ("x", "qweight", "scales", *(("zero_points",) if zero_points else ()), "bias", "out")
    strides = ("x_row_stride", "qweight_row_stride", "scales_row_stride", "out_row_stride")
    return (
        *((name, "pointer") for name in pointers),
        *((name, "int32") for name in ("M", "N", "K", "group_size")),
        *((name, "int64") for name in strides),
    )
