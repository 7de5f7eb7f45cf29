"""Readers of checkpoint formats; each yields `QuantizedLinear` layers as the file defines them."""
