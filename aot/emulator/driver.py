"""The `emulated` driver: devices that are not there, with host memory, whose launches run in the emulator.

It stands behind the same protocol as the drivers of real devices, so that selection, loading, argument layout and
launch are the very code that runs on hardware. Launches are done when they return; streams and events have no meaning
beyond that. What the emulator finds wrong comes out as its own error, with kernel, address and instruction.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from gristmill.aot.emulator import DeviceMemory, Kernel, LaunchReport, Module, launch
from gristmill.aot.emulator.launch import DEFAULT_BUDGET
from gristmill.device import DeviceFacts, nominal_device
from gristmill.drivers.protocol import Dim3
from gristmill.errors import DriverError, NoDeviceError
from gristmill.launch import ArgumentBuffer

ARCHS = ("gfx1151", "gfx1201")

# The order in which the waves of a block run between two barriers; see gristmill.aot.emulator.launch.
DEFAULT_SCHEDULE = "lockstep"


class EmulatedDriver:
    """See `gristmill.drivers.protocol.Driver`; one device for each arch that the emulator knows."""

    name = "emulated"

    def __init__(self) -> None:
        self.schedule = DEFAULT_SCHEDULE
        self.budget = DEFAULT_BUDGET  # wave-instructions of one launch
        self.last_report: LaunchReport | None = None
        self._memories = [DeviceMemory() for _ in ARCHS]
        self._lock = threading.RLock()

    @contextmanager
    def launching(self, schedule: str, budget: int) -> Iterator[None]:
        """Within, launches take this order of waves and this budget; afterwards those of before."""
        before = self.schedule, self.budget
        self.schedule, self.budget = schedule, budget
        try:
            yield
        finally:
            self.schedule, self.budget = before

    def unavailable_reason(self) -> str | None:
        return None

    def version(self) -> str:
        return "of this gristmill"

    def device_count(self) -> int:
        return len(ARCHS)

    def device_facts(self, ordinal: int) -> DeviceFacts:
        if not 0 <= ordinal < len(ARCHS):
            raise NoDeviceError(f"emulated:{ordinal} is not there; devices: {', '.join(ARCHS)}")
        return nominal_device(ARCHS[ordinal])._replace(name=f"emulated {ARCHS[ordinal]}")

    def device_of(self, address: int) -> int:
        for ordinal, memory in enumerate(self._memories):
            if any(a.address <= address < a.address + a.data.size for a in memory.allocations()):
                return ordinal
        raise DriverError(f"emulated: no allocation holds address {address:#x}")

    def load_module(self, ordinal: int, code: bytes) -> Module:
        module = Module(code)
        arch = self.device_facts(ordinal).arch
        if module.arch != arch:
            raise DriverError(f"emulated: load_module: the code object is for {module.arch}, the device is {arch}")
        return module

    def unload_module(self, ordinal: int, module: Module) -> None:
        pass

    def function(
        self, ordinal: int, module: Module, symbol: str, max_dynamic_shared_bytes: int, early_start: bool
    ) -> Kernel:
        return module.kernel(symbol)

    def launch(
        self,
        ordinal: int,
        function: Kernel,
        grid: Dim3,
        block: Dim3,
        shared_bytes: int,
        arguments: ArgumentBuffer,
        stream: int,
    ) -> None:
        with self._lock:
            self.last_report = launch(
                function,
                self._memories[ordinal],
                grid=grid,
                block=block,
                dynamic_shared_bytes=shared_bytes,
                kernarg=arguments.packed(),
                schedule=self.schedule,
                budget=self.budget,
            )

    def launch_pointers(self, ordinal: int) -> None:
        return None

    def is_capturing(self, ordinal: int, stream: int) -> bool:
        return False

    def allocate(self, ordinal: int, size: int) -> int:
        self.device_facts(ordinal)
        with self._lock:
            return self._memories[ordinal].allocate(size)

    def free(self, ordinal: int, address: int) -> None:
        with self._lock:
            self._memories[ordinal].free(address)

    def copy_to_device(self, ordinal: int, destination: int, source: int, size: int) -> None:
        self._memories[ordinal].write(destination, ctypes.string_at(source, size))

    def copy_to_host(self, ordinal: int, destination: int, source: int, size: int) -> None:
        ctypes.memmove(destination, self._memories[ordinal].read(source, size), size)

    def fill(self, ordinal: int, address: int, value: int, size: int) -> None:
        self._memories[ordinal].write(address, np.full(size, value, np.uint8))

    def synchronize(self, ordinal: int, stream: int | None = None) -> None:
        pass

    def record_event(self, ordinal: int, stream: int) -> float:
        return time.perf_counter()

    def elapsed_us(self, ordinal: int, start: float, stop: float) -> float:
        """Time that the emulation took; it says nothing about hardware."""
        return (stop - start) * 1e6


def driver() -> EmulatedDriver:
    """The driver that `gristmill.drivers.get_driver("emulated")` returns."""
    return EmulatedDriver()
