"""Small GGUF files written by the `gguf` package, with values that are known."""

from __future__ import annotations

from pathlib import Path

import numpy as np


def blocks_q4_1(q: np.ndarray, d: np.ndarray, m: np.ndarray) -> np.ndarray:
    """(N, K) values and (N, K/32) float16 scales and minimums -> (N, bytes) as Q4_1 stores them."""
    return _blocks(q, (d, m))


def blocks_q4_0(q: np.ndarray, d: np.ndarray) -> np.ndarray:
    """Like `blocks_q4_1`, without minimums."""
    return _blocks(q, (d,))


def _blocks(q: np.ndarray, header: tuple[np.ndarray, ...]) -> np.ndarray:
    N, K = q.shape
    rows = []
    for n in range(N):
        row = bytearray()
        for block in range(K // 32):
            values = q[n, 32 * block : 32 * block + 32]
            for field in header:
                row += np.float16(field[n, block]).tobytes()
            row += bytes(int(values[i]) | int(values[i + 16]) << 4 for i in range(16))
        rows.append(np.frombuffer(bytes(row), np.uint8))
    return np.stack(rows)


def write(path: Path, tensors: dict[str, tuple[np.ndarray, str]]) -> Path:
    """Write tensors, each raw bytes (..., N, bytes) with its ggml type's name, or a plain float32 array with "F32"."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    for name, (data, type_) in tensors.items():
        kind = gguf.GGMLQuantizationType[type_]
        writer.add_tensor(name, data, raw_dtype=None if type_ == "F32" else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
