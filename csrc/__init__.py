"""Kernels in C++: `hip` for AMD, `cuda` for NVIDIA; the rows of variants stand beside them."""
