"""What each compiler makes of a variant."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CompiledObject:
    """A code object and what a launch of its kernel needs to know."""

    code: bytes
    symbol: str
    threads: int  # per block
    dynamic_shared_bytes: int
    compilers: Mapping[str, str]  # compiler -> version
    assembly: str = ""  # PTX or AMD assembly, for people and tests; not kept in the cache
