"""Manifests that are nearly right: a valid document with a few parts changed, then at times a few bytes."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import sample_pack
from gristmill.device import nominal_device
from gristmill.errors import GristmillError
from gristmill.manifest import Manifest
from gristmill.packs import Pack
from gristmill.problem import Problem
from gristmill.select import select

SEEDS = tuple(
    sample_pack.dump(document)
    for document in (
        sample_pack.manifest(),
        sample_pack.manifest(
            arch="sm90",
            kind="cubin",
            entries=[sample_pack.entry(name="a"), sample_pack.entry(name="b", grid=["ceil_div(N, 8)", "M", "1"])],
            policy=[
                {"when": "M <= 8 and N % 16 == 0", "entries": ["a", "b"], "origin": "measured on a device"},
                {"when": "1", "entries": ["b"], "origin": "floor"},
            ],
        ),
    )
)

FORMULAS = (
    "M", "-M", "M - 1000000", "M // 0", "M % N", "0 - 1", "ceil_div(M, 0)", "max(M, N) * min(K, 3)", "not M", "M and",
    "M * " * 90 + "M", "(" * 150 + "M" + ")" * 150, "-" * 399 + "M", "lds_bytes * 2", "password", "__import__('os')",
    "M if N else K", "M ** 99", "9" * 300, "1_0", "M\n", "\\", "\ud800", "\u2160", "\uff2d", "M == N == K", "x" * 500,
)  # fmt: skip

VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 2**31, 2**63, -(2**63), 10**400, 1.5, -0.0, float("inf"), float("nan"), 1e308,
    "", "\0", "a" * 201, ".", "..", "../../../etc/passwd", "/etc/passwd", "objects/../../x", "\ud800", "\x1b[31m",
    "0" * 64, "F" * 64, "/" + "0" * 63, [], {}, [[]], [None] * 70, {"a": 1}, ["x", "pointer"], ["", "null"],
    "float16", "pointer", "int32", "hsaco", "gfx1151", *FORMULAS,
)  # fmt: skip

PROBLEMS = tuple(
    Problem("w4a16_gemm", M, N, K, 32, "float16", False, False, alignment)
    for M, N, K, alignment in ((1, 64, 128, 16), (2**31 - 1, 2**31 - 1, 2**31 - 1, 16), (17, 3, 31, 2))
)
DEVICES = tuple(nominal_device(arch) for arch in ("gfx1151", "sm90"))


def generate(rng: random.Random) -> bytes:
    """One input."""
    document = json.loads(rng.choice(SEEDS))
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        _change(document, rng)
    data = _deep(rng) if rng.random() < 0.001 else json.dumps(document).encode()
    if rng.random() < 0.3:
        data = change_bytes(data, rng)
    return data.decode("utf-8", "replace").encode("utf-16") if rng.random() < 0.01 else data


def check(data: bytes, folder: Path) -> bool:
    """Use `data` as the manifest of the pack in `folder`; True when it was taken.

    Whatever is wrong must show as a GristmillError; what is taken must survive a round, launch within what a device
    can do, and name objects in the pack alone.
    """
    try:
        manifest = Manifest.parse(data)
    except GristmillError as error:
        check_message(error)
        return False
    written = manifest.dump()
    assert Manifest.parse(written).dump() == written
    pack = Pack(folder, manifest)
    for entry in manifest.entries.values():
        try:
            assert pack.read_object(entry) == sample_pack.CODE
        except GristmillError:
            continue
    for problem in PROBLEMS:
        for device in DEVICES:
            try:
                chosen = select(problem, device, manifest)
            except GristmillError:
                continue
            assert all(0 <= extent <= 2**31 - 1 for extent in chosen.grid), chosen.grid
            assert 0 <= chosen.dynamic_shared_bytes <= device.lds_bytes_per_block, chosen.dynamic_shared_bytes
    return True


def check_message(error: GristmillError) -> None:
    """A message must be one that can be printed and read."""
    assert len(str(error).encode()) < 4000, "a message that nobody can read"


def change_bytes(data: bytes, rng: random.Random) -> bytes:
    """A few bytes set, taken out, doubled, or cut off."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 8))):
        at = rng.randrange(len(changed) + 1)
        length = rng.choice((1, 1, 2, 4, 8, 64))
        kind = rng.randrange(5)
        if kind == 0:
            changed[at : at + 1] = bytes([rng.randrange(256)])
        elif kind == 1:
            del changed[at : at + length]
        elif kind == 2:
            changed[at:at] = changed[at : at + length]
        elif kind == 3:
            changed[at : at + length] = rng.randbytes(length)
        elif rng.random() < 0.2:
            del changed[at:]
    return bytes(changed)


def _places(node: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Each container below `node` with each of its keys or indices."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, child in items:
        found.append((node, key))
        _places(child, found)
    return found


def _change(document: dict[str, Any], rng: random.Random) -> None:
    places = _places(document, [])
    if not places:
        return
    container, key = rng.choice(places)
    kind = rng.randrange(10)
    if kind < 5:
        container[key] = copy.deepcopy(rng.choice(VALUES))
    elif kind == 5:
        del container[key]
    elif kind == 6:
        container[key] = copy.deepcopy(rng.choice(places)[0])
    elif kind == 7 and isinstance(container, list):
        container.insert(key, copy.deepcopy(container[key]))
    elif kind == 8 and isinstance(container, dict):
        container[str(rng.choice(VALUES))[:300]] = copy.deepcopy(rng.choice(VALUES))
    elif isinstance(container[key], str):
        text = container[key]
        at = rng.randrange(len(text) + 1)
        container[key] = text[:at] + rng.choice((*FORMULAS, "/", "\0", "..", " ")) + text[at:]


def _deep(rng: random.Random) -> bytes:
    """A valid start, then brackets without end, or many of them closed again."""
    depth = rng.choice((50, 500, 950, 5000, 100_000))
    open_, close = rng.choice(((b"[", b"]"), (b'{"a":', b"}")))
    inner = open_ * depth + b"1" + close * (depth if rng.random() < 0.7 else 0)
    field = rng.choice((b"schema", b"entries", b"policy", b"arch", b"compilers"))
    return b'{"schema": 1, "entries": [], "policy": [], "' + field + b'": ' + inner + b"}"
