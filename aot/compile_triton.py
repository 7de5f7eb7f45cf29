"""One Triton variant -> one code object, for a target that need not be there.

`triton.compile` with an explicit target asks no driver. What it adds to a kernel is two pointers behind the
declared arguments, scratch memory in which our kernels have no need: they are null at launch, and a kernel
that wants them is refused here.
"""

from __future__ import annotations

import hashlib
import importlib
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gristmill.aot import dual_issue
from gristmill.aot.code_object import check_object
from gristmill.aot.compiled_object import CompiledObject
from gristmill.aot.environment import compiler_environment
from gristmill.aot.errors import BuildError, CompileError
from gristmill.aot.targets import Target
from gristmill.kernels.variant import TritonVariant
from gristmill.manifest import Argument

# Fused multiply-add, unless a row says otherwise: Triton's default is about to change.
FP_FUSION = True

SCRATCH_ARGUMENTS = (Argument("global_scratch", "null"), Argument("profile_scratch", "null"))


def argument_layout(variant: TritonVariant) -> tuple[Argument, ...]:
    """The kernel's arguments in order, the two null scratch pointers included."""
    arguments = []
    for name, type_ in variant.signature.items():
        kind = "pointer" if type_.startswith("*") else {"i32": "int32", "i64": "int64"}.get(type_)
        if kind is None:
            raise BuildError(
                f"{variant.name}: argument {name!r} has type {type_!r}; a launch passes pointers, i32 and i64"
            )
        arguments.append(Argument(name, kind))
    return (*arguments, *SCRATCH_ARGUMENTS)


def compile_options(variant: TritonVariant) -> dict[str, Any]:
    """All options given to the compiler."""
    fixed = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    twice = fixed.keys() & variant.options.keys()
    if twice:
        raise BuildError(f"{variant.name}: options repeat {', '.join(sorted(twice))}")
    return {"enable_fp_fusion": FP_FUSION, **fixed, **variant.options}


def compile_variant(variant: TritonVariant, target: Target) -> CompiledObject:
    """Compile one variant; needs no GPU and leaves nothing on disk.

    Raises
    ------
    BuildError : the row does not fit its kernel or asks for what a launch cannot give
    ObjectError : what the compiler made is not what the row says
    Exception : whatever Triton raises for a kernel that does not compile
    """
    arguments = argument_layout(variant)
    options = compile_options(variant)
    with tempfile.TemporaryDirectory(prefix="gristmill-") as scratch, compiler_environment(Path(scratch)):
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource, make_backend

        gpu = GPUTarget(*target.triton)
        function = _kernel(variant)
        backend = make_backend(gpu)
        _check_options(variant, options, backend.parse_options({"enable_fp_fusion": FP_FUSION}))
        source = ASTSource(
            function,
            {name: variant.signature.get(name, "constexpr") for name in function.arg_names},
            dict(variant.constexprs),
            {(function.arg_names.index(name),): [["tt.divisibility", multiple]]
             for name, multiple in variant.divisibility.items()},
        )  # fmt: skip
        compiled = triton.compile(source, target=gpu, options=options)
        metadata = compiled.metadata._asdict()
        _check_launch(variant, metadata)
        code, assembly = compiled.kernel, compiled.asm["ptx" if target.backend == "cuda" else "amdgcn"]
        harmless = dual_issue.avoid_faults(assembly, target.arch, variant.name)
        if harmless != assembly:
            code, assembly = backend.make_hsaco(harmless, {}, backend.parse_options(options)), harmless
        result = CompiledObject(
            code=code,
            symbol=metadata["name"],
            threads=metadata["num_warps"] * target.warp_size,
            dynamic_shared_bytes=metadata["shared"],
            compilers={"triton": triton.__version__, **_assembler(target)},
            assembly=assembly,
        )
    check_object(result.code, target, result.symbol, arguments, result.threads)
    return result


def recipe_digests() -> dict[str, str]:
    """sha256 of the files that say how a kernel is compiled, by name: part of its key in the build cache."""
    files = (Path(__file__), Path(dual_issue.__file__))
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _kernel(variant: TritonVariant) -> Any:
    """The variant's kernel, after a check that its parameters are those of the row."""
    module = importlib.import_module(variant.module)
    function: Any = getattr(module, variant.function, None)
    if not hasattr(function, "arg_names"):
        raise BuildError(f"{variant.name}: {variant.module}.{variant.function} is not a @triton.jit function")
    names = list(function.arg_names)
    if sorted(names) != sorted([*variant.signature, *variant.constexprs]):
        raise BuildError(
            f"{variant.name}: {variant.function} takes {', '.join(names)}; the row gives arguments "
            f"{', '.join(variant.signature)} and constants {', '.join(variant.constexprs)}"
        )
    if [name for name in names if name in variant.signature] != list(variant.signature):
        raise BuildError(f"{variant.name}: signature is not in the order of {variant.function}: {', '.join(names)}")
    unknown = variant.divisibility.keys() - variant.signature.keys()
    if unknown:
        raise BuildError(f"{variant.name}: divisibility of {', '.join(sorted(unknown))}, which the signature lacks")
    return function


def _check_options(variant: TritonVariant, options: Mapping[str, Any], known: Any) -> None:
    """Triton drops options that its backend does not know; a misspelt one must not vanish."""
    for name in options:
        if not hasattr(known, name):
            raise BuildError(f"{variant.name}: the {known.backend_name} backend has no option {name!r}")


def _check_launch(variant: TritonVariant, metadata: Mapping[str, Any]) -> None:
    """Refuse kernels that need more than a plain launch with null scratch pointers."""
    for name in ("global_scratch_size", "profile_scratch_size"):
        if metadata.get(name):
            raise CompileError(
                f"{variant.name}: the kernel needs {metadata[name]} bytes of scratch memory ({name}); "
                "a launch passes a null pointer"
            )
    if metadata.get("num_ctas", 1) != 1:
        raise CompileError(f"{variant.name}: clusters of {metadata['num_ctas']} blocks; a launch has none")
    for name in ("launch_cooperative_grid", "launch_pdl", "tensordesc_meta"):
        if metadata.get(name):
            raise CompileError(f"{variant.name}: the kernel needs {name}; a launch does not give it")


def _assembler(target: Target) -> dict[str, str]:
    """The compiler behind Triton's own, as it names itself."""
    if target.backend == "cuda":
        from triton.backends.nvidia.compiler import get_ptxas

        return {"ptxas": get_ptxas(int(target.processor)).version}
    from triton.backends.amd.compiler import get_amd_codegen_revision

    return {"llvm": get_amd_codegen_revision()}
