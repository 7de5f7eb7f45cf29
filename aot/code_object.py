"""What a code object says of itself, the same for both vendors, and the checks it must pass to be shipped."""

from __future__ import annotations

import importlib.util
import re
import struct
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from elftools.common.exceptions import ELFError
from gristmill.aot.amdgpu_code_object import CodeObject, CodeObjectError
from gristmill.aot.cubin import CubinError, read_cubin
from gristmill.aot.errors import ObjectError
from gristmill.aot.targets import Target
from gristmill.manifest import Argument

ARGUMENT_BYTES = {"pointer": 8, "null": 8, "int64": 8, "int32": 4}

# Folders that only a build machine has; a path below one of them has no place in what we ship.
_PATHS = re.compile(
    rb"/(?:home|root|tmp|usr|opt|var|mnt|srv|Users|builds?|work|workspace)/[\x21-\x7e]{3,}|[A-Z]:\\[\w\\]{3,}"
)


@dataclass(frozen=True, slots=True)
class ObjectFacts:
    """One kernel, as its code object describes it."""

    arch: str
    argument_bytes: tuple[int, ...]
    max_threads: int
    static_shared_bytes: int
    resources: Mapping[str, int]


def read_facts(code: bytes, kind: str, symbol: str) -> ObjectFacts:
    """Read the kernel `symbol` of a code object.

    `resources`, for each thread: `registers`; `spills`, the bytes of memory that it needs for what the
    registers do not hold; `code_bytes` of the whole kernel. For hsaco also `scalar_registers` and
    `scalar_spills` per wave (the latter go to lanes of vector registers, not to memory).

    Raises
    ------
    ObjectError : not an object of `kind`, or it has no such kernel
    """
    try:
        if kind == "cubin":
            cubin = read_cubin(code, symbol)
            return ObjectFacts(
                arch=cubin.arch,
                argument_bytes=cubin.argument_bytes,
                max_threads=1024,
                static_shared_bytes=cubin.static_shared_bytes,
                resources={
                    "registers": cubin.registers,
                    "spills": cubin.local_bytes,
                    "code_bytes": cubin.code_bytes,
                },
            )
        hsaco = CodeObject.parse(code)
        kernel = hsaco.kernel(symbol)
    except (CubinError, CodeObjectError) as error:
        raise ObjectError(str(error)) from None
    except (ELFError, LookupError, TypeError, ValueError, struct.error) as error:
        raise ObjectError(f"a damaged {kind}: {type(error).__name__}: {error}") from None
    if kernel.hidden_args:
        names = ", ".join(sorted({argument.value_kind for argument in kernel.hidden_args}))
        raise ObjectError(f"{symbol} takes hidden arguments, which a launch does not give: {names}")
    if kernel.uses_dynamic_stack:
        raise ObjectError(f"{symbol} uses a dynamic stack")
    return ObjectFacts(
        arch=hsaco.arch,
        argument_bytes=tuple(argument.size for argument in kernel.explicit_args),
        max_threads=kernel.max_threads,
        static_shared_bytes=kernel.group_segment_bytes,
        resources={
            "registers": kernel.vgpr_count,
            "spills": kernel.private_segment_bytes,
            "scalar_registers": kernel.sgpr_count,
            "scalar_spills": kernel.sgpr_spills,
            "code_bytes": kernel.code_bytes,
        },
    )


def check_object(code: bytes, target: Target, symbol: str, arguments: Sequence[Argument], threads: int) -> ObjectFacts:
    """Check a code object against its variant and return what it says of itself.

    Raises
    ------
    ObjectError : another target, symbol, argument list or block size than the variant's, or an absolute path
    """
    facts = read_facts(code, target.kind, symbol)
    if facts.arch != target.arch:
        raise ObjectError(f"the object is for {facts.arch}, not for {target.arch}")
    expected = tuple(ARGUMENT_BYTES[argument.type] for argument in arguments)
    if facts.argument_bytes != expected:
        raise ObjectError(f"{symbol} takes arguments of {facts.argument_bytes} bytes, its row says {expected}")
    if threads > facts.max_threads:
        raise ObjectError(f"{symbol} is compiled for blocks of {facts.max_threads} threads, its row says {threads}")
    check_paths(code, f"the object of {symbol}", build_machine_folders())
    return facts


def build_machine_folders() -> tuple[Path, ...]:
    """Folders whose names must not be in what we ship: home, working folder, packages, our own sources."""
    folders = [Path.home(), Path.cwd(), Path(__file__).parent, Path(sysconfig.get_paths()["purelib"])]
    triton = importlib.util.find_spec("triton")
    if triton is not None and triton.origin is not None:
        folders.append(Path(triton.origin).parent)
    return tuple(folder for folder in folders if len(folder.parts) > 1)


def check_paths(data: bytes, what: str, folders: Iterable[Path] = ()) -> None:
    """Raise ObjectError when `data` holds an absolute path: one of `folders`, or one that looks like any."""
    for folder in folders:
        if str(folder).encode() in data:
            raise ObjectError(f"{what} holds the path {folder}")
    found = _PATHS.search(data)
    if found:
        raise ObjectError(f"{what} holds the path {found[0][:80].decode('ascii', 'replace')}")
