"""What a driver offers. `cuda` and `hip` drive hardware; `gristmill.aot` adds `emulated`, whose memory is host memory.

A device is one `ordinal` of one driver. Sizes are in bytes, addresses and streams are integers; stream 0 is the
default stream. Every method leaves the thread's current device as it found it, checks each code that the driver
returns and raises DriverError, NoDriverError or NoDeviceError; all may be called from any thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from gristmill.device import DeviceFacts
from gristmill.named_tuple import NamedTuple

if TYPE_CHECKING:
    from gristmill.errors import DriverError
    from gristmill.launch import ArgumentBuffer

Dim3 = tuple[int, int, int]


class LaunchPointers(NamedTuple):
    """What a launch on one device takes from C."""

    launch: int  # address of cuLaunchKernel or hipModuleLaunchKernel
    get_current: int  # address of cuCtxGetCurrent or hipGetDevice
    is_capturing: int  # address of cuStreamIsCapturing or hipStreamIsCapturing
    current: int  # what get_current gives where the device is current
    error: Callable[[Any, Dim3, Dim3, int, int], DriverError]  # function, grid, block, shared bytes, code of the launch


class Driver(Protocol):
    """One way to load and launch code objects."""

    name: str  # as in the entry-point group and before the colon of "cuda:0"

    def unavailable_reason(self) -> str | None:
        """Why the driver cannot be used here, with the fix; None when it can."""
        ...

    def version(self) -> str:
        """The driver's own version, "13.0" for example; for people to read."""
        ...

    def device_count(self) -> int:
        """Number of devices; NoDriverError when there is no driver."""
        ...

    def device_facts(self, ordinal: int) -> DeviceFacts:
        """The device's own figures, read once; NoDeviceError when there is no such device."""
        ...

    def device_of(self, address: int) -> int:
        """Ordinal of the device that owns the memory at `address`."""
        ...

    def load_module(self, ordinal: int, code: bytes) -> Any:
        """Load a code object; the handle is for `function` and `unload_module` on the same device."""
        ...

    def unload_module(self, ordinal: int, module: Any) -> None: ...

    def function(self, ordinal: int, module: Any, symbol: str, max_dynamic_shared_bytes: int, early_start: bool) -> Any:
        """Look up a kernel and allow it as much dynamic shared memory as it will ever be launched with.

        `early_start`: it may begin while the kernel ahead of it still runs, where the driver can do that and nothing
        but x and out is shared between the two.
        """
        ...

    def launch(
        self,
        ordinal: int,
        function: Any,
        grid: Dim3,
        block: Dim3,
        shared_bytes: int,
        arguments: ArgumentBuffer,
        stream: int,
    ) -> None:
        """Put a launch on `stream` and return; `arguments` is free again when this returns."""
        ...

    def launch_pointers(self, ordinal: int) -> LaunchPointers | None:
        """What a launch from C needs; None where launches have to go through `launch`.

        With it, what `function` returns has the driver's own handle as the integer `handle`.
        """
        ...

    def is_capturing(self, ordinal: int, stream: int) -> bool:
        """Whether work on `stream` is being recorded into a graph."""
        ...

    def allocate(self, ordinal: int, size: int) -> int:
        """Address of `size` bytes of device memory, `size` at least 1."""
        ...

    def free(self, ordinal: int, address: int) -> None:
        """Give memory of `allocate` back, after all work on the device that may use it."""
        ...

    def copy_to_device(self, ordinal: int, destination: int, source: int, size: int) -> None:
        """Copy from the host address `source`; done when this returns, whichever stream reads next."""
        ...

    def copy_to_host(self, ordinal: int, destination: int, source: int, size: int) -> None:
        """Copy to the host address `destination`, after all work on the device; done when this returns."""
        ...

    def fill(self, ordinal: int, address: int, value: int, size: int) -> None:
        """Set each byte to `value`; done when this returns."""
        ...

    def synchronize(self, ordinal: int, stream: int | None = None) -> None:
        """Wait for `stream`, or for all work on the device."""
        ...

    def record_event(self, ordinal: int, stream: int) -> Any:
        """A mark in `stream`, for `elapsed_us`."""
        ...

    def elapsed_us(self, ordinal: int, start: Any, stop: Any) -> float:
        """Wait for `stop`, free both marks and return the time between them in us."""
        ...
