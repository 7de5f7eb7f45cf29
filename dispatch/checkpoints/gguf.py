"""GGUF files: linear layers in Q4_0 and Q4_1.

A block is 32 values of one row: Q4_0 is a float16 d and 16 bytes, w = d * (q - 8); Q4_1 is float16 d and m and 16
bytes, w = d * q + m. Byte i holds value i in its low half and value i + 16 in its high half.
Source: ggml-common.h of llama.cpp, and the GGUF specification.
"""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
from gristmill.checkpoints.affine import AffineWeight, LayerInfo
from gristmill.checkpoints.gguf_header import FOUR_BIT_TYPES, HeaderError, Tensor, read_header
from gristmill.errors import CheckpointError

BLOCK_VALUES = 32
# Bytes before the nibbles of a block: the scale, and for Q4_1 the minimum.
HEADER_BYTES = {"Q4_0": 2, "Q4_1": 4}


class GgufCheckpoint:
    """The 4-bit linear layers of one GGUF file, which is mapped, not read.

    Attributes
    ----------
    layers : LayerInfo of every two-dimensional tensor in Q4_0 or Q4_1, by name
    left_out : all two-dimensional tensors in types that are not 4-bit, by name, with the type
    not_read : all other tensors in 4-bit types, by name, with the reason: the experts of a mixture, stacked in three
        dimensions, or another 4-bit type

    Raises
    ------
    CheckpointError : the file is damaged or cut short
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._data = _map(self.path)
        try:
            self._tensors = read_header(self._data)
        except HeaderError as error:
            raise CheckpointError(f"{self.path}, {len(self._data)} bytes: {error}") from None
        self.layers: dict[str, LayerInfo] = {}
        self.left_out: dict[str, str] = {}
        self.not_read: dict[str, str] = {}
        for tensor in self._tensors.values():
            if len(tensor.shape) == 2 and tensor.type in HEADER_BYTES:
                self.layers[tensor.name] = self._info(tensor)
            elif tensor.type in FOUR_BIT_TYPES:
                self.not_read[tensor.name] = _why_not_read(tensor)
            elif len(tensor.shape) == 2:
                self.left_out[tensor.name] = tensor.type

    def load(self, name: str) -> AffineWeight:
        """Read one layer.

        Raises
        ------
        CheckpointError : no such tensor, one that is not among `layers`, or a scale that is not finite
        """
        if name not in self._tensors:
            raise CheckpointError(f"{self.path}: no tensor {name!r}")
        if name not in self.layers:
            raise CheckpointError(f"{name}: {_why_not_read(self._tensors[name])}")
        info, tensor = self.layers[name], self._tensors[name]
        data = np.frombuffer(self._data, np.uint8, tensor.bytes, tensor.offset)
        blocks = data.reshape(info.N, info.K // BLOCK_VALUES, -1)
        header_bytes = HEADER_BYTES[info.format]
        header = np.ascontiguousarray(blocks[:, :, :header_bytes]).view("<f2").astype(np.float64)
        if not np.isfinite(header).all():
            n, block, _ = (int(i) for i in np.argwhere(~np.isfinite(header))[0])
            raise CheckpointError(f"{name}: row {n}, block {block}: scale or minimum is not finite")
        nibbles = blocks[:, :, header_bytes:]
        q = np.concatenate((nibbles & 0xF, nibbles >> 4), axis=2).reshape(info.N, info.K)
        return AffineWeight(
            info=info,
            q=q,
            scales=header[:, :, 0],
            minimums=header[:, :, 1] if info.format == "Q4_1" else None,
        )

    def _info(self, tensor: Tensor) -> LayerInfo:
        K, N = tensor.shape
        if K % BLOCK_VALUES or K < 1 or N < 1:
            raise CheckpointError(
                f"{self.path}: {tensor.name}: shape {K} x {N} is not made of blocks of {BLOCK_VALUES}"
            )
        has_zero_points = tensor.type == "Q4_1"
        return LayerInfo(tensor.name, K, N, BLOCK_VALUES, has_zero_points=has_zero_points, format=tensor.type)


def _why_not_read(tensor: Tensor) -> str:
    if tensor.type in HEADER_BYTES:
        return f"{tensor.type} with {len(tensor.shape)} dimensions is not supported; with 2 it is"
    return f"type {tensor.type} is not supported; {' and '.join(HEADER_BYTES)} are"


def _map(path: Path) -> memoryview:
    """The content of a file, for reading; the mapping lives as long as what refers to it."""
    try:
        with open(path, "rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except ValueError:
        raise CheckpointError(f"{path}: not a GGUF file: it is empty") from None
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
