"""The C++ sources behind a variant: where they are, what they include, what specialises them, what they take."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

import gristmill.csrc
from gristmill.aot.errors import BuildError
from gristmill.kernels.variant import CxxVariant
from gristmill.manifest import Argument

CSRC = Path(gristmill.csrc.__file__).parent

# Where an included name is looked for, after the folder of the file that includes it.
INCLUDE_FOLDERS = ("include",)

_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


def source_file(variant: CxxVariant) -> Path:
    """The variant's source on this machine; BuildError when there is none."""
    path = CSRC / variant.source.removeprefix("csrc/")
    if not path.is_file():
        raise BuildError(f"{variant.name}: no source {variant.source}")
    return path


def headers(path: Path) -> Mapping[str, Path]:
    """All that `path` includes with quotes, itself or through its headers: name as included -> file."""
    found: dict[str, Path] = {}
    waiting = [path]
    while waiting:
        including = waiting.pop()
        for name in _INCLUDE.findall(including.read_text()):
            if name in found:
                continue
            candidates = [including.parent / name, *(CSRC / folder / name for folder in INCLUDE_FOLDERS)]
            file = next((candidate for candidate in candidates if candidate.is_file()), None)
            if file is None:
                raise BuildError(f'{including.name} includes "{name}", which is not in csrc')
            found[name] = file
            waiting.append(file)
    return dict(sorted(found.items()))


def source_digests(variant: CxxVariant) -> Mapping[str, str]:
    """sha256 of the variant's source and of each header it includes, by path below csrc."""
    path = source_file(variant)
    files = {path, *headers(path).values()}
    return {file.relative_to(CSRC).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(files)}


def macros(variant: CxxVariant) -> tuple[str, ...]:
    """The variant's macros as compiler options, in the order of their names."""
    return tuple(f"-D{name}={value}" for name, value in sorted(variant.defines.items()))


def argument_layout(variant: CxxVariant) -> tuple[Argument, ...]:
    """The kernel's arguments in order."""
    return tuple(Argument(name, type_) for name, type_ in variant.arguments)
