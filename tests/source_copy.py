"""A copy of what the core wheel is made from: setuptools leaves things beside what it builds, and tests change it."""

from __future__ import annotations

import shutil
from pathlib import Path

from gristmill.aot.wheel import CORE_FILES, core_folders


def copy_source(source: Path, target: Path) -> Path:
    """Copy the source tree `source` to `target`, without what is made in it; returns `target`."""
    target.mkdir(parents=True)
    for name in CORE_FILES:
        shutil.copy(source / name, target / name)
    for folder in core_folders(source):
        shutil.copytree(source / folder, target / folder, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    return target
