"""What the tests of the build share: row modules that workers can import, and packs built once."""

from __future__ import annotations

import io
import itertools
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from gristmill.aot.build import PackReport, build_packs
from gristmill.aot.module_sources import source_digests
from tiny_rows import ARCHS

HERE = Path(__file__).parent
_number = itertools.count()


@pytest.fixture(scope="session", autouse=True)
def importable():
    """Make `tiny_rows` and `tiny_kernels` importable here and in the processes that a build starts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HERE))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))
        yield


@pytest.fixture
def rows_of(tmp_path, monkeypatch) -> Callable[..., str]:
    """Write a kernel module and one row per name in `names`; returns the name of the row module."""

    def write(kernel: str, names: tuple[str, ...] = ("one",), changes: str = "") -> str:
        number = next(_number)
        folder = tmp_path / f"sources{number}"
        folder.mkdir()
        (folder / f"kernel{number}.py").write_text(kernel)
        (folder / f"rows{number}.py").write_text(
            "from dataclasses import replace\n"
            "from gristmill.kernels.variant import PolicyRow\n"
            "from tiny_rows import TINY\n"
            f"NAMES = {names!r}\n"
            "def variants(arch):\n"
            f"    own = {{'module': 'kernel{number}'}}\n"
            f"    return [replace(TINY, **{{'name': name, **own, **dict({changes})}}) for name in NAMES]\n"
            "def policy(arch):\n"
            "    return [PolicyRow('1', NAMES[:1], 'test')]\n"
        )
        monkeypatch.syspath_prepend(str(folder))
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ["PYTHONPATH"]]))
        source_digests.cache_clear()
        return f"rows{number}"

    return write


@pytest.fixture
def build(tmp_path) -> Callable[..., tuple[list[PackReport], str]]:
    """`build_packs` below tmp_path; returns its reports and what it said."""

    def run(archs=("sm80",), rows="tiny_rows", out="packs", cache="cache", jobs=2):
        said = io.StringIO()
        source_digests.cache_clear()
        reports = build_packs(archs, tmp_path / out, tmp_path / cache, jobs, said, (rows,))
        return reports, said.getvalue()

    return run


@pytest.fixture(scope="session")
def tiny_packs(tmp_path_factory) -> Path:
    """Packs of the small rows for all archs; not to be changed."""
    folder = tmp_path_factory.mktemp("tiny")
    build_packs(ARCHS, folder / "packs", folder / "cache", 2, io.StringIO(), ("tiny_rows",))
    return folder / "packs"
