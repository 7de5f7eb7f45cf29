"""Fuzzing of what reads files from anywhere: `python -m fuzz`, in `tests`."""
