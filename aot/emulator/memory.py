"""The device's global memory: allocations at fake 48-bit addresses, with gaps between them that fault.

An allocation is a NumPy byte array, either our own or the caller's (`map`). Addresses are never those of the
host, so that a kernel which reads a stray pointer is caught instead of crashing the process.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

import numpy as np

from .errors import AlignmentError, MemoryAccessError, ReadOnlyWriteError

FIRST_ADDRESS = 0x7E00_0000_0000
ALIGNMENT = 256  # what hipMalloc promises at least
GUARD_BYTES = 1 << 16  # beyond any signed 13-bit or small 24-bit instruction offset, so that an overrun is seen
POISON_BYTE = 0xCD  # as fp16 -23.2, as fp32 -4.3e8, as int32 -842150451: wrong in any result

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}


@dataclass(frozen=True)
class Allocation:
    """A live range of addresses. `data` is a flat uint8 view of the memory behind it."""

    address: int
    data: np.ndarray
    name: str
    read_only: bool
    views: dict[int, np.ndarray]  # the same bytes as uint16 and uint32, where the host address allows

    @property
    def end(self) -> int:
        return self.address + self.data.size


class DeviceMemory:
    """Global memory of one device."""

    def __init__(self) -> None:
        self._next = FIRST_ADDRESS
        self._starts: list[int] = []
        self._allocations: list[Allocation] = []
        self._last: Allocation | None = None

    # -- host side ---------------------------------------------------------------------------------------

    def allocate(self, nbytes: int, name: str = "", read_only: bool = False) -> int:
        """Reserve `nbytes`, filled with poison, and return the address."""
        if nbytes < 0:
            raise ValueError(f"cannot allocate {nbytes} bytes")
        # Host memory aligned to 4 at least, so that the uint32 view exists.
        data = np.full((nbytes + 3) // 4 * 4, POISON_BYTE, np.uint8)[:nbytes]
        return self._add(data, name, read_only)

    def map(self, array: np.ndarray, name: str = "", read_only: bool = False, address: int | None = None) -> int:
        """Expose the caller's array without a copy: stores of a kernel are seen in it.

        The array must be C-contiguous. The device address has the low bits of the host's, so that an array
        which is misaligned on the host is so for the kernel. A caller who hands out addresses himself, as a
        stub of a driver does, gives the array's in `address`.
        """
        if not array.flags.c_contiguous:
            raise ValueError(f"map: {name or 'array'} must be C-contiguous, strides are {array.strides}")
        if not read_only and not array.flags.writeable:
            raise ValueError(f"map: {name or 'array'} is not writeable; pass read_only=True")
        return self._add(array.reshape(-1).view(np.uint8), name, read_only, address)

    def free(self, address: int) -> None:
        """End an allocation; later accesses to it fault."""
        index = bisect.bisect_left(self._starts, address)
        if index == len(self._starts) or self._starts[index] != address:
            raise ValueError(f"free: {address:#x} is not the start of a live allocation")
        del self._starts[index], self._allocations[index]
        self._last = None

    def write(self, address: int, data: bytes | bytearray | memoryview | np.ndarray) -> None:
        """Copy host bytes to the device. The host may write what kernels may only read."""
        raw = np.frombuffer(np.ascontiguousarray(data).tobytes() if isinstance(data, np.ndarray) else data, np.uint8)
        if raw.size:
            allocation = self._covering(address, raw.size, "host write")
            start = address - allocation.address
            allocation.data[start : start + raw.size] = raw

    def read(self, address: int, nbytes: int) -> bytes:
        """Copy device bytes to the host."""
        if nbytes == 0:
            return b""
        allocation = self._covering(address, nbytes, "host read")
        start = address - allocation.address
        return allocation.data[start : start + nbytes].tobytes()

    def allocations(self) -> list[Allocation]:
        """Live allocations, by address."""
        return list(self._allocations)

    def _add(self, data: np.ndarray, name: str, read_only: bool, address: int | None = None) -> int:
        # Host memory of our own is aligned to 4 at least, so this only moves mapped arrays.
        skew = data.ctypes.data % 4
        if address is None:
            address = self._next + skew
            self._next = -(-(address + data.size + GUARD_BYTES) // ALIGNMENT) * ALIGNMENT
        elif address % 4 != skew:
            raise ValueError(f"map: {address:#x} is not aligned to 4 bytes as the array is")
        index = bisect.bisect_right(self._starts, address)
        before, after = self._allocations[:index][-1:], self._allocations[index : index + 1]
        if any(a.end > address for a in before) or any(a.address < address + data.size for a in after):
            raise ValueError(f"map: {data.size} bytes at {address:#x} overlap another allocation")
        views = {1: data}
        for size in (2, 4):
            # Units begin at addresses that are multiples of the unit: at the first one inside the array.
            views[size] = _aligned_view(data, -skew % size, size)
        self._starts.insert(index, address)
        name = name or f"allocation {len(self._starts)}"
        self._allocations.insert(index, Allocation(address, data, name, read_only, views))
        return address

    # -- device side -------------------------------------------------------------------------------------

    def load_scalar(self, address: int, dwords: int) -> np.ndarray:
        """Dwords of one scalar load. The hardware drops the two lowest address bits; a kernel that needs that
        is wrong."""
        if address & 3:
            raise AlignmentError(f"scalar load of {dwords} dwords at {address:#x}, which is not a multiple of 4")
        allocation = self._covering(address, 4 * dwords, f"scalar load of {4 * dwords} bytes")
        start = address - allocation.address
        return allocation.data[start : start + 4 * dwords].view(np.uint32)

    def load(self, addresses: np.ndarray, unit: int, count: int) -> np.ndarray:
        """Gather `count` units of `unit` bytes (1, 2 or 4) from each address; uint32 array [count,
        len(addresses)]."""
        out = np.empty((count, addresses.size), np.uint32)
        for allocation, which in self._split(addresses, unit * count, "load"):
            self._check_alignment(addresses[which], unit, "load")
            view, index = self._units(allocation, addresses[which], unit)
            for i in range(count):
                out[i, which] = view[index + i]
        return out

    def store(self, addresses: np.ndarray, values: np.ndarray, unit: int) -> None:
        """Scatter values [count, len(addresses)] of `unit` bytes each; a later lane wins where two write one
        address."""
        for allocation, which in self._split(addresses, unit * len(values), "store"):
            if allocation.read_only:
                lane = int(np.arange(addresses.size)[which][0])
                raise _at_lane(
                    ReadOnlyWriteError(
                        f"store to {int(addresses[lane]):#x} in {allocation.name!r}, which is read-only"
                    ),
                    lane,
                )
            self._check_alignment(addresses[which], unit, "store")
            view, index = self._units(allocation, addresses[which], unit)
            for i, row in enumerate(values):
                view[index + i] = row[which].astype(view.dtype, copy=False)

    @staticmethod
    def _units(allocation: Allocation, addresses: np.ndarray, unit: int) -> tuple[np.ndarray, np.ndarray]:
        """The allocation as an array of units, and the index of each address in it."""
        shift = np.uint64({1: 0, 2: 1, 4: 2}[unit])
        first = np.uint64(-(-allocation.address // unit) * unit)
        return allocation.views[unit], ((addresses - first) >> shift).view(np.int64)

    @staticmethod
    def _check_alignment(addresses: np.ndarray, unit: int, what: str) -> None:
        if unit > 1:
            bad = (addresses & np.uint64(unit - 1)) != 0
            if bad.any():
                lane = int(bad.argmax())
                raise _at_lane(
                    AlignmentError(
                        f"{what} of {unit}-byte units at {int(addresses[lane]):#x}, not a multiple of {unit}"
                    ),
                    lane,
                )

    def _split(self, addresses: np.ndarray, nbytes: int, what: str) -> list[tuple[Allocation, slice | np.ndarray]]:
        """Allocations that the accesses fall in, each with the accesses that do. Almost always one."""
        low, high = int(addresses.min()), int(addresses.max())
        last = self._last
        if last is not None and last.address <= low and high + nbytes <= last.end:
            return [(last, slice(None))]
        first = self._find(low)
        if first is not None and high + nbytes <= first.end:
            self._last = first
            return [(first, slice(None))]
        index = np.searchsorted(np.array(self._starts, np.uint64), addresses, side="right") - 1
        parts = []
        for i in np.unique(index):
            which = index == i
            allocation = self._allocations[i] if i >= 0 else None
            top = int(addresses[which].max())
            if allocation is None or top + nbytes > allocation.end:
                lane = int(np.flatnonzero(which)[addresses[which].argmax()])
                raise _at_lane(self._fault(top, nbytes, what), lane)
            parts.append((allocation, which))
        return parts

    def _find(self, address: int) -> Allocation | None:
        index = bisect.bisect_right(self._starts, address) - 1
        return self._allocations[index] if index >= 0 else None

    def _covering(self, address: int, nbytes: int, what: str) -> Allocation:
        allocation = self._find(address)
        if allocation is None or address + nbytes > allocation.end:
            raise self._fault(address, nbytes, what)
        return allocation

    def _fault(self, address: int, nbytes: int, what: str) -> MemoryAccessError:
        """The error for an access that no allocation covers, naming the nearest ones."""
        index = bisect.bisect_right(self._starts, address) - 1
        near = []
        if index >= 0:
            below = self._allocations[index]
            inside = address - below.address
            near.append(f"{below.name!r} has {below.data.size} bytes and this is at byte {inside} of it")
        if index + 1 < len(self._allocations):
            above = self._allocations[index + 1]
            near.append(f"{above.name!r} begins {above.address - address} bytes later")
        if not near:
            near.append("nothing is allocated")
        return MemoryAccessError(
            f"{what} of {nbytes} bytes at {address:#x} is outside every allocation: {'; '.join(near)}"
        )


def _aligned_view(data: np.ndarray, first: int, size: int) -> np.ndarray:
    return data[first : first + (data.size - first) // size * size].view(_UNSIGNED[size])


def _at_lane(error: MemoryAccessError | AlignmentError, position: int) -> MemoryAccessError | AlignmentError:
    """Remember which of the accesses failed; the caller, who knows the lanes, turns it into a lane number."""
    error.position = position  # type: ignore[union-attr]
    return error
