"""The stub HIP runtime with an emulated GPU behind it, for programs that run beside the stub.

`attach` registers two functions with the stub: one looks kernels up in a code object, the other runs
launches. What they are given is what the HIP runtime would be given; arguments are read as it reads them,
through the pointers of `kernelParams`, by the sizes in the code object's own metadata.
"""

from __future__ import annotations

import ctypes
import os
import traceback
from dataclasses import dataclass, field

import numpy as np
from gristmill.aot.amdgpu_code_object import CodeObjectError
from gristmill.aot.emulator import DeviceMemory, EmulatorError, Kernel, LaunchReport, Module, launch

SUCCESS, NO_BINARY_FOR_GPU, NOT_FOUND, LAUNCH_FAILURE = 0, 209, 500, 719
MAX_ALLOCATIONS = 4096


class Launch(ctypes.Structure):
    """`Launch` of stub_hip.c."""

    _fields_ = (
        ("image", ctypes.c_void_p), ("image_size", ctypes.c_size_t), ("symbol", ctypes.c_char_p),
        ("parameters", ctypes.POINTER(ctypes.c_void_p)), ("stream", ctypes.c_uint64),
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared_bytes", ctypes.c_uint),
        ("device", ctypes.c_int),
    )  # fmt: skip


FIND = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
RUN = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(Launch))


@dataclass(frozen=True)
class Run:
    """One launch that was run."""

    device: int
    stream: int
    shared_bytes: int
    report: LaunchReport


@dataclass
class Emulation:
    """What the stub runs launches with."""

    library: ctypes.CDLL
    runs: list[Run] = field(default_factory=list)
    faults: list[Exception] = field(default_factory=list)  # of kernels; the caller of the runtime sees a code
    _modules: dict[bytes, Module] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._callbacks = FIND(self.find), RUN(self.run)  # they must live as long as the stub may call them
        self.library.stub_hip_run_with(*self._callbacks)

    def find(self, image: int, image_size: int, symbol: bytes) -> int:
        """Whether the code object has the kernel, as a code of the runtime."""
        try:
            self.kernel(ctypes.string_at(image, image_size), symbol)
        except CodeObjectError:
            return NOT_FOUND
        except Exception:
            traceback.print_exc()
            return LAUNCH_FAILURE
        return SUCCESS

    def run(self, pointer: ctypes._Pointer[Launch]) -> int:
        """Run one launch to its end, and return a code of the runtime."""
        asked = pointer.contents
        try:
            kernel = self.kernel(ctypes.string_at(asked.image, asked.image_size), asked.symbol)
            if kernel.module.arch != os.environ["STUB_DEVICES"].split(",")[asked.device].partition(":")[0]:
                return NO_BINARY_FOR_GPU
            report = launch(
                kernel,
                self.memory(asked.device),
                grid=tuple(asked.grid),
                block=tuple(asked.block),
                dynamic_shared_bytes=asked.shared_bytes,
                kernarg=kernarg(kernel, asked.parameters),
            )
        except EmulatorError as error:
            self.faults.append(error)
            return LAUNCH_FAILURE
        except Exception:  # ctypes would swallow it
            traceback.print_exc()
            return LAUNCH_FAILURE
        self.runs.append(Run(asked.device, asked.stream, asked.shared_bytes, report))
        return SUCCESS

    def kernel(self, code: bytes, symbol: bytes) -> Kernel:
        if code not in self._modules:
            self._modules[code] = Module(code)
        return self._modules[code].kernel(symbol.decode())

    def memory(self, device: int) -> DeviceMemory:
        """The stub's memory of one device, at the addresses that the stub gave out."""
        addresses, sizes = (ctypes.c_void_p * MAX_ALLOCATIONS)(), (ctypes.c_size_t * MAX_ALLOCATIONS)()
        count = self.library.stub_hip_allocations(device, addresses, sizes, MAX_ALLOCATIONS)
        memory = DeviceMemory()
        for address, size in zip(addresses[:count], sizes[:count], strict=True):
            host = np.frombuffer((ctypes.c_ubyte * size).from_address(address), np.uint8)
            memory.map(host, address=address)
        return memory


def kernarg(kernel: Kernel, parameters: ctypes._Pointer[ctypes.c_void_p]) -> bytes:
    """The explicit arguments at their offsets, each read through its pointer."""
    arguments = kernel.info.explicit_args
    segment = bytearray(max((a.offset + a.size for a in arguments), default=0))
    for i, a in enumerate(arguments):
        segment[a.offset : a.offset + a.size] = ctypes.string_at(parameters[i], a.size)
    return bytes(segment)


def attach() -> Emulation:
    """Let the stub of this process run its launches."""
    return Emulation(ctypes.CDLL("libamdhip64.so"))
