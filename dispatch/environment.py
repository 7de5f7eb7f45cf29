"""All environment variables that Gristmill reads, in one place.

| variable | meaning |
|---|---|
| GRISTMILL_PACK_PATH | folders of packs, searched before the installed ones; separated like PATH |
| GRISTMILL_STRICT | 1: strict mode for what Gristmill does, "process": for the whole process; see `gristmill.strict` |
| HSA_OVERRIDE_GFX_VERSION | ROCm's own: makes it report another chip than the one that is there; `doctor` warns |
"""

from __future__ import annotations

import os

from gristmill.errors import ArgumentError


def pack_path() -> list[str]:
    """Folders named by GRISTMILL_PACK_PATH, without a slash at their ends."""
    return [part.rstrip("/") or "/" for part in os.environ.get("GRISTMILL_PACK_PATH", "").split(os.pathsep) if part]


def chip_override() -> str | None:
    """The chip that ROCm is told to report instead of the true one, if any."""
    return os.environ.get("HSA_OVERRIDE_GFX_VERSION") or None


def strict_scope() -> str | None:
    """What strict mode is to watch: "runtime", "process", or None for off."""
    text = os.environ.get("GRISTMILL_STRICT", "")
    scopes = {"": None, "0": None, "1": "runtime", "process": "process"}
    if text not in scopes:
        raise ArgumentError(f"GRISTMILL_STRICT must be 0, 1 or process, got {text!r}")
    return scopes[text]
