"""Compiling HIP variants without ROCm: what the object is, what it may not hold, what failures say."""

from __future__ import annotations

import os
import stat
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from gristmill.aot import compile_hip, cxx_sources
from gristmill.aot.code_object import read_facts
from gristmill.aot.compile_hip import (
    HipCompiler,
    compile_variant,
    key_facts,
    rocm_compiler,
    ziglang_compiler,
)
from gristmill.aot.cxx_sources import source_digests
from gristmill.aot.errors import BuildError, CompileError, ObjectError, ToolchainError
from gristmill.aot.targets import find_target
from gristmill.csrc import w4a16_skinny_hip_variants as rows
from gristmill.kernels.variant import CxxVariant

GFX1151, GFX1201 = find_target("gfx1151"), find_target("gfx1201")
ROW = rows.variants("gfx1151")[0]

TINY = """
#include "tiny.h"
extern "C" __attribute__((global)) void tiny(int* out, int M) {
  if (__builtin_amdgcn_workitem_id_x() == 0) out[0] = M + OFFSET;
}
"""


@pytest.fixture
def tiny(tmp_path, monkeypatch) -> CxxVariant:
    """A variant whose source lies in a folder of its own."""
    monkeypatch.setattr(cxx_sources, "CSRC", tmp_path)
    (tmp_path / "hip").mkdir()
    (tmp_path / "hip" / "tiny.hip").write_text(TINY)
    (tmp_path / "hip" / "tiny.h").write_text("#define OFFSET 1\n")
    return replace(
        ROW,
        name="tiny",
        source="csrc/hip/tiny.hip",
        symbol="tiny",
        defines={},
        arguments=(("out", "pointer"), ("M", "int32")),
        block=(32, 1, 1),
    )


@pytest.mark.parametrize("target", [GFX1151, GFX1201], ids=lambda target: target.arch)
def test_object_is_for_its_target_and_has_the_symbol(target):
    built = compile_variant(ROW, target)
    facts = read_facts(built.code, "hsaco", ROW.symbol)
    assert facts.arch == target.arch
    assert built.symbol == ROW.symbol
    assert built.threads == ROW.block[0] == facts.max_threads
    assert built.compilers == {"clang (ziglang)": ziglang_compiler().version}
    assert f"{ROW.symbol}:" in built.assembly


def test_same_source_gives_the_same_bytes_wherever_it_is_built(tiny, tmp_path, monkeypatch):
    first = compile_variant(tiny, GFX1151).code
    monkeypatch.chdir("/")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert compile_variant(tiny, GFX1151).code == first


def test_object_names_no_folder_and_no_address(tiny, tmp_path):
    code = compile_variant(tiny, GFX1151).code
    for text in (str(tmp_path), str(Path.home()), "http", "/tmp", "github"):
        assert text.encode() not in code


def test_variables_of_the_caller_do_not_steer_the_compiler(tiny, tmp_path, monkeypatch):
    first = compile_variant(tiny, GFX1151).code
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "tiny.h").write_text("#error not this one\n")
    for name in ("CPATH", "CPLUS_INCLUDE_PATH"):
        monkeypatch.setenv(name, str(tmp_path / "other"))
    monkeypatch.setenv("CCC_OVERRIDE_OPTIONS", "+-O0")
    assert compile_variant(tiny, GFX1151).code == first


def test_failure_has_the_compilers_words(tiny, tmp_path):
    (tmp_path / "hip" / "tiny.h").write_text("#define OFFSET undeclared_name\n")
    with pytest.raises(CompileError, match=r"tiny: csrc/hip/tiny\.hip does not compile\n.*undeclared_name"):
        compile_variant(tiny, GFX1151)


def test_row_must_agree_with_the_kernel(tiny):
    with pytest.raises(ObjectError, match="takes arguments of"):
        compile_variant(replace(tiny, arguments=(("out", "pointer"), ("M", "int64"))), GFX1151)
    with pytest.raises(ObjectError, match="no kernel"):
        compile_variant(replace(tiny, symbol="other"), GFX1151)


def test_source_must_exist_and_target_must_be_amd(tiny):
    with pytest.raises(BuildError, match=r"tiny: no source csrc/hip/missing\.hip"):
        compile_variant(replace(tiny, source="csrc/hip/missing.hip"), GFX1151)
    with pytest.raises(BuildError, match="sm90 is not"):
        compile_variant(tiny, find_target("sm90"))


def test_macros_of_the_row_reach_the_source(tiny, tmp_path):
    (tmp_path / "hip" / "tiny.h").write_text("")
    assert compile_variant(replace(tiny, defines={"OFFSET": 3}), GFX1151).code
    with pytest.raises(CompileError):
        compile_variant(tiny, GFX1151)


def test_key_follows_source_header_macro_target_and_compiler(tiny, tmp_path):
    first = key_facts(tiny, GFX1151)
    assert list(source_digests(tiny)) == ["hip/tiny.h", "hip/tiny.hip"]
    assert key_facts(tiny, GFX1151) == first
    assert key_facts(tiny, GFX1201) != first
    assert key_facts(replace(tiny, defines={"X": 1}), GFX1151) != first
    assert key_facts(replace(tiny, conditions=("M <= 4",)), GFX1151) == first
    (tmp_path / "hip" / "tiny.h").write_text("#define OFFSET 2\n")
    assert key_facts(tiny, GFX1151) != first


def test_headers_of_the_kernels_are_in_their_key():
    assert list(source_digests(ROW)) == ["hip/k8x.h", "hip/rdna.h", "hip/w4a16_skinny.hip"]


def test_missing_rocm_compiler_names_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ToolchainError, match=r"no HIP compiler 'amdclang\+\+'.*pip install ziglang"):
        rocm_compiler()
    _script(tmp_path / "amdclang++", "exit 0")
    with pytest.raises(ToolchainError, match=r"has no ld\.lld beside it"):
        rocm_compiler()


def test_rocm_compiler_takes_the_same_steps(tiny, tmp_path):
    """A stand-in for amdclang++: the same clang under ROCm's name."""
    tools = tmp_path / "bin"
    tools.mkdir()
    zig = f"exec {sys.executable} -m ziglang"
    _script(tools / "amdclang++", f'{zig} clang "$@"')
    _script(tools / "ld.lld", f'{zig} ld.lld "$@"')
    built = compile_variant(tiny, GFX1151, rocm_compiler(str(tools / "amdclang++")))
    assert built.code == compile_variant(tiny, GFX1151).code
    assert list(built.compilers) == ["clang (ROCm)"]


def test_releases_of_rocm_with_one_clang_number_are_told_apart(tiny, tmp_path):
    """The manifest has the whole version, without a path; the key also what the programs are."""

    def compiler(name: str, clang: str, linker: str) -> HipCompiler:
        (tmp_path / name).mkdir()
        _script(tmp_path / name / "amdclang++", clang)
        _script(tmp_path / name / "ld.lld", linker)
        return rocm_compiler(str(tmp_path / name / "amdclang++"))

    version = 'echo "AMD clang version 21.0.0git (https://github.com/ROCm/llvm-project roc-7.{} 25)"'
    one = compiler("one", version.format(0), "exit 0")
    assert one.version == "21.0.0git (https://github.com/ROCm/llvm-project roc-7.0 25)"
    other_revision = compiler("two", version.format(1), "exit 0")
    other_clang = compiler("three", version.format(0) + "\n# another", "exit 0")
    other_linker = compiler("four", version.format(0), "exit 1")
    same = compiler("five", version.format(0), "exit 0")
    keys = [key_facts(tiny, GFX1151, each) for each in (one, other_revision, other_clang, other_linker)]
    assert all(keys.count(key) == 1 for key in keys)
    assert key_facts(tiny, GFX1151, same) == keys[0]


def test_clang_that_is_started_by_a_wrapper_is_in_the_key(tiny, tmp_path):
    _script(tmp_path / "amdclang++", 'echo "AMD clang version 21.0.0"')
    _script(tmp_path / "ld.lld", "exit 0")
    _script(tmp_path / "clang", "exit 0")
    first = key_facts(tiny, GFX1151, rocm_compiler(str(tmp_path / "amdclang++")))
    _script(tmp_path / "clang", "exit 1")
    compile_hip._digests.cache_clear()  # in a build a process asks once
    assert key_facts(tiny, GFX1151, rocm_compiler(str(tmp_path / "amdclang++"))) != first


def test_version_holds_no_path(tiny, tmp_path):
    _script(tmp_path / "clang", 'echo "clang version 21.1.0 (/home/someone/llvm-project abc123)"')
    assert HipCompiler("x", (str(tmp_path / "clang"),), ("ld.lld",)).version == "21.1.0 (llvm-project abc123)"


def test_environment_chooses_the_compiler(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("GRISTMILL_HIP_COMPILER", str(tmp_path / "amdclang++"))
    with pytest.raises(ToolchainError, match="no HIP compiler"):
        compile_variant(tiny, GFX1151)
    with pytest.raises(ToolchainError, match="no HIP compiler"):
        key_facts(tiny, GFX1151)


def test_compiler_known_to_miscompile_is_refused(tiny, tmp_path):
    _script(tmp_path / "clang", 'echo "clang version 19.1.7 (somewhere)"')
    old = HipCompiler("clang (old)", (str(tmp_path / "clang"),), ("ld.lld",))
    with pytest.raises(ToolchainError, match=r"clang 19\.1\.7, which miscompiles cross-lane reads"):
        compile_variant(tiny, GFX1151, old)


def test_program_that_is_no_clang_is_refused(tiny, tmp_path):
    _script(tmp_path / "clang", "echo hello")
    with pytest.raises(ToolchainError, match="is not a clang: hello"):
        compile_variant(tiny, GFX1151, HipCompiler("x", (str(tmp_path / "clang"),), ("ld.lld",)))


def _script(path: Path, body: str) -> None:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    assert os.access(path, os.X_OK)
