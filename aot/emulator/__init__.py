"""Executes RDNA3, RDNA3.5 and RDNA4 machine code in NumPy, and checks it while it runs.

    memory = DeviceMemory()
    x = memory.allocate(4096, name="x")
    kernel = Module(hsaco_bytes).kernel("my_kernel")
    report = launch(kernel, memory, grid=(1, 1, 1), block=(32, 1, 1), kernarg=struct.pack("<Q", x))

Nothing is guessed: an instruction without semantics here raises UnimplementedInstruction with its text and
address.
"""

from .errors import (
    AlignmentError,
    BarrierError,
    EmulatorError,
    InactiveLaneRead,
    LaunchError,
    LdsAccessError,
    LdsRace,
    MemoryAccessError,
    ReadOnlyWriteError,
    RegisterError,
    RunawayError,
    ScratchAccessError,
    UndecodableInstruction,
    UnimplementedInstruction,
    UninitialisedRead,
)
from .launch import LaunchReport, launch
from .memory import DeviceMemory
from .module import Kernel, Module

__all__ = [
    "AlignmentError",
    "BarrierError",
    "DeviceMemory",
    "EmulatorError",
    "InactiveLaneRead",
    "Kernel",
    "LaunchError",
    "LaunchReport",
    "LdsAccessError",
    "LdsRace",
    "MemoryAccessError",
    "Module",
    "ReadOnlyWriteError",
    "RegisterError",
    "RunawayError",
    "ScratchAccessError",
    "UndecodableInstruction",
    "UnimplementedInstruction",
    "UninitialisedRead",
    "launch",
]
