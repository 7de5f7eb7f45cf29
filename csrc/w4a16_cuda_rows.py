"""What the rows of both CUDA kernels share."""

from __future__ import annotations

# K % 32: weights are read 16 bytes, 32 values, at a time, and nothing needs to lie behind the last row. Alignment: of
# those pieces, and of the ones that x is read in.
CONDITIONS = ("K % 32 == 0", "alignment % 16 == 0")

MEASURED = "measured on NVIDIA H200"
