"""`gristmill cover`: every layer of a model, for each M and arch, resolves to a shipped entry, or which do not."""

from __future__ import annotations

import argparse
import hashlib
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from gristmill.checkpoints.gguf import GgufCheckpoint
from gristmill.cli import print_json, progress
from gristmill.commands.options import arch_list, dtype_list, m_range
from gristmill.cover import LayerClass, contiguous_alignment, cover_layer
from gristmill.device import nominal_device
from gristmill.packs import find_pack, installed_archs
from gristmill.problem import DTYPES

HELP = "prove that every layer of a model resolves to a shipped kernel; needs no GPU"

# The least that the address of 16-bit activations can be aligned to: a slice may start anywhere.
LEAST_ALIGNMENT = 2


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, help="a GGUF file")
    parser.add_argument("--arch", type=arch_list, help="archs, separated by commas; default: every pack found")
    parser.add_argument("--m", type=m_range, default=range(1, 513), help="range of M (default 1..512)")
    parser.add_argument("--dtype", type=dtype_list, default=list(DTYPES), help="activation dtypes (default: both)")


def run(arguments: argparse.Namespace) -> int:
    checkpoint = GgufCheckpoint(arguments.model)
    classes = Counter(LayerClass.of(layer) for layer in checkpoint.layers.values())
    archs = arguments.arch or installed_archs()
    covered = bool(archs) and bool(classes)
    certificate = []
    for arch in archs:
        device = nominal_device(arch)
        pack = find_pack(arch)
        progress(f"{arch}: {len(checkpoint.layers)} layers, {len(classes)} shapes, M {_text(arguments.m)}")
        rows = []
        for layer, count in classes.items():
            natural = contiguous_alignment(layer.K, layer.N)
            for dtype in arguments.dtype:
                for alignment in sorted({natural, LEAST_ALIGNMENT}, reverse=True):
                    runs = cover_layer(layer, arguments.m, dtype, alignment, device, pack.manifest)
                    covered &= all(run.entry is not None for run in runs)
                    rows.append(
                        {
                            **asdict(layer),
                            "layers": count,
                            "dtype": dtype,
                            "alignment": alignment,
                            "runs": [asdict(run) for run in runs],
                        }
                    )
        manifest_digest = hashlib.sha256(pack.manifest.dump()).hexdigest()
        certificate.append({"arch": arch, "manifest_sha256": manifest_digest, "shapes": rows})
    document = {
        "model": arguments.model.name,
        "layers": {name: asdict(layer) for name, layer in checkpoint.layers.items()},
        "left_out": checkpoint.left_out,
        "m": [arguments.m.start, arguments.m.stop - 1],
        "covered": covered,
        "archs": certificate,
    }
    if arguments.json:
        print_json(document)
    else:
        _print_table(document)
    return 0 if covered else 1


def _print_table(document: dict) -> None:
    for arch in document["archs"]:
        for row in arch["shapes"]:
            zero_points = " with zero points" if row["has_zero_points"] else ""
            print(
                f"{arch['arch']} {row['layers']} layers K={row['K']} N={row['N']} group_size={row['group_size']}"
                f"{zero_points} {row['dtype']} alignment={row['alignment']}"
            )
            for run in row["runs"]:
                span = _text(range(run["first_m"], run["last_m"] + 1))
                how = " (floor)" if run["is_floor"] else ""
                print(f"    M {span:10} {run['entry'] or 'NOT COVERED'}{how}")
    for name, type_ in document["left_out"].items():
        print(f"not 4-bit, left out: {name} ({type_})")
    verdict = "every layer is covered" if document["covered"] else "NOT every layer is covered"
    print(f"{len(document['layers'])} layers, M {document['m'][0]}..{document['m'][1]}: {verdict}")


def _text(ms: range) -> str:
    return str(ms.start) if len(ms) == 1 else f"{ms.start}..{ms.stop - 1}"
