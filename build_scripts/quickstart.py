"""From a checkout to real layers of a real model through prebuilt kernels; needs Python 3.11 or newer, no GPU.

    python3 build_scripts/quickstart.py

Makes `.venv` with all compilers from PyPI, builds the packs and wheels of four archs, installs the wheels into a clean
environment without any compiler, and runs the main job there. Safe to run again: what is there is used.
"""

from __future__ import annotations

import ctypes
import sys

from fetch_model import fetch_model
from workspace import ARCHS, BUILD, PACKS, SOURCE, WHEELS, Environment, step

# What serves a driver whose library is there.
REQUIREMENTS = {"libcuda.so.1": "gristmill", "libamdhip64.so": "gristmill[rocm]"}


def main() -> None:
    step("build environment: .venv, with Triton for both vendors and clang for HIP from PyPI (a few minutes once)")
    builder = Environment(SOURCE / ".venv")
    builder.install("--editable", f"{SOURCE}[build]")

    step(f"packs for {ARCHS}: build/packs (minutes the first time, seconds from the cache)")
    builder.gristmill("build", "--arch", ARCHS, "--out", PACKS)

    step("wheels: dist/")
    builder.gristmill("wheel", "--packs", PACKS, "--out", WHEELS)

    step("clean environment: build/run, with the wheels and no compiler")
    runner = Environment(BUILD / "run")
    names = ["gristmill", *(f"gristmill-{arch}" for arch in ARCHS.split(","))]
    runner.install(*names, options=["--no-index", "--find-links", str(WHEELS), "--force-reinstall", "--no-deps"])
    usable = [requirement for library, requirement in REQUIREMENTS.items() if _loads(library)]
    runner.install(*(usable or ["gristmill[emulator]"]))

    step("model: build/model (93 MB, once)")
    model = fetch_model(runner)

    step("cover: every layer, for every M up to 512, resolves to a prebuilt kernel")
    runner.gristmill("cover", model, "--arch", ARCHS, "--m", "1..512")

    if usable:
        step("check: all layers on the GPU against a float64 reference")
        runner.gristmill("doctor")
        runner.gristmill("check", model)
    else:
        step("no GPU found: run real layers through the emulated gfx1151, instruction by instruction (a minute)")
        runner.gristmill("check", model, "--device", "emulated:gfx1151", "--layers", "4", "--m", "1,5,17,40")
    step("done")


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
