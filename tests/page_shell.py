"""Runs the commands of the pages in a folder of its own, on devices that are not there.

What stands for what:

- `gristmill` runs in this process: "cuda" and "emulated" are fake drivers that compute in numpy, packs are
  `floor_pack`s, MODEL.gguf is a small file. Exit code 0 is asked for.
- `gristmill build`, `wheel` and `coverage` run in a process of their own, through `sampled_command.py`: real compilers,
  few entries. Where the page changes the sources, these and all that name the new arch run on the changed copy.
- `gristmill bench` times nothing: its options are read, and its table is printed without rows.
- `pip` is pip, without an index; where the page downloads, stand-ins for the core's requirements lie in a folder.
- `docker` is followed in page_image.py.
- `python3 build_scripts/...` and the count of instructions take minutes: see `_python`.
- all else is run by the shell.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import py_compile
import re
import shlex
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import fake_driver
import gguf_files
import numpy as np
import page_image
import pages
import pytest
import tomllib
from gristmill import drivers, packs
from gristmill.aot import cold_start
from gristmill.cli import main
from gristmill.errors import NoDriverError
from gristmill.formula import Formula
from gristmill.loader import forget_loaders
from gristmill.manifest import Needs, Rule
from gristmill.packs import Pack
from gristmill.problem import DTYPES
from gristmill.verified import Record, dump_records

ARCHS = ("sm80", "sm90", "gfx1151", "gfx1201")
TESTS = Path(__file__).parent
BUILDS = ("build", "wheel", "coverage")


class NoHip:
    """A driver whose library is not there."""

    def unavailable_reason(self) -> str:
        return "libamdhip64.so cannot be loaded"

    def device_count(self) -> int:
        raise NoDriverError(self.unavailable_reason())


def requirements() -> list[str]:
    """Names of what the core requires."""
    project = tomllib.loads((pages.ROOT / "pyproject.toml").read_text())["project"]
    return [re.match(r"[\w-]+", text)[0] for text in project["dependencies"]]


def stand_in(folder: Path, name: str) -> Path:
    """A wheel of nothing, for pip to find."""
    folder.mkdir(exist_ok=True)
    info = f"{name}-99.0.dist-info"
    path = folder / f"{name}-99.0-py3-none-any.whl"
    files = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 99.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for place, text in files.items():
            archive.writestr(place, text)
        archive.writestr(f"{info}/RECORD", "".join(f"{place},,\n" for place in [*files, f"{info}/RECORD"]))
    return path


def pip(arguments: list[str], folder: Path, extra: list[str]) -> None:
    """pip as the page calls it, with `extra` options."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments, *extra]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, f"{arguments}\n{result.stdout}{result.stderr}"


def verify(folder: Path) -> None:
    """Write records as if each entry of a pack had run."""
    entries = Pack.open(folder).manifest.entries
    records = {name: Record(entry.object, "a test", "silicon", 1, 0.5) for name, entry in entries.items()}
    (folder / "verified.json").write_bytes(dump_records(records))


def repr_of(symbols: list[str]) -> bytes:
    """An object that is no code."""
    return repr(symbols).encode()


def floor_pack(root: Path, arch: str, code_of: Callable[[list[str]], bytes] = repr_of) -> Path:
    """A verified pack of four entries, one for each kind of weight; `code_of` as in `fake_driver.usual_pack`."""
    rows = []
    for dtype, zero_points in itertools.product(DTYPES, (False, True)):
        name = f"floor_{dtype}{'_zp' if zero_points else ''}"
        code = code_of([f"symbol_{name}"])
        rows.append((fake_driver.entry(name, code, needs=Needs(dtype, zero_points, ())), code))
    rules = (Rule(Formula("1"), tuple(row.name for row, _ in rows), "test, floor"),)
    folder = fake_driver.write_pack(root, arch, rows, rules)
    verify(folder)
    return folder


def model(path: Path) -> Path:
    """A checkpoint of a layer in each format. Their names are in order: `cover --against` must find them so again."""
    rng = np.random.default_rng(3)
    q = rng.integers(0, 16, (72, 96))
    scales, minimums = rng.uniform(0.01, 0.1, (72, 3)).astype(np.float16), rng.normal(size=(72, 3)).astype(np.float16)
    layers = {
        "blk.0.attn_k.weight": (gguf_files.blocks_q4_0(q, scales), "Q4_0"),
        "blk.0.attn_q.weight": (gguf_files.blocks_q4_1(q, scales, minimums), "Q4_1"),
    }
    return gguf_files.write(path, layers)


class Shell:
    """Runs the commands of one page, in order."""

    def __init__(self, folder: Path, cache: Path, patch: pytest.MonkeyPatch, blocks: list[pages.Block]) -> None:
        self.folder = folder
        self.cache = cache  # of the build
        self.blocks = blocks
        self.wheels: Mapping[str, Path] = {}  # that lie in `wheels` for pip: core and packs
        self.stub_library: Path | None = None  # libcuda.so.1 for what runs in a container
        self.site: Path | None = None  # a copy of the packages that the page has changed
        self.new_arch = ""  # that it has for it
        self.image: page_image.Image | None = None
        self.variables: dict[str, str] = {}  # exported
        self.packs_in_sight = True  # whether somebody who has followed the page has packs that are found
        patch.chdir(folder)
        patch.setattr(packs, "NAMESPACE", "gristmill_packs_of_nobody")
        patch.setenv("GRISTMILL_PACK_PATH", str(folder / "fake packs"))
        for arch in ARCHS:
            floor_pack(folder / "fake packs", arch)
        for name, archs in (("cuda", ("sm90", "sm90")), ("emulated", ("gfx1151", "gfx1201"))):
            patch.setitem(drivers._drivers, name, fake_driver.FakeDriver(name, archs))
        patch.setitem(drivers._drivers, "hip", NoHip())
        patch.setattr(cold_start, "run", lambda runs, progress: iter(()))
        model(folder / "MODEL.gguf")
        for name in ("aot/records", "docs"):
            (folder / name).mkdir(parents=True)

    def run(self, line: str) -> str:
        """Run one command; returns what it printed."""
        words = shlex.split(line, comments=True)
        runners: dict[str, Callable[[list[str]], str]] = {
            "gristmill": self._gristmill,
            "pip": self._pip,
            "python": self._python,
            "python3": self._python,
            "docker": self._docker,
            "export": self._export,
        }
        if words[0] in runners:
            return runners[words[0]](words[1:])
        return self._process(["sh", "-euc", line], {})

    def _gristmill(self, words: list[str]) -> str:
        if words[0] in BUILDS or (self.new_arch and self.new_arch in " ".join(words)):
            command = [sys.executable, str(TESTS / "sampled_command.py"), *words]
            if words[0] == "build":
                command += ["--cache", str(self.cache), "--jobs", "2"]
            said = self._process(command, {"GRISTMILL_PACK_PATH": "", **self.variables})
            if words[0] == "build":
                self.packs_in_sight = bool(self.variables.get("GRISTMILL_PACK_PATH"))
                for folder in (self.folder / "build/packs").glob("sm*"):
                    verify(folder)  # as a GPU would
            return said
        if words[0] in ("cover", "list", "why"):
            assert self.packs_in_sight, f"{words}: what the page has built is not found yet"
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
            code = main(words)
        forget_loaders()
        assert code == 0, out.getvalue()
        return out.getvalue()

    def _process(self, command: list[str], variables: dict[str, str]) -> str:
        environment = {**os.environ, **variables}
        if self.site is not None:
            environment["PYTHONPATH"] = str(self.site)
        result = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True)
        assert result.returncode == 0, f"{command}\n{result.stdout}{result.stderr}"
        return result.stdout

    def _pip(self, words: list[str]) -> str:
        """`download` finds stand-ins; `install` goes into the folder `site` and must leave core and pack there."""
        if words[0] == "download":
            asked = [word for word in words[1:] if re.fullmatch(r"[a-z_]+", word) and word != "wheels"]
            assert asked == requirements(), "the page carries what the core requires"
            for name in asked:
                stand_in(self.folder / "index", name)
            pip(words, self.folder, ["--no-index", "--find-links", "index"])
            for path in self.wheels.values():  # sampled_command.py has made no core
                (self.folder / "wheels" / path.name).write_bytes(path.read_bytes())
            return ""
        assert words[0] == "install"
        assert "--no-index" in words, "nothing is fetched in a test"
        pip(words, self.folder, ["--target", "site"])
        installed = {path.name for path in (self.folder / "site").iterdir()}
        assert {"gristmill", "gristmill_packs"} <= installed
        return ""

    def _python(self, words: list[str]) -> str:
        """Scripts that take minutes: they are there and compile; instructions are counted for one kernel."""
        script = pages.ROOT / words[0]
        if script.parent.name == "build_scripts":
            assert len(words) == 1
            py_compile.compile(str(script), cfile=str(self.folder / "compiled"), doraise=True)
            assert 'if __name__ == "__main__":' in script.read_text()
            return ""
        assert words[0] == "tests/hip_kernels.py"
        program = (
            "import sys, hip_kernels\n"
            "rows = hip_kernels.rows.variants\n"
            "hip_kernels.rows.variants = lambda arch: rows(arch)[:1]\n"
            "sys.exit(hip_kernels.main(sys.argv[1:]))"
        )
        path = os.pathsep.join(filter(None, [str(self.site or ""), str(TESTS)]))
        command = ["env", f"PYTHONPATH={path}", sys.executable, "-c", program, *words[1:]]
        found = self._process(command, {})
        assert re.fullmatch(rf'\s*"{words[2]}": {{\s*"w4a16_\w+": Counts\([\d., ]+\),\s*}},\s*', found), found
        return found

    def _export(self, words: list[str]) -> str:
        """For what runs on a changed copy; the fake packs stay where they are."""
        for word in words:
            name, _, value = word.partition("=")
            assert name in page_image.documented_variables(), name
            self.variables[name] = str((self.folder / value).resolve()) if name.endswith("_PATH") else value
            self.packs_in_sight |= name == "GRISTMILL_PACK_PATH"
        return ""

    def _docker(self, words: list[str]) -> str:
        if words[0] == "build":
            text = next(block.text for block in self.blocks if block.language == "dockerfile")
            self.image = page_image.build(text, words[1:], self.folder)
            return ""
        assert words[0] == "run"
        assert self.image is not None, "built before it is run"
        assert self.stub_library is not None
        return page_image.run(self.image, words[1:], self.stub_library)
