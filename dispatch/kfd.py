"""The AMD chips that the kernel driver sees: the truth under HSA_OVERRIDE_GFX_VERSION, and without ROCm."""

from __future__ import annotations

from pathlib import Path

NODES = Path("/sys/class/kfd/kfd/topology/nodes")


def chips(nodes: Path = NODES) -> list[str]:
    """The arch of each AMD GPU, in the order of the kernel's nodes; empty where there is none, or no KFD driver."""
    found = []
    for node in sorted(nodes.glob("*"), key=lambda node: (len(node.name), node.name)):
        try:
            text = (node / "properties").read_text()
        except OSError:  # a node that a container may not see
            continue
        properties = dict(line.split(maxsplit=1) for line in text.splitlines() if " " in line)
        version = properties.get("gfx_target_version", "0")
        if version.isdecimal() and int(version):  # 0 is a CPU
            found.append(arch_of(int(version)))
    return found


def arch_of(gfx_target_version: int) -> str:
    """110501 -> "gfx1151"; two decimal digits each of minor and stepping, which a name has in hexadecimal."""
    major, rest = divmod(gfx_target_version, 10_000)
    minor, stepping = divmod(rest, 100)
    return f"gfx{major}{minor:x}{stepping:x}"


def arch_of_override(text: str) -> str | None:
    """The arch that HSA_OVERRIDE_GFX_VERSION="11.0.0" makes ROCm report; None when it is not three numbers."""
    parts = text.split(".")
    if len(parts) != 3 or not all(part.isdecimal() for part in parts):
        return None
    return arch_of(int(parts[0]) * 10_000 + int(parts[1]) * 100 + int(parts[2]))
