"""`gristmill why`: which entry one problem takes, and why each other entry was not taken."""

from __future__ import annotations

import argparse

from gristmill.cli import print_json
from gristmill.commands.options import positive
from gristmill.cover import contiguous_alignment
from gristmill.device import NOMINAL_DEVICES, DeviceFacts
from gristmill.drivers import get_driver
from gristmill.drivers.default import first_device
from gristmill.errors import NoKernelError
from gristmill.packs import find_pack
from gristmill.problem import DTYPES, OP_W4A16_GEMM, Problem, resolve_group_size
from gristmill.select import Selection, rule_verdict, select, verdicts

HELP = "explain which kernel a problem takes, and why each other one was not taken"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--arch", choices=NOMINAL_DEVICES, help="default: that of the first device at hand")
    parser.add_argument("--M", type=positive, required=True, help="rows of the activations")
    parser.add_argument("--N", type=positive, required=True, help="output features")
    parser.add_argument("--K", type=positive, required=True, help="input features")
    parser.add_argument("--group-size", type=int, default=128, help="input features per scale; -1 for K (default 128)")
    parser.add_argument("--dtype", choices=DTYPES, default="float16")
    parser.add_argument("--zero-points", action="store_true", help="the weight has zero points")
    parser.add_argument("--bias", action="store_true", help="the layer has a bias")
    parser.add_argument("--alignment", type=int, choices=(2, 4, 8, 16), help="default: what contiguous arrays have")
    parser.add_argument("--lds-bytes", type=positive, help="shared memory a block may have; default: the device's")


def run(arguments: argparse.Namespace) -> int:
    device = _device(arguments)
    pack = find_pack(device.arch)
    problem = Problem(
        op=OP_W4A16_GEMM,
        M=arguments.M,
        N=arguments.N,
        K=arguments.K,
        group_size=resolve_group_size(arguments.group_size, arguments.K),
        dtype=arguments.dtype,
        has_zero_points=arguments.zero_points,
        has_bias=arguments.bias,
        alignment=arguments.alignment or contiguous_alignment(arguments.M, arguments.K, arguments.N),
    )
    judged = verdicts(problem, device, pack.manifest)
    try:
        selection = select(problem, device, pack.manifest)
    except NoKernelError:
        selection = None
    chosen = selection.entry.name if selection else None
    rejected = {
        verdict.entry: "; ".join(verdict.reasons) or rule_verdict(verdict.entry, problem, device, pack.manifest)
        for verdict in judged
        if verdict.entry != chosen
    }
    if arguments.json:
        print_json(
            {
                "arch": device.arch,
                "device": device.name,
                "lds_bytes": device.lds_bytes_per_block,
                "problem": problem.formula_values()
                | {"dtype": problem.dtype, "has_zero_points": problem.has_zero_points},
                "entry": chosen,
                "origin": selection.origin if selection else None,
                "is_floor": selection.is_floor if selection else None,
                "grid": selection.grid if selection else None,
                "block": selection.entry.block if selection else None,
                "shared_bytes": _shared_bytes(selection) if selection else None,
                "rejected": rejected,
            }
        )
    else:
        print(
            f"{problem}\non {device.name}, {device.arch}, {device.lds_bytes_per_block} bytes of shared memory a block"
        )
        if selection:
            print(f"takes {chosen}\n  by: {selection.origin}{' (floor)' if selection.is_floor else ''}")
            print(f"  grid {selection.grid}, block {selection.entry.block}, {_shared_bytes(selection)} bytes shared")
        else:
            print("takes nothing: no entry covers it")
        for name, reason in rejected.items():
            print(f"not {name}: {reason}")
    return 0 if selection else 1


def _shared_bytes(selection: Selection) -> int:
    return selection.entry.static_shared_bytes + selection.dynamic_shared_bytes


def _device(arguments: argparse.Namespace) -> DeviceFacts:
    if arguments.arch:
        device = NOMINAL_DEVICES[arguments.arch]
    else:
        found = first_device()
        device = get_driver(found.driver).device_facts(found.ordinal)
    return device._replace(lds_bytes_per_block=arguments.lds_bytes) if arguments.lds_bytes else device
