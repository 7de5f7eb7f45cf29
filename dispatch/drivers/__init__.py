"""Drivers behind one protocol: NVIDIA through cuda-python, AMD through hip-python."""
