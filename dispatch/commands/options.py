"""Command-line options that several commands share."""

from __future__ import annotations

import argparse

from gristmill.cli import progress
from gristmill.device import NOMINAL_DEVICES, PACKS_FOR_ARCH
from gristmill.launch import INT32_MAX
from gristmill.packs import installed_archs
from gristmill.problem import DTYPES

# Archs that packs are made for.
PACK_ARCHS = tuple(dict.fromkeys(pack for serving in PACKS_FOR_ARCH.values() for pack in serving))


def arch_list(text: str) -> list[str]:
    """ "gfx1151,sm90" -> ["gfx1151", "sm90"]; each a known arch."""
    archs = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    unknown = [arch for arch in archs if arch not in NOMINAL_DEVICES]
    if unknown or not archs:
        raise argparse.ArgumentTypeError(f"unknown arch {', '.join(unknown)!r}; known: {', '.join(NOMINAL_DEVICES)}")
    return archs


def found_archs() -> list[str]:
    """Archs of the packs found; a folder with a manifest that is no pack for any device is named and passed over."""
    found = installed_archs()
    others = [arch for arch in found if arch not in PACK_ARCHS]
    if others:
        progress(f"no packs of a known arch, passed over: {', '.join(others)}")
    return [arch for arch in found if arch in PACK_ARCHS]


def m_range(text: str) -> range:
    """ "1..512" -> range(1, 513); a single number is a range of one."""
    first, dots, last = text.partition("..")
    try:
        low, high = int(first), int(last if dots else first)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a range like 1..512") from None
    if not 0 < low <= high <= INT32_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is not a range of positive numbers")
    return range(low, high + 1)


def dtype_list(text: str) -> list[str]:
    """ "float16,bfloat16" -> both; each an activation dtype."""
    dtypes = [part.strip() for part in text.split(",") if part.strip()]
    if not dtypes or not set(dtypes) <= set(DTYPES):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of {', '.join(DTYPES)}")
    return dtypes


def positive(text: str) -> int:
    """A positive integer."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return value
