"""A small pack made by hand, for tests of everything that reads packs; its objects are no code."""

from __future__ import annotations

import copy
import hashlib
import json
from pathlib import Path

CODE = b"not machine code, but hashed all the same"

ENTRY = {
    "name": "gemm_float16_64x64x32",
    "op": "w4a16_gemm",
    "symbol": "w4a16_gemm_kernel",
    "object": hashlib.sha256(CODE).hexdigest(),
    "source": "kernels/w4a16_gemm.py",
    "arguments": [
        ["x", "pointer"],
        ["qweight", "pointer"],
        ["scales", "pointer"],
        ["bias", "pointer"],
        ["out", "pointer"],
        ["M", "int32"],
        ["N", "int32"],
        ["K", "int32"],
        ["group_size", "int32"],
        ["x_row_stride", "int64"],
        ["global_scratch", "null"],
    ],
    "grid": ["ceil_div(M, 64) * ceil_div(N, 64)", "1", "1"],
    "block": [128, 1, 1],
    "static_shared_bytes": 0,
    "dynamic_shared_bytes": "2 * 64 * K",
    "needs": {
        "dtype": "float16",
        "zero_points": False,
        "conditions": ["group_size % 32 == 0 or group_size >= K", "alignment % 16 == 0"],
    },
    "roundings": 1,
    "weights_in_dtype": False,
    "early_start": False,
    "resources": {"registers": 64, "spills": 0},
}

MANIFEST = {
    "schema": 1,
    "arch": "gfx1151",
    "kind": "hsaco",
    "version": "0.1.0",
    "compilers": {"triton": "3.9.0"},
    "source_digest": "0" * 64,
    "entries": [ENTRY],
    "policy": [{"when": "M >= 1", "entries": ["gemm_float16_64x64x32"], "origin": "table for gfx1151, not measured"}],
}


def manifest(**changes) -> dict:
    """A copy of the manifest with top-level fields replaced."""
    return {**copy.deepcopy(MANIFEST), **changes}


def entry(**changes) -> dict:
    """A copy of the entry with fields replaced."""
    return {**copy.deepcopy(ENTRY), **changes}


def dump(document: object) -> bytes:
    """The document as manifest bytes."""
    return json.dumps(document).encode()


def write_pack(root: Path, document: dict | None = None, code: bytes = CODE) -> Path:
    """Write a pack below `root` and return its folder."""
    document = manifest() if document is None else document
    folder = root / document["arch"]
    (folder / "objects").mkdir(parents=True)
    (folder / "manifest.json").write_bytes(dump(document))
    suffix = document["kind"]
    (folder / "objects" / f"{ENTRY['object']}.{suffix}").write_bytes(code)
    return folder
