"""Certificates of coverage: which entry each layer of a model takes for each M, from which packs, verified on what.

A certificate is plain data, the same each time for the same model and packs. It holds all that it was made from but
the packs, so that `check` can make it anew later, without the model, and compare.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gristmill.checkpoints.affine import LayerInfo
from gristmill.cover import LayerClass, contiguous_alignment, cover_layer
from gristmill.device import NOMINAL_DEVICES, nominal_device
from gristmill.errors import CertificateError
from gristmill.launch import INT32_MAX
from gristmill.packs import Pack, find_pack
from gristmill.problem import DTYPES

FORMAT = 1

# The least that the address of 16-bit activations can be aligned to: a slice may start anywhere.
LEAST_ALIGNMENT = 2


@dataclass(frozen=True)
class Question:
    """What is to be covered."""

    model: str  # name of the file
    layers: Mapping[str, LayerInfo]
    left_out: Mapping[str, str]  # tensors that are not in 4 bits, with their type
    not_read: Mapping[str, str]  # tensors in 4 bits that the reader does not take, with the reason
    archs: Sequence[str]
    m: range
    dtypes: Sequence[str]


def certify(question: Question, progress: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """The certificate for `question`, from the packs that are found now.

    Raises
    ------
    NoPackError, PackError : a pack is missing, or not whole: all code objects that the certificate names are read
    """
    # In the order of their names, which is the order that the file has them in: a certificate is the same for both.
    classes = Counter(LayerClass.of(layer) for _, layer in sorted(question.layers.items()))
    archs = []
    for arch in question.archs:
        progress(f"{arch}: {len(question.layers)} layers, {len(classes)} shapes, M {span_text(question.m)}")
        archs.append(_certify_arch(arch, classes, question))
    runs = [run for arch in archs for shape in arch["shapes"] for run in shape["runs"]]
    return {
        "certificate": FORMAT,
        "model": question.model,
        "layers": {name: asdict(layer) for name, layer in question.layers.items()},
        "left_out": dict(question.left_out),
        "not_read": dict(question.not_read),
        "m": [question.m.start, question.m.stop - 1],
        "dtypes": list(question.dtypes),
        "covered": not question.not_read and bool(runs) and all(run["entry"] is not None for run in runs),
        "verified": bool(runs) and all(row["verified"] for arch in archs for row in arch["entries"].values()),
        "archs": archs,
    }


def _certify_arch(arch: str, classes: Mapping[LayerClass, int], question: Question) -> dict[str, Any]:
    device = nominal_device(arch)
    pack = find_pack(arch)
    shapes = []
    for layer, count in classes.items():
        for dtype in question.dtypes:
            for alignment, ms in _rows_by_alignment(layer, question.m).items():
                runs = cover_layer(layer, ms, dtype, alignment, device, pack.manifest)
                shapes.append(
                    {
                        **asdict(layer),
                        "layers": count,
                        "dtype": dtype,
                        "alignment": alignment,
                        "runs": [asdict(run) for run in runs],
                    }
                )
    names = {run["entry"] for shape in shapes for run in shape["runs"] if run["entry"] is not None}
    return {
        "arch": arch,
        "pack": pack.manifest.arch,
        "pack_version": pack.manifest.version,
        "manifest_sha256": hashlib.sha256(pack.manifest.dump()).hexdigest(),
        "entries": _entries(pack, sorted(names)),
        "shapes": shapes,
    }


def _rows_by_alignment(layer: LayerClass, m: range) -> dict[int, list[int]]:
    """Each M at the alignment of contiguous arrays and at the least; the greatest alignment comes first."""
    rows: dict[int, list[int]] = {LEAST_ALIGNMENT: list(m)}
    for M in m:
        alignment = contiguous_alignment(M, layer.K, layer.N)
        if alignment != LEAST_ALIGNMENT:
            rows.setdefault(alignment, []).append(M)
    return dict(sorted(rows.items(), reverse=True))


def _entries(pack: Pack, names: Sequence[str]) -> dict[str, Any]:
    """The object of each entry, which is read to see that it is whole, and on what the entry was verified."""
    records = pack.verified()
    rows = {}
    for name in names:
        entry = pack.manifest.entries[name]
        pack.read_object(entry)
        rows[name] = {
            "object_sha256": entry.object,
            "verified": asdict(records[name]) if name in records else None,
        }
    return rows


def dump(certificate: Mapping[str, Any]) -> bytes:
    """The certificate as canonical JSON."""
    return (json.dumps(certificate, indent=1, sort_keys=True) + "\n").encode()


def question_of(path: Path) -> tuple[Question, dict[str, Any]]:
    """What the certificate in the file `path` was made for, and the certificate; CertificateError if it is none."""
    try:
        certificate = json.loads(path.read_bytes())
        first, last = certificate["m"]
        question = Question(
            model=certificate["model"],
            layers={name: _layer(**layer) for name, layer in certificate["layers"].items()},
            left_out=dict(certificate["left_out"]),
            not_read=dict(certificate["not_read"]),
            archs=[arch["arch"] for arch in certificate["archs"]],
            m=range(first, last + 1),
            dtypes=list(certificate["dtypes"]),
        )
        known = certificate["certificate"] == FORMAT and {*question.archs} <= {*NOMINAL_DEVICES}
        if not known or not {*question.dtypes} <= {*DTYPES} or not 0 < first <= last <= INT32_MAX:
            raise ValueError("format, arch, dtype or M is unknown")
    except OSError as error:
        raise CertificateError(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CertificateError(f"{path}: not a certificate ({type(error).__name__}: {error})") from None
    return question, certificate


def _layer(*, name: str, K: int, N: int, group_size: int, has_zero_points: bool, format: str) -> LayerInfo:
    """A layer of a certificate, which may hold anything: a field of another type would fail far from here."""
    if any(type(extent) is not int or not 0 < extent <= INT32_MAX for extent in (K, N, group_size)):
        raise ValueError(f"a layer has K={K!r} N={N!r} group_size={group_size!r}")
    if type(has_zero_points) is not bool or type(name) is not str or type(format) is not str:
        raise ValueError(f"a layer has name={name!r} has_zero_points={has_zero_points!r} format={format!r}")
    return LayerInfo(name, K, N, group_size, has_zero_points, format)


def differences(then: Any, now: Any, where: str = "") -> list[str]:
    """Where two certificates differ, one line a place."""
    if isinstance(then, dict) and isinstance(now, dict):
        lines = []
        for key in dict.fromkeys((*then, *now)):
            lines += differences(then.get(key), now.get(key), f"{where}.{key}" if where else str(key))
        return lines
    if isinstance(then, list) and isinstance(now, list) and len(then) == len(now):
        return [
            line for i, (a, b) in enumerate(zip(then, now, strict=True)) for line in differences(a, b, f"{where}[{i}]")
        ]
    return [] if then == now else [f"{where}: certified {_short(then)}, now {_short(now)}"]


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


def span_text(ms: range) -> str:
    """ "1..512", or "7" for a range of one."""
    return str(ms.start) if len(ms) == 1 else f"{ms.start}..{ms.stop - 1}"
