"""GGUF files that are nearly right: valid ones with integers of the header, or any bytes, changed."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import numpy as np
from gristmill.checkpoints.gguf import GgufCheckpoint
from gristmill.errors import GristmillError

from fuzz.manifests import change_bytes, check_message

INTEGERS = (
    0, 1, 2, 3, 4, 8, 9, 12, 13, 16, 31, 32, 33, 64, 255, 256, 65535, 2**24, 2**31 - 1, 2**31, 2**32 - 32, 2**32 - 1,
    2**32, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 32, 2**64 - 1,
)  # fmt: skip


class Writer:
    """Writes a file as the specification says, and remembers where its integers are."""

    def __init__(self) -> None:
        self.data = bytearray(b"GGUF")
        self.integers: list[tuple[int, int]] = []  # (offset, bytes)

    def integer(self, value: int, width: int) -> None:
        self.integers.append((len(self.data), width))
        self.data += value.to_bytes(width, "little")

    def string(self, text: bytes) -> None:
        self.integer(len(text), 8)
        self.data += text

    def key(self, name: bytes, type_: int) -> None:
        self.string(name)
        self.integer(type_, 4)

    def array(self, name: bytes, type_: int, count: int) -> None:
        self.key(name, 9)
        self.integer(type_, 4)
        self.integer(count, 8)

    def tensor(self, name: bytes, type_: int, shape: tuple[int, ...], offset: int) -> None:
        self.string(name)
        self.integer(len(shape), 4)
        for extent in shape:
            self.integer(extent, 8)
        self.integer(type_, 4)
        self.integer(offset, 8)


def valid_file(keys: bool, tensors: bool) -> Writer:
    """A file with or without keys of each kind, and tensors of four types."""
    writer = Writer()
    writer.integer(3, 4)
    writer.integer(4 if tensors else 0, 8)
    writer.integer(5 if keys else 0, 8)
    if keys:
        writer.key(b"general.alignment", 4)
        writer.integer(64, 4)
        writer.key(b"general.name", 8)
        writer.string(b"a model")
        writer.array(b"tokens", 8, 3)
        for token in (b"one", b"", b"three"):
            writer.string(token)
        writer.array(b"scores", 6, 4)
        writer.data += struct.pack("<4f", 1, 2, 3, 4)
        writer.key(b"flag", 7)
        writer.data += b"\1"
    if tensors:
        writer.tensor(b"q4_1", 3, (64, 3), 0)
        writer.tensor(b"q4_0", 2, (32, 2), 128)
        writer.tensor(b"norm", 0, (4,), 192)
        writer.tensor(b"q8_0", 8, (32, 2), 256)
    alignment = 64 if keys else 32
    writer.data += bytes(-len(writer.data) % alignment)
    blocks = [struct.pack("<2e", 0.5, -1.5) + bytes(range(16, 32)) for _ in range(6)]
    writer.data += b"".join(blocks).ljust(128, b"\0")
    writer.data += (2 * (struct.pack("<e", 0.25) + bytes(range(16)))).ljust(64, b"\0")
    writer.data += struct.pack("<4f", 1, 2, 3, 4).ljust(64, b"\0") + bytes(68)
    return writer


SEEDS = tuple(valid_file(keys, tensors) for keys, tensors in ((True, True), (False, True), (True, False)))


def generate(rng: random.Random) -> bytes:
    """One input."""
    seed = rng.choice(SEEDS)
    data = bytearray(seed.data)
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        at, width = rng.choice(seed.integers)
        old = int.from_bytes(data[at : at + width], "little")
        new = rng.choice((rng.choice(INTEGERS), old + 1, old - 1, 2 * old, len(data) - at, rng.getrandbits(8 * width)))
        data[at : at + width] = (new % (1 << 8 * width)).to_bytes(width, "little")
    return change_bytes(bytes(data), rng) if rng.random() < 0.4 else bytes(data)


def check(data: bytes, folder: Path) -> bool:
    """Read `data` as a file in `folder`; True when it was taken, and then each layer must load and be finite."""
    path = folder / "model.gguf"
    path.write_bytes(data)
    try:
        checkpoint = GgufCheckpoint(path)
    except GristmillError as error:
        check_message(error)
        return False
    for name, info in checkpoint.layers.items():
        try:
            weight = checkpoint.load(name)
        except GristmillError:
            continue
        assert 2 * len(data) >= info.K * info.N, "more values than the file can hold"
        assert np.isfinite(weight.dense()).all()
    return True
