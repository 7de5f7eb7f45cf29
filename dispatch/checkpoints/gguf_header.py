"""The header of a GGUF file: which tensors it has, of what type and shape, and where.

It is read as what it is, bytes from anywhere: no length is believed before it was held against the file, nothing is
allocated by a length, and values of keys are passed over, not made into objects.
Source: the GGUF specification, and ggml-common.h of llama.cpp for the sizes of blocks.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

MAGIC = b"GGUF"
VERSIONS = (2, 3)
# Value types by their number in the file: bytes of a scalar; 8 is a string, 9 an array.
SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
UINT32, STRING, ARRAY = 4, 8, 9
MAX_DIMENSIONS = 4
# Far above what any model has, and low enough that what is kept of a header stays small.
MAX_TENSORS = 100_000
MAX_NAME_BYTES = 1024

# Tensor types by their number in the file: name, values of a block, bytes of a block.
TENSOR_TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36),
}  # fmt: skip

FOUR_BIT_TYPES = frozenset({"Q4_0", "Q4_1", "Q4_K", "IQ4_NL", "IQ4_XS", "MXFP4", "NVFP4"})

ALIGNMENT_KEY = b"general.alignment"
DEFAULT_ALIGNMENT = 32


class HeaderError(Exception):
    """What is wrong with a header; `GgufCheckpoint` says of which file."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a file."""

    name: str
    type: str  # "Q4_1", or "type 99" for one that is not known here
    shape: tuple[int, ...]  # innermost first, as in the file
    offset: int  # of its data in the file, in bytes
    bytes: int  # 0 for a type that is not known


def read_header(data: memoryview) -> dict[str, Tensor]:
    """The tensors of the file `data` by name; each of a known type lies within the file.

    Raises
    ------
    HeaderError : not a GGUF file, an unknown version, or a length that does not fit; the message says where
    """
    return _Walk(data).tensors()


class _Walk:
    def __init__(self, data: memoryview) -> None:
        self.data = data
        self.size = len(data)
        self.offset = 0

    def tensors(self) -> dict[str, Tensor]:
        if self.size < 24 or self.data[:4] != MAGIC:
            raise HeaderError(f"not a GGUF file: {self.size} bytes, starts with {bytes(self.data[:4])!r}")
        self.offset = 4
        version = self.integer(4, "version")
        if not version & 0xFFFF:
            raise HeaderError("big-endian GGUF files are not supported")
        if version not in VERSIONS:
            raise HeaderError(f"GGUF version {version} is not supported; {VERSIONS} are")
        count = self.integer(8, "tensor count")
        alignment = self.alignment(self.integer(8, "key count"))
        if count > MAX_TENSORS:
            raise HeaderError(f"damaged or cut short: {count} tensors, more than {MAX_TENSORS}")
        found: dict[str, Tensor] = {}
        for index in range(count):
            tensor = self.tensor(f"tensor {index}")
            if tensor.name in found:
                raise HeaderError(f"damaged: two tensors are called {tensor.name!r}")
            found[tensor.name] = tensor
        start = -(-self.offset // alignment) * alignment
        return {name: self.placed(tensor, start) for name, tensor in found.items()}

    def alignment(self, keys: int) -> int:
        """Pass over the keys; what they say of alignment."""
        alignment = DEFAULT_ALIGNMENT
        for index in range(keys):
            key = self.string(f"key {index}")
            type_ = self.integer(4, f"type of key {index}")
            start = self.offset
            self.value(type_, f"value of key {index}")
            if key == ALIGNMENT_KEY:
                alignment = struct.unpack_from("<I", self.data, start)[0] if type_ == UINT32 else 0
                if not alignment or alignment & (alignment - 1):
                    raise HeaderError("damaged: general.alignment is not a power of two of type uint32")
        return alignment

    def tensor(self, where: str) -> Tensor:
        """One tensor's entry, its offset still relative to where the data starts."""
        name = self.string(where)
        if len(name) > MAX_NAME_BYTES:
            raise HeaderError(f"damaged: the name of {where} has {len(name)} bytes, more than {MAX_NAME_BYTES}")
        dimensions = self.integer(4, where)
        if dimensions > MAX_DIMENSIONS:
            raise HeaderError(f"damaged: {where} has {dimensions} dimensions")
        shape = tuple(self.integer(8, where) for _ in range(dimensions))
        number = self.integer(4, where)
        offset = self.integer(8, where)
        type_, block_values, block_bytes = TENSOR_TYPES.get(number, (f"type {number}", 1, 0))
        values = 1
        for extent in shape:
            values *= extent
        try:
            text = str(name, "utf-8")
        except UnicodeDecodeError:
            raise HeaderError(f"damaged: the name of {where}, {bytes(name[:80])!r}, is not UTF-8") from None
        return Tensor(text, type_, shape, offset, -(-values // block_values) * block_bytes)

    def placed(self, tensor: Tensor, start: int) -> Tensor:
        offset = start + tensor.offset
        if tensor.bytes > self.size - offset:
            raise HeaderError(f"damaged or cut short: {tensor.name} needs {tensor.bytes} bytes at {offset}")
        return Tensor(tensor.name, tensor.type, tensor.shape, offset, tensor.bytes)

    def value(self, type_: int, where: str) -> None:
        if type_ in SCALAR_BYTES:
            self.skip(SCALAR_BYTES[type_], where)
        elif type_ == STRING:
            self.string(where)
        elif type_ == ARRAY:
            item = self.integer(4, where)
            count = self.integer(8, where)
            if item in SCALAR_BYTES:
                self.skip(SCALAR_BYTES[item] * count, where)
            elif item == STRING:
                for _ in range(count):
                    self.string(where)
            else:
                raise HeaderError(f"damaged: {where} is an array of type {item}")
        else:
            raise HeaderError(f"damaged: {where} has type {type_}")

    def string(self, where: str) -> memoryview:
        length = self.integer(8, where)
        start = self.offset
        self.skip(length, where)
        return self.data[start : start + length]

    def integer(self, width: int, where: str) -> int:
        start = self.offset
        self.skip(width, where)
        return struct.unpack_from("<I" if width == 4 else "<Q", self.data, start)[0]

    def skip(self, nbytes: int, where: str) -> None:
        if nbytes > self.size - self.offset:
            raise HeaderError(f"damaged or cut short: {where} needs {nbytes} bytes at {self.offset}")
        self.offset += nbytes
