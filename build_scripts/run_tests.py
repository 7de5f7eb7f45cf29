"""All checks: formatter, linter, types, and every test that needs no GPU.

    python3 build_scripts/run_tests.py [--venv FOLDER] [pytest options]

Makes its environment (`.venv` by default) and the packs that the tests look into, then runs the checks.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from pathlib import Path

from workspace import ARCHS, PACKS, SOURCE, Environment, run, step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, default=SOURCE / ".venv", help="the virtual environment to make and use")
    arguments, pytest_options = parser.parse_known_args()

    step(f"environment: {arguments.venv}")
    environment = Environment(arguments.venv.resolve())
    environment.install("--editable", f"{SOURCE}[bench,build,rocm,test]", "torch")

    step("formatter, linter, types")
    run([environment.python, "-m", "ruff", "format", "--check", "."])
    run([environment.python, "-m", "ruff", "check", "."])
    _check_types(environment)

    step(f"packs for {ARCHS}")
    environment.gristmill("build", "--arch", ARCHS, "--out", PACKS)

    step("tests")
    variables = os.environ | {"GRISTMILL_PACK_PATH": str(PACKS)}
    run([environment.python, "-m", "pytest", "-m", "not gpu", *pytest_options], env=variables)


def _check_types(environment: Environment) -> None:
    """mypy cannot see an editable install, so it gets an installed copy; the copy is made from a copy of the sources,
    because setuptools leaves things beside what it builds from."""
    with tempfile.TemporaryDirectory() as folder:
        source, typed = Path(folder) / "source", Path(folder) / "typed"
        ignored = shutil.ignore_patterns(".git", ".venv", "build", "dist", ".*cache*", "__pycache__", "*.egg-info")
        shutil.copytree(SOURCE, source, ignore=ignored)
        environment.install(source, options=["--no-deps", "--no-build-isolation", "--target", typed])
        run([environment.python, "-m", "mypy"], env=os.environ | {"MYPYPATH": str(typed)})


if __name__ == "__main__":
    main()
