"""Follows a Dockerfile and `docker run` without Docker.

Each stage is a folder. COPY copies; RUN may be pip alone, which is run, without network, with the image's paths put
below the folder. What the image starts is then started with Python as the only thing that it has beside what was
copied: no site-packages, no PATH, no HOME; and, where the kernel allows it (sandbox.py), with a read-only file system,
no network and the uid of `--user`. `--gpus all` brings the stub's libcuda.so.1, and what its kernels compute. Base
images are not looked at but for their names; of Docker's own parsing nothing is known but what is written here.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import page_shell
import pages

TESTS = Path(__file__).parent
RUN_PROGRAM = (
    "import runpy, sys; sys.path.append({tests!r}); import stub_compute; stub_compute.attach(); "
    "sys.argv = {argv!r}; runpy.run_module({module!r}, run_name='__main__')"
)


@dataclass
class Image:
    """What a Dockerfile makes."""

    root: Path
    tags: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    user: str = "0"
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)

    def path(self, text: str) -> Path:
        """Where a path of the image lies."""
        assert text.startswith("/"), f"{text} depends on the working folder of a base image"
        return self.root / text.lstrip("/")


def instructions(text: str) -> list[tuple[str, str]]:
    """(instruction, rest) of each line that is not blank or a comment."""
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line.strip() and not line.startswith("#")]
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in lines]


def build(text: str, words: list[str], context: Path) -> Image:
    """Follow the Dockerfile `text` as `docker build` with the arguments `words` in the folder `context`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tag", required=True)
    parser.add_argument("context")
    arguments = parser.parse_args(words)
    assert arguments.context == "."
    stages: dict[str, Image] = {}
    image = follow(text, context, stages)
    image.tags.append(arguments.tag)
    return image


def follow(text: str, context: Path, stages: dict[str, Image]) -> Image:
    image: Image | None = None
    arguments: set[str] = set()
    for number, (instruction, rest) in enumerate(instructions(text)):
        if instruction == "ARG":
            arguments.add(rest)
        elif instruction == "FROM":
            found = re.fullmatch(r"(\$\{(\w+)\}|[a-z]+:[\w.-]+)(?: AS (\w+))?", rest)
            assert found, f"FROM {rest}"
            assert found[2] is None or found[2] in arguments, f"{found[2]} is no ARG"
            root = context / "image" / str(number)
            root.mkdir(parents=True)
            image = Image(root)
            stages[found[3] or str(number)] = image
        else:
            assert image is not None, "FROM comes first"
            step(image, instruction, rest, context, stages)
    assert image is not None
    return image


def step(image: Image, instruction: str, rest: str, context: Path, stages: dict[str, Image]) -> None:
    if instruction == "COPY":
        *options, source, target = shlex.split(rest)
        origin = context / source
        for option in options:
            stage = re.fullmatch(r"--from=(\w+)", option)
            assert stage, option
            origin = stages[stage[1]].path(source)
        assert origin.is_dir(), f"COPY {rest}: there is no {origin}"
        shutil.copytree(origin, image.path(target), dirs_exist_ok=True)
    elif instruction == "RUN":
        words = shlex.split(rest)
        assert words[0] == "pip", f"RUN {rest}: nothing but pip can be followed"
        check_names(words)
        mapped = [re.sub(r"(?<==)/.*", lambda path: str(image.path(path[0])), word) for word in words[1:]]
        # Without a target the base's site-packages would get it: where they are does not matter here.
        target = [] if any(word.startswith("--target=") for word in words) else ["--target", str(image.path("/site"))]
        page_shell.pip(mapped, context, target)
    elif instruction == "ENV":
        for word in shlex.split(rest):
            name, equals, value = word.partition("=")
            assert equals, f"ENV {rest}"
            assert name in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE") or name in documented_variables(), name
            image.environment[name] = str(image.path(value)) if value.startswith("/") else value
    elif instruction == "USER":
        assert re.fullmatch(r"\d+:\d+", rest), "a name would have to be in the image's list of users"
        image.user = rest.partition(":")[0]
    elif instruction == "ENTRYPOINT":
        image.entrypoint = json.loads(rest)
    elif instruction == "CMD":
        image.command = json.loads(rest)
    else:
        raise AssertionError(f"{instruction} {rest}: not an instruction that is known here")


def check_names(words: list[str]) -> None:
    """What pip is told to install is of ours, and exists."""
    from gristmill.aot.targets import TARGETS
    from gristmill.packs import distribution_name

    names = [word for word in words[2:] if not word.startswith("-")]
    assert words[1] == "install"
    assert set(names) <= {"gristmill", *map(distribution_name, TARGETS)}, names
    assert "--no-index" in words


def documented_variables() -> set[str]:
    """Names in the first column of the tables of docs/deployment.md."""
    return {row[0] for row in pages.table_rows((pages.ROOT / "docs" / "deployment.md").read_text())}


def run(image: Image, words: list[str], stub_library: Path) -> str:
    """Start the image as `docker run` does with `words`; returns what it prints."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rm", action="store_true")
    parser.add_argument("--gpus", choices=["all"])
    parser.add_argument("--read-only", action="store_true")
    parser.add_argument("--network", choices=["none"])
    parser.add_argument("--cap-drop", choices=["ALL"])
    parser.add_argument("--user")
    parser.add_argument("image")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    arguments = parser.parse_args(words)
    assert arguments.image in image.tags
    assert arguments.read_only
    assert arguments.network
    link_requirements(image)
    python, option, module, *argv = [*image.entrypoint, *(arguments.arguments or image.command)]
    assert (python, option) == ("python", "-m")
    program = RUN_PROGRAM.format(tests=str(stub_library.parent), argv=[module, *argv], module=module)
    command = [sys.executable, "-S", "-c", program]
    environment = {**image.environment, "PATH": "/nonexistent", "LC_ALL": "C.UTF-8", "OMP_NUM_THREADS": "1"}
    if arguments.gpus:
        environment["LD_LIBRARY_PATH"] = str(stub_library.parent)
    user = (arguments.user or image.user).partition(":")[0]
    sandboxed = [sys.executable, str(TESTS / "sandbox.py"), user, *command]
    result = subprocess.run(sandboxed, env=environment, capture_output=True, text=True, cwd="/")
    if result.returncode == 77:  # no sandbox on this machine: at least it starts
        result = subprocess.run(command, env=environment, capture_output=True, text=True, cwd="/")
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def link_requirements(image: Image) -> None:
    """Put the true numpy and ml_dtypes where pip has put their stand-ins."""
    site = Path(image.environment["PYTHONPATH"])
    for name in page_shell.requirements():
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        folder = Path(spec.origin).parent
        for found in (folder, folder.parent / f"{name}.libs"):
            if found.is_dir() and not (site / found.name).exists():
                os.symlink(found, site / found.name)
