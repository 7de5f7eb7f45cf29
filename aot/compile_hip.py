"""One C++ variant -> one code object for AMD, without ROCm, a GPU or root.

The clang of the PyPI package `ziglang` knows the amdgcn target, so a build needs nothing but pip. It compiles
in steps, since that clang cannot start its own linker for this target: HIP source -> LLVM IR -> assembly ->
object -> hsaco; `dual_issue` mends the assembly. The kernels use no ROCm header and no device library. ROCm's
own compiler takes the same steps when asked for.

Nothing of the build machine gets into the object: the compiler runs in the source's folder and sees relative
names.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from gristmill.aot import dual_issue
from gristmill.aot.code_object import check_object
from gristmill.aot.compiled_object import CompiledObject
from gristmill.aot.cxx_sources import argument_layout, macros, source_digests, source_file
from gristmill.aot.environment import child_environment, hip_compiler_program
from gristmill.aot.errors import BuildError, CompileError, ToolchainError
from gristmill.aot.targets import Target
from gristmill.aot.toolchain import files_digest, require
from gristmill.kernels.variant import CxxVariant

# Floating-point contraction is off: where a kernel wants a fused multiply-add it says so. Code object version
# 5, as Triton's are. No ident: it would name where the compiler came from. No cuid: it hashes paths of this
# machine.
FRONT_END = (
    "-x", "hip", "--offload-device-only", "-nogpuinc", "-nogpulib", "-std=c++17", "-O3", "-ffp-contract=off",
    "-mcode-object-version=5", "-fno-ident", "-fuse-cuid=none", "-Wall", "-Wextra", "-Werror",
)  # fmt: skip
BACK_END = ("--target=amdgcn-amd-amdhsa", "-mcode-object-version=5", "-nogpulib", "-O3")

# What would make a compiler's result depend on more than its arguments.
_STEERING = ("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "CCC_OVERRIDE_OPTIONS", "HIP_PATH", "ROCM_PATH",
             "HIP_CLANG_PATH", "HIP_DEVICE_LIB_PATH")  # fmt: skip

# clang 19 and older sink cross-lane reads behind a branch, so that switched-off lanes feed the sum
# (llvm-project pull request 142962); measured by running what they made.
OLDEST_CLANG = 21


@dataclass(frozen=True, slots=True)
class HipCompiler:
    """A clang and a linker for amdgcn, as command lines."""

    name: str  # what the manifest calls it
    clang: tuple[str, ...]
    linker: tuple[str, ...]

    @property
    def version(self) -> str:
        """Its number and what follows it: AMD keeps one number over several releases, told apart by the revision."""
        return _clang_version(self.clang)


def chosen_compiler() -> HipCompiler:
    """The compiler that the environment asks for, else ziglang's."""
    program = hip_compiler_program()
    return rocm_compiler(program) if program else ziglang_compiler()


def ziglang_compiler() -> HipCompiler:
    """The clang of the PyPI package ziglang; ToolchainError naming the package when it is not installed."""
    require({"ziglang": "ziglang"}, "compiling HIP kernels")
    zig = (sys.executable, "-m", "ziglang")
    return HipCompiler("clang (ziglang)", (*zig, "clang"), (*zig, "ld.lld"))


def rocm_compiler(program: str = "amdclang++") -> HipCompiler:
    """ROCm's clang, by path or by name on PATH; ToolchainError when it or its ld.lld is not there."""
    found = shutil.which(program)
    if found is None:
        raise ToolchainError(f"no HIP compiler {program!r}; install ROCm's rocm-llvm package, or: pip install ziglang")
    folder = Path(found).resolve().parent
    linker = folder / "ld.lld"
    if not linker.is_file():
        raise ToolchainError(
            f"the HIP compiler {found} has no ld.lld beside it in {folder}; install ROCm's rocm-llvm package"
        )
    return HipCompiler("clang (ROCm)", (found,), (str(linker),))


def compile_variant(variant: CxxVariant, target: Target, compiler: HipCompiler | None = None) -> CompiledObject:
    """Compile one variant; needs no GPU and leaves nothing on disk.

    Parameters
    ----------
    compiler : default `chosen_compiler()`

    Raises
    ------
    CompileError : the source does not compile; the message has the compiler's words
    ObjectError : the object is not what the row says
    ToolchainError : there is no compiler, or one known to miscompile
    """
    if target.backend != "hip":
        raise BuildError(f"{variant.name}: {variant.source} is HIP, {target.arch} is not")
    compiler = chosen_compiler() if compiler is None else compiler
    _check_version(compiler)
    source = source_file(variant)
    with tempfile.TemporaryDirectory(prefix="gristmill-") as folder:
        out = Path(folder)
        ir, assembly, part, code = (str(out / f"kernel.{suffix}") for suffix in ("ll", "s", "o", "hsaco"))
        machine = (*BACK_END, f"-mcpu={target.arch}")
        to_assembly = (
            (*compiler.clang, *FRONT_END, f"--offload-arch={target.arch}", *macros(variant),
             "-S", "-emit-llvm", source.name, "-o", ir),
            (*compiler.clang, *machine, "-S", ir, "-o", assembly),
        )  # fmt: skip
        to_object = (
            (*compiler.clang, *machine, "-c", assembly, "-o", part),
            (*compiler.linker, "-shared", part, "-o", code),
        )
        for step in to_assembly:
            _run(step, source.parent, variant)
        text = dual_issue.avoid_faults(Path(assembly).read_text(), target.arch, variant.name)
        Path(assembly).write_text(text)
        for step in to_object:
            _run(step, source.parent, variant)
        result = CompiledObject(
            code=Path(code).read_bytes(),
            symbol=variant.symbol,
            threads=variant.block[0] * variant.block[1] * variant.block[2],
            dynamic_shared_bytes=0,  # the row has a formula
            compilers={compiler.name: compiler.version},
            assembly=text,
        )
    check_object(result.code, target, result.symbol, argument_layout(variant), result.threads)
    return result


def key_facts(variant: CxxVariant, target: Target, compiler: HipCompiler | None = None) -> dict[str, object]:
    """All that the object depends on: what its key in the build cache is made of."""
    compiler = chosen_compiler() if compiler is None else compiler
    return {
        "target": target.arch,
        "source": variant.source,
        "symbol": variant.symbol,
        "defines": sorted(variant.defines.items()),
        "sources": source_digests(variant),
        "options": [*FRONT_END, *BACK_END],
        "recipe": [hashlib.sha256(Path(f).read_bytes()).hexdigest() for f in (__file__, dual_issue.__file__)],
        "compiler": compiler_identity(compiler),
    }


def compiler_identity(compiler: HipCompiler) -> dict[str, str]:
    """What tells this compiler from any other."""
    identity = {"name": compiler.name, "version": compiler.version}
    if "ziglang" in compiler.clang:
        return {**identity, "package": importlib.metadata.version("ziglang"), "files": files_digest("ziglang")}
    beside = Path(compiler.clang[0]).resolve().with_name("clang")  # which ROCm's amdclang++ starts
    return {**identity, **_digests((compiler.clang[0], str(beside), compiler.linker[0]))}


@lru_cache
def _digests(programs: tuple[str, ...]) -> dict[str, str]:
    """sha256 of those of `programs` that are there, by name."""
    files = [Path(program) for program in programs]
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files if file.is_file()}


def _check_version(compiler: HipCompiler) -> None:
    major = int(compiler.version.split(".")[0])
    if major < OLDEST_CLANG:
        raise ToolchainError(
            f"{compiler.name} is clang {compiler.version.split()[0]}, which miscompiles cross-lane reads; "
            f"clang {OLDEST_CLANG} or newer is needed: pip install ziglang"
        )


@lru_cache
def _clang_version(clang: tuple[str, ...]) -> str:
    process = subprocess.run([*clang, "--version"], capture_output=True, text=True, env=_environment(), check=False)
    found = re.search(r"clang version (\d+\.\d+\.\d+.*)", process.stdout)
    if process.returncode or found is None:
        words = (process.stdout + process.stderr).strip()[-500:]
        raise ToolchainError(f"{' '.join(clang)} is not a clang: {words or 'it said nothing'}")
    # Where it was built from a clone, the line has the clone's path: the name is enough, a manifest holds no path.
    return re.sub(r"(?<![^\s(])/(\S*/)?", "", found[1]).strip()


def _run(command: tuple[str, ...], folder: Path, variant: CxxVariant) -> None:
    process = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, errors="replace", env=_environment(), check=False
    )
    if process.returncode:
        words = (process.stderr + process.stdout).strip()
        raise CompileError(f"{variant.name}: {variant.source} does not compile\n{words or 'the compiler said nothing'}")


def _environment() -> dict[str, str]:
    return child_environment(without=_STEERING, LC_ALL="C")
