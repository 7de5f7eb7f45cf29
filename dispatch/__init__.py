"""Gristmill: W4A16 GEMM kernels, ground ahead of time."""

__version__ = "0.1.0"
