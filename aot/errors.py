"""Errors of the build: what failed, and what would work."""

from __future__ import annotations

from gristmill.errors import GristmillError


class BuildError(GristmillError):
    """A pack cannot be built from what was asked for."""


class ToolchainError(BuildError):
    """A compiler or build tool is missing; the message names the package to install."""


class CompileError(BuildError):
    """A variant does not compile; the message has its name and the compiler's words."""


class ObjectError(BuildError):
    """A code object is not what its variant says (target, symbol, arguments), or holds a path."""


class WheelError(BuildError):
    """A wheel cannot be made, or is larger than its budget."""


class BenchmarkError(GristmillError):
    """A program of the benchmark fails, or gives a wrong result."""
