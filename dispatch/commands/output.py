"""Files that commands write: refused before the work that they are for, and a typed error if the disk says no."""

from __future__ import annotations

import os
from pathlib import Path

from gristmill import strict
from gristmill.errors import ArgumentError, StrictModeError


def check_writable(path: Path | None, option: str) -> None:
    """Raise if the file that `option` names cannot be written; it is not touched. None is no file.

    Raises
    ------
    StrictModeError : strict mode is on
    ArgumentError : a folder, or in a folder that is not there or may not be written
    """
    if path is None:
        return
    if strict.enabled():
        raise StrictModeError(
            f"strict mode forbids {option}, which writes a file; redirect the output of --json instead"
        )
    place = path if os.path.exists(path) else path.parent
    if os.path.isdir(path) or not os.path.isdir(path.parent) or not os.access(place, os.W_OK):
        raise ArgumentError(f"{option} {path} cannot be written: give a file in a folder that is there")


def write(path: Path, data: bytes, option: str) -> None:
    """Write the file that `option` names."""
    try:
        path.write_bytes(data)
    except OSError as error:
        raise ArgumentError(f"{option} {path} cannot be written: {error.strerror}") from None
