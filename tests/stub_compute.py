"""Numbers from the stub libcuda.so.1: launches of `fake_driver`'s kernels are computed in numpy."""

from __future__ import annotations

import ctypes

import fake_driver

RUN = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.POINTER(ctypes.c_void_p))
SIZES = {"pointer": 8, "null": 8, "int32": 4, "int64": 8}


@RUN
def _run(symbol: bytes, parameters: ctypes._Pointer[ctypes.c_void_p]) -> None:
    values = [
        int.from_bytes(ctypes.string_at(parameters[i], SIZES[argument.type]), "little")
        for i, argument in enumerate(fake_driver.ARGUMENTS)
    ]
    fake_driver.compute(values, "bfloat16" if b"bfloat16" in symbol else "float16")


def attach() -> None:
    """Let the stub of this process compute its launches."""
    ctypes.CDLL("libcuda.so.1").stub_cuda_run_with(_run)


def detach() -> None:
    """Let launches be recorded only."""
    ctypes.CDLL("libcuda.so.1").stub_cuda_run_with(None)
