"""A walk over a GGUF file's header that believes no length.

The `gguf` package loops as often as the header's counts say, past the end of the file too: a damaged count would keep
it busy for ever. This walk visits the same fields first and stops at the first that does not fit into the file.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

from gristmill.errors import CheckpointError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
# Value types by their number in the file: bytes of a scalar; 8 is a string, 9 an array.
SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
STRING, ARRAY = 8, 9
MAX_DIMENSIONS = 4


def check_header(path: Path) -> None:
    """Check that every length in the header fits into the file.

    Raises
    ------
    CheckpointError : not a GGUF file, an unknown version, or a length that does not fit; the message says where
    """
    try:
        size = path.stat().st_size
        if size < 24:
            raise CheckpointError(f"{path}: not a GGUF file: {size} bytes")
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            _Walk(path, data).header()
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None


class _Walk:
    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.offset = 0

    def header(self) -> None:
        if self.data[:4] != MAGIC:
            raise CheckpointError(f"{self.path}: not a GGUF file: starts with {self.data[:4]!r}")
        self.offset = 4
        version = self.integer(4, "version")
        if version not in VERSIONS:
            raise CheckpointError(f"{self.path}: GGUF version {version} is not supported; {VERSIONS} are")
        tensors = self.integer(8, "tensor count")
        pairs = self.integer(8, "key count")
        for index in range(pairs):
            self.string(f"key {index}")
            self.value(self.integer(4, f"type of key {index}"), f"value of key {index}")
        for index in range(tensors):
            where = f"tensor {index}"
            self.string(where)
            dimensions = self.integer(4, where)
            if dimensions > MAX_DIMENSIONS:
                raise self.damaged(f"{where} has {dimensions} dimensions")
            self.skip(8 * dimensions + 12, where)

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
                raise self.damaged(f"{where} is an array of type {item}")
        else:
            raise self.damaged(f"{where} has type {type_}")

    def string(self, where: str) -> None:
        self.skip(self.integer(8, where), where)

    def integer(self, width: int, where: str) -> int:
        start = self.offset
        self.skip(width, where)
        return struct.unpack_from("<I" if width == 4 else "<Q", self.data, start)[0]

    def skip(self, nbytes: int, where: str) -> None:
        if nbytes > self.size - self.offset:
            raise self.damaged(f"{where} needs {nbytes} bytes at {self.offset}")
        self.offset += nbytes

    def damaged(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: damaged or cut short, {self.size} bytes: {what}")
