"""Arguments of a launch, laid out as the manifest's entry says."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping

from gristmill.errors import ArgumentError
from gristmill.manifest import Argument, Entry

INT32_MAX = 2**31 - 1

# A null pointer that the compiler added, by the manifest's type name.
_NULL = "null"


class ArgumentBuffer:
    """The argument array of one launch: a `void *[]` at `address`, each pointing at a slot of `values`.

    A slot has 8 bytes whatever the argument's type: the driver reads as many as the kernel declares, and the hosts
    that we run on are little-endian. A driver copies the arguments during the call, so a buffer may be filled again as
    soon as `Driver.launch` returns; two threads must not share one.
    """

    __slots__ = ("_pointers", "address", "types", "values")

    def __init__(self, arguments: tuple[Argument, ...], spare_slots: int = 0) -> None:
        slots = len(arguments) + spare_slots
        self.types = tuple(argument.type for argument in arguments)
        self.values = (ctypes.c_uint64 * slots)()
        start = ctypes.addressof(self.values)
        self._pointers = (ctypes.c_void_p * slots)(*(start + 8 * i for i in range(slots)))
        self.address = ctypes.addressof(self._pointers)

    def packed(self) -> bytes:
        """The arguments as one block with natural alignment: the kernarg segment of an AMD kernel."""
        data = b""
        for type_, value in zip(self.types, self.values, strict=False):
            if type_ == "int32":
                data += struct.pack("<I", value & 0xFFFFFFFF)
            else:
                data += bytes(-len(data) % 8) + struct.pack("<Q", value)
        return data


def fill(buffer: ArgumentBuffer, entry: Entry, values: Mapping[str, int]) -> ArgumentBuffer:
    """Write `values`, looked up by the names of the entry's arguments, into `buffer`; returns it.

    Raises
    ------
    ArgumentError : a value does not fit the type that the kernel takes
    """
    for position, argument in enumerate(entry.arguments):
        value = 0 if argument.type == _NULL else values[argument.name]
        if argument.type == "int32":
            check_int32(argument.name, value, entry)
        buffer.values[position] = value
    return buffer


def check_int32(name: str, value: int, entry: Entry) -> None:
    """ArgumentError unless `value` fits a signed 32-bit argument of `entry`."""
    if not -INT32_MAX - 1 <= value <= INT32_MAX:
        raise ArgumentError(f"{name} must be below 2**31 for kernel {entry.name}, got {value}")
