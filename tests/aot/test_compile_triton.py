"""One variant, one code object: right target, same bytes anywhere, no paths, and refusals that say why."""

from __future__ import annotations

import contextlib
import os
import random
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from gristmill.aot.code_object import check_object, check_paths, read_facts
from gristmill.aot.compile_triton import argument_layout, compile_variant
from gristmill.aot.errors import BuildError, CompileError, ObjectError
from gristmill.aot.targets import TARGETS, find_target
from tiny_rows import TINY

HERE = Path(__file__).parent
ALL = pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)


@ALL
def test_object_says_of_itself_what_its_row_says(target):
    compiled = compile_variant(TINY, target)
    facts = read_facts(compiled.code, target.kind, compiled.symbol)
    assert compiled.symbol == "tiny"
    assert compiled.threads == 2 * target.warp_size
    assert compiled.dynamic_shared_bytes > 0
    assert facts.arch == target.arch
    assert facts.argument_bytes == (8, 8, 8, 4, 8, 8, 8)
    assert facts.static_shared_bytes == 0
    assert facts.resources["registers"] > 0
    assert facts.resources["spills"] == 0
    assert facts.resources["code_bytes"] > 0
    assert compiled.compilers["triton"] == "3.9.0"
    assert [argument.type for argument in argument_layout(TINY)[-2:]] == ["null", "null"]


DIGEST = """
import hashlib, sys
from gristmill.aot.compile_triton import compile_variant
from gristmill.aot.targets import find_target
from tiny_rows import TINY
for arch in sys.argv[1:]:
    print(arch, hashlib.sha256(compile_variant(TINY, find_target(arch)).code).hexdigest())
"""


def digests_elsewhere(folder: Path, **environment: str) -> str:
    """Compile in a fresh process whose working, home, temporary and source folders all lie below `folder`."""
    for name in ("cwd", "home", "tmp", "src"):
        (folder / name).mkdir(parents=True)
    for name in ("tiny_kernels.py", "tiny_rows.py"):
        (folder / "src" / name).write_bytes((HERE / name).read_bytes())
    settings = {
        "HOME": str(folder / "home"),
        "TMPDIR": str(folder / "tmp"),
        "PYTHONPATH": str(folder / "src"),
    }
    result = subprocess.run(
        [sys.executable, "-c", DIGEST, *TARGETS],
        cwd=folder / "cwd",
        env={**os.environ, **settings, **environment},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert not list((folder / "home").iterdir()), "the compiler left files in HOME"
    assert not list((folder / "tmp").iterdir()), "the compiler left temporary files"
    return result.stdout


def test_same_bytes_in_other_surroundings(tmp_path):
    first = digests_elsewhere(tmp_path / "a")
    steering = {
        "TRITON_DISABLE_LINE_INFO": "0",
        "TRITON_DEFAULT_FP_FUSION": "0",
        "TRITON_FORCE_DISABLE_FP_FUSION": "1",
        "DISABLE_LLVM_OPT": "1",
        "DISABLE_PTXAS_OPT": "1",
        "PTXAS_OPTIONS": "--maxrregcount=32",
        "PYTHONHASHSEED": "7",
    }
    second = digests_elsewhere(tmp_path / "another" / "place", **steering)
    assert first.count("\n") == len(TARGETS)
    assert first == second


@ALL
def test_line_info_is_what_the_path_check_finds(target, monkeypatch):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    compiled = compile_variant(TINY, target)
    check_paths(compiled.code, "the object", [HERE])
    with tempfile.TemporaryDirectory() as scratch:
        monkeypatch.setenv("TRITON_CACHE_DIR", scratch)
        monkeypatch.setenv("TRITON_DISABLE_LINE_INFO", "0")
        import tiny_kernels

        signature = {name: TINY.signature.get(name, "constexpr") for name in tiny_kernels.tiny.arg_names}
        source = ASTSource(tiny_kernels.tiny, signature, dict(TINY.constexprs))
        options = {"num_warps": 2, "enable_fp_fusion": True}
        with_lines = triton.compile(source, target=GPUTarget(*target.triton), options=options).kernel
    with pytest.raises(ObjectError, match="holds the path"):
        check_paths(with_lines, "the object", [HERE])
    with pytest.raises(ObjectError, match="holds the path /"):
        check_paths(b"\0" * 8 + b"/home/somebody/kernel.py\0", "the object")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"options": {"waves_per_ue": 2}}, "cuda backend has no option 'waves_per_ue'"),
        ({"options": {"num_warps": 8}}, "options repeat num_warps"),
        ({"signature": {**TINY.signature, "N": "fp32"}}, "'N' has type 'fp32'"),
        ({"constexprs": {}}, "tiny takes x, qweight, out, M, N, BLOCK; the row gives"),
        ({"signature": dict(reversed(TINY.signature.items()))}, "not in the order of tiny: x, qweight"),
        ({"divisibility": {"K": 16}}, "divisibility of K, which the signature lacks"),
        ({"function": "no_such"}, "tiny_kernels.no_such is not a @triton.jit function"),
        ({"options": {"num_ctas": 2}}, "clusters of 2 blocks; a launch has none"),
        ({"options": {"launch_pdl": True}}, "needs launch_pdl"),
    ],
)
def test_row_that_a_launch_cannot_serve_is_refused(change, message):
    with pytest.raises(BuildError, match=re.escape(message)):
        compile_variant(replace(TINY, **change), TARGETS["sm90"])


def test_kernel_that_wants_scratch_memory_is_refused():
    with pytest.raises(CompileError, match=r"needs 128 bytes of scratch memory \(global_scratch_size\)"):
        compile_variant(replace(TINY, function="wants_scratch"), TARGETS["sm90"])


def test_unknown_arch_is_refused():
    with pytest.raises(BuildError, match="cannot build for 'gfx900'; known archs: gfx1151, gfx1201, sm80, sm90"):
        find_target("gfx900")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": TARGETS["gfx1201"]}, "the object is for gfx1151, not for gfx1201"),
        ({"target": TARGETS["sm90"]}, "ELF machine is EM_AMDGPU, not CUDA"),
        ({"symbol": "other"}, "no kernel 'other' in this gfx1151 code object; it has \\['tiny'\\]"),
        ({"arguments": argument_layout(TINY)[:-1]}, "takes arguments of .* bytes, its row says"),
        ({"threads": 128}, "compiled for blocks of 64 threads, its row says 128"),
        ({"code": b"\x7fELF"}, "not an ELF file"),
    ],
)
def test_object_that_is_not_its_row_is_refused(change, message):
    target = TARGETS["gfx1151"]
    compiled = compile_variant(TINY, target)
    right = {
        "code": compiled.code,
        "target": target,
        "symbol": "tiny",
        "arguments": argument_layout(TINY),
        "threads": 64,
    }
    check_object(**right)
    with pytest.raises(ObjectError, match=message):
        check_object(**{**right, **change})


@pytest.mark.parametrize("arch", ["gfx1201", "sm90"])
def test_cut_or_altered_object_is_read_or_refused_but_nothing_else(arch):
    compiled = compile_variant(TINY, TARGETS[arch])
    kind, size = TARGETS[arch].kind, len(compiled.code)
    for end in range(0, size, 501):
        with pytest.raises(ObjectError):
            read_facts(compiled.code[:end], kind, compiled.symbol)
    dice = random.Random(arch)
    for _ in range(300):
        altered = bytearray(compiled.code)
        altered[dice.randrange(size)] ^= 1 << dice.randrange(8)
        with contextlib.suppress(ObjectError):
            read_facts(bytes(altered), kind, compiled.symbol)


def test_environment_is_given_back(monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", "mine")
    monkeypatch.setenv("LLVM_IR_ENABLE_DUMP", "0")
    before = dict(os.environ)
    compile_variant(TINY, TARGETS["sm80"])
    assert dict(os.environ) == before
