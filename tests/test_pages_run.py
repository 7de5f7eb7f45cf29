"""Every command and program in the pages is run. What stands for a GPU, Docker and an index is in page_shell.py."""

from __future__ import annotations

import ast
import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import fake_driver
import page_image
import page_shell
import pages
import pytest
import stub_driver
from gristmill import drivers, packs
from gristmill.aot import wheel
from gristmill.aot.wheel import core_folders, core_wheel, pack_wheel
from gristmill.loader import forget_loaders
from gristmill.packs import Pack
from source_copy import copy_source

ADDING = pages.ROOT / "docs" / "adding-an-arch.md"
DEPLOYMENT = pages.ROOT / "docs" / "deployment.md"
NEW_ARCH = "gfx1200"


@pytest.fixture(scope="module")
def open_folder():
    """A folder that every user may read; pytest's own are the user's alone."""
    with tempfile.TemporaryDirectory(prefix="gristmill-") as name:
        os.chmod(name, 0o755)
        yield Path(name)


@pytest.fixture(scope="module")
def wheels(open_folder) -> dict[str, Path]:
    """The core's wheel, and one of a pack for the stub's sm90."""
    folder = open_folder / "made"
    core = core_wheel(copy_source(pages.ROOT, folder / "source"), folder / "dist").path
    pack = page_shell.floor_pack(folder / "packs", "sm90", stub_driver.code_of)
    with pytest.MonkeyPatch.context() as patch:  # the stub's objects are no machine code
        patch.setattr(wheel, "check_pack", Pack.open)
        return {"core": core, "pack": pack_wheel(pack, folder / "dist", "licence").path}


@pytest.fixture(scope="module")
def stub_library(open_folder) -> Path:
    """The stub libcuda.so.1; beside it lies what computes for its kernels."""
    library = stub_driver.build(stub_driver.TESTS / "stub_cuda/stub_cuda.c", open_folder / "stub" / "libcuda.so.1")
    for name in ("stub_compute.py", "fake_driver.py"):
        shutil.copy(stub_driver.TESTS / name, library.parent)
    return library


@pytest.fixture
def shell(open_folder, monkeypatch):
    """Makes the shell of a page."""

    def make(page: Path) -> page_shell.Shell:
        folder = Path(tempfile.mkdtemp(dir=open_folder))
        os.chmod(folder, 0o755)
        return page_shell.Shell(folder, open_folder / "cache", monkeypatch, pages.blocks(pages=[page]))

    yield make
    forget_loaders()


def commands(page: Path) -> list[str]:
    return [command for block in pages.blocks("sh", pages=[page]) for command in block.commands]


def test_all_pages_with_commands_are_run_here():
    assert {block.page for block in pages.blocks("sh")} == {pages.ROOT / "README.md", DEPLOYMENT, ADDING}


def test_readme(shell):
    run = shell(pages.ROOT / "README.md")
    said = {command: run.run(command) for command in commands(pages.ROOT / "README.md")}
    found = "\n".join(said.values())
    for words in ("something can run here", "takes floor_bfloat16", "every layer is covered", "holds for the packs",
                  "4 of 4 entries passed on cuda:0", "gfx1151: 2 entries verified by emulation",
                  "w4a16_skinny_fp16_m1", "# Coverage"):  # fmt: skip
        assert words in found, words


def test_deployment(shell, wheels, stub_library):
    run = shell(DEPLOYMENT)
    run.wheels, run.stub_library = wheels, stub_library
    lines = commands(DEPLOYMENT)
    docker = [line for line in lines if line.startswith("docker")]
    # The page's second half makes the wheels that its first half puts into an image.
    found = [run.run(line) for line in (*(line for line in lines if line not in docker), *docker)]
    assert "4 of 4 entries passed on cuda:0 (stub" in found[-1]
    assert "something can run here" in found[-2]
    assert "strict mode forbids the import of gristmill.aot" in found[-2], "the emulated device is of the build half"


def test_second_dockerfile(shell, wheels):
    """It is only built: what it starts is its base's."""
    run = shell(DEPLOYMENT)
    (run.folder / "wheels").mkdir()
    for path in wheels.values():
        shutil.copy(path, run.folder / "wheels")
    for name in page_shell.requirements():
        page_shell.stand_in(run.folder / "wheels", name)
    files = pages.blocks("dockerfile")
    assert len(files) == 2
    image = page_image.follow(files[1].text, run.folder, {})
    assert (image.path("/site") / "gristmill_packs" / "sm90" / "manifest.json").is_file()
    assert image.environment["GRISTMILL_STRICT"] == "1"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("gristmill-sm90", "gristmill-sm99"),
        ("--from=wheels", "--from=weels"),
        ("--no-index", "--pre"),
        ("GRISTMILL_STRICT", "GRISTMILL_STRICTER"),
        ("COPY wheels/", "COPY wheel/"),
        ("USER 65534:65534", "USER somebody"),
        ("RUN pip", "RUN apt-get"),
    ],
)
def test_a_mistake_in_a_dockerfile_is_seen(old, new, shell, monkeypatch):
    def pip(arguments: list[str], folder: Path, extra: list[str]) -> None:
        """Makes the target, and installs nothing: it is not pip that is tried here."""
        (target,) = [word.partition("=")[2] for word in arguments if word.startswith("--target=")]
        Path(target).mkdir()

    monkeypatch.setattr(page_shell, "pip", pip)
    run = shell(DEPLOYMENT)
    (run.folder / "wheels").mkdir()
    text = pages.blocks("dockerfile")[0].text
    assert old in text
    page_image.follow(text, run.folder, {})
    shutil.rmtree(run.folder / "image")
    with pytest.raises((AssertionError, KeyError)):
        page_image.follow(text.replace(old, new), run.folder, {})


# --- A new arch -----------------------------------------------------------------------------------------------


def hunks(text: str) -> list[tuple[str, str, str]]:
    """(file, old, new) of each change in a diff block: context and changed lines, without line numbers."""
    found = []
    for part in re.split(r"^--- ", text, flags=re.MULTILINE)[1:]:
        name, *lines = part.splitlines(keepends=True)
        assert all(line[0] in " +-" for line in lines), part
        old, new = ("".join(line[1:] for line in lines if line[0] != left_out) for left_out in "+-")
        found.append((name.strip(), old, new))
    return found


@pytest.fixture
def changed_site(tmp_path) -> Path:
    """The packages with the changes of the page."""
    tree = copy_source(pages.ROOT, tmp_path / "tree")
    for block in pages.blocks("diff", pages=[ADDING]):
        for name, old, new in hunks(block.text):
            text = (tree / name).read_text()
            assert text.count(old) == 1, f"{block}: {name} has {text.count(old)} times\n{old}"
            (tree / name).write_text(text.replace(old, new))
    site = tmp_path / "site"
    for folder, place in sorted(core_folders(tree).items(), key=lambda item: item[1]):
        shutil.copytree(tree / folder, site / place, dirs_exist_ok=True)
    return site


def test_adding_an_arch(shell, changed_site):
    run = shell(ADDING)
    run.site, run.new_arch = changed_site, NEW_ARCH
    (run.folder / "docs" / "coverage.md").write_text("# Coverage\n")
    run.run("git init --quiet . && git add docs")
    said = {command: run.run(command) for command in commands(ADDING)}
    built = said["gristmill build --arch gfx1200"]
    assert f"{NEW_ARCH}: 2 entries verified by emulation on emulated {NEW_ARCH}" in built
    assert "takes w4a16_skinny_fp16_m1" in said["gristmill why --arch gfx1200 --M 1 --N 4096 --K 4096"]
    assert "2 of 2 entries passed on emulated:2" in said["gristmill selftest --device emulated:gfx1200"]
    assert "gristmill_gfx1200-" in said["gristmill wheel --arch gfx1200 --sizes"]
    assert f"## {NEW_ARCH}" in (run.folder / "docs" / "coverage.md").read_text()
    assert "docs/coverage.md" in said["git diff --stat docs/coverage.md"]


def test_the_sources_do_not_know_the_new_arch_yet(shell, capsys):
    """Else the page's example, and what the test above shows, is none."""
    with pytest.raises(SystemExit):
        shell(ADDING).run(f"gristmill why --arch {NEW_ARCH} --M 1 --N 4096 --K 4096")


# --- Programs -------------------------------------------------------------------------------------------------

PROGRAMS = [block for block in pages.blocks("python") if block.page.name != "README.md"]  # that one: test_docs.py


class Recorded:
    """In place of torch.cuda.CUDAGraph and torch.cuda.graph: a call inside runs, and a replay is counted."""

    replays = 0

    def replay(self) -> None:
        Recorded.replays += 1


@pytest.mark.parametrize("block", PROGRAMS, ids=str)
def test_programs(block, monkeypatch, tmp_path, stub_library):
    """Without a GPU: numpy's programs run on fake devices, torch's on the CPU, where nothing is captured."""
    ast.parse(block.text)
    if "__main__" in block.text:  # it starts processes that import it
        (tmp_path / "program.py").write_text(block.text)
        fake_driver.usual_pack(tmp_path / "packs", "sm90", stub_driver.code_of)
        settings = {"LD_LIBRARY_PATH": str(stub_library.parent), "GRISTMILL_PACK_PATH": str(tmp_path / "packs")}
        command = [sys.executable, str(tmp_path / "program.py")]
        result = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        assert result.stdout
        return
    monkeypatch.setattr(packs, "NAMESPACE", "gristmill_packs_of_nobody")
    monkeypatch.setenv("GRISTMILL_PACK_PATH", str(tmp_path / "packs"))
    fake_driver.usual_pack(tmp_path / "packs", "sm90")
    monkeypatch.setitem(drivers._drivers, "cuda", fake_driver.FakeDriver("cuda", ("sm90", "sm90")))
    text = block.text
    if "torch" in text:
        torch = pytest.importorskip("torch")
        text = text.replace('"cuda"', '"cpu"')
        monkeypatch.setattr(torch.cuda, "CUDAGraph", Recorded)
        monkeypatch.setattr(torch.cuda, "graph", contextlib.nullcontext)
    before = Recorded.replays
    try:
        exec(compile(text, str(block), "exec"), {"__name__": "program"})
    finally:
        forget_loaders()
    assert Recorded.replays - before == text.count(".replay()")


@pytest.mark.gpu
@pytest.mark.parametrize("block", PROGRAMS, ids=str)
def test_programs_on_the_gpu(block, tmp_path):
    """As they stand, with the pack that is installed or on GRISTMILL_PACK_PATH."""
    torch = pytest.importorskip("torch")
    if torch.cuda.device_count() < (2 if "cuda:1" in block.text else 1):
        pytest.skip(f"torch sees {torch.cuda.device_count()} GPUs")
    (tmp_path / "program.py").write_text(block.text)
    result = subprocess.run([sys.executable, str(tmp_path / "program.py")], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
