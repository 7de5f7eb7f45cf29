"""What the rows of both CUDA kernels share."""

from __future__ import annotations

# K % 32: weights are read 16 bytes, 32 values, at a time, and nothing needs to lie behind the last row. Alignment: of
# those pieces, and of the ones that x is read in.
CONDITIONS = ("K % 32 == 0", "alignment % 16 == 0")

MEASURED = "measured on NVIDIA H200"


def clusters_at_once(size: int, blocks: str = "multiprocessor_count") -> str:
    """Formula: how many clusters of `size` run at once on a device that can run `blocks`, a formula too.

    A cluster lies within one GPC, and GPCs do not all hold a multiple of four multiprocessors: an H200 holds 30
    clusters of four on its 132. 15/16 is the simplest factor that gives that: 132 * 15 // 64 == 30.
    """
    if size <= 2:
        return blocks if size == 1 else f"{blocks} // {size}"
    return f"{blocks} * 15 // {16 * size}"
