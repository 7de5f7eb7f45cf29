"""`gristmill cover`: every layer of a model, for each M and arch, resolves to a shipped entry, or which do not."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from gristmill.certificate import Question, certify, differences, dump, question_of, span_text
from gristmill.checkpoints.gguf import GgufCheckpoint
from gristmill.cli import print_json, progress
from gristmill.commands.options import PACK_ARCHS, arch_list, dtype_list, found_archs, m_range
from gristmill.commands.output import check_writable, write
from gristmill.errors import ArgumentError, NoPackError
from gristmill.problem import DTYPES

HELP = "prove that every layer of a model resolves to a shipped kernel; needs no GPU"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, nargs="?", help="a GGUF file")
    parser.add_argument("--arch", type=arch_list, help="archs, separated by commas; default: every pack found")
    parser.add_argument("--m", type=m_range, default=range(1, 513), help="range of M (default 1..512)")
    parser.add_argument("--dtype", type=dtype_list, default=list(DTYPES), help="activation dtypes (default: both)")
    parser.add_argument("--output", type=Path, help="write the certificate to this file")
    parser.add_argument(
        "--against", type=Path, metavar="CERTIFICATE", help="instead of a model: do the packs here still hold to it?"
    )


def run(arguments: argparse.Namespace) -> int:
    if (arguments.model is None) == (arguments.against is None):
        raise ArgumentError("give a model, or --against with a certificate")
    if arguments.against is not None:
        return _check(arguments)
    check_writable(arguments.output, "--output")
    checkpoint = GgufCheckpoint(arguments.model)
    archs = arguments.arch or found_archs()
    if not archs:
        raise NoPackError(f"no packs found; run: pip install gristmill-ARCH, with ARCH one of {', '.join(PACK_ARCHS)}")
    question = Question(
        model=arguments.model.name,
        layers=checkpoint.layers,
        left_out=checkpoint.left_out,
        not_read=checkpoint.not_read,
        archs=archs,
        m=arguments.m,
        dtypes=arguments.dtype,
    )
    certificate = certify(question, progress)
    if arguments.output is not None:
        write(arguments.output, dump(certificate), "--output")
    if arguments.json:
        print_json(certificate)
    else:
        _print_table(certificate)
    return 0 if certificate["covered"] else 1


def _check(arguments: argparse.Namespace) -> int:
    question, certified = question_of(arguments.against)
    found = differences(certified, certify(question, progress))
    holds = not found and bool(certified["covered"])
    if arguments.json:
        print_json({"certificate": str(arguments.against), "holds": holds, "differences": found})
    else:
        for line in found:
            print(line)
        print(f"{arguments.against}: {'holds' if holds else 'does NOT hold'} for the packs found here")
    return 0 if holds else 1


def _print_table(certificate: dict[str, Any]) -> None:
    for arch in certificate["archs"]:
        for row in arch["shapes"]:
            zero_points = " with zero points" if row["has_zero_points"] else ""
            print(
                f"{arch['arch']} {row['layers']} layers K={row['K']} N={row['N']} group_size={row['group_size']}"
                f"{zero_points} {row['dtype']} alignment={row['alignment']}"
            )
            for run in row["runs"]:
                span = span_text(range(run["first_m"], run["last_m"] + 1))
                how = " (floor)" if run["is_floor"] else ""
                print(f"    M {span:10} {run['entry'] or 'NOT COVERED'}{how}")
        for name, row in arch["entries"].items():
            record = row["verified"]
            print(f"{arch['arch']} {name}: {_proof(record)}")
    for name, type_ in certificate["left_out"].items():
        print(f"not 4-bit, left out: {name} ({type_})")
    for name, reason in certificate["not_read"].items():
        print(f"4-bit, NOT READ: {name}: {reason}")
    print(
        f"{len(certificate['layers'])} layers, M {certificate['m'][0]}..{certificate['m'][1]}: {_verdict(certificate)}"
    )


def _verdict(certificate: dict[str, Any]) -> str:
    verdict = "every layer is covered" if certificate["covered"] else "NOT every layer is covered"
    if certificate["not_read"]:
        verdict += f", {len(certificate['not_read'])} 4-bit tensors are not read"
    if certificate["covered"] and not certificate["verified"]:
        verdict += ", not every entry has a record of verification"
    return verdict


def _proof(record: dict[str, Any] | None) -> str:
    return f"verified, {record['how']} on {record['on']}" if record else "no record of a run"
