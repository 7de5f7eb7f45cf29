"""Triton sources, one file a kernel, and the rows of variants to build from them."""
