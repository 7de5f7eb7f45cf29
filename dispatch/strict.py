"""Strict mode: whoever breaks the promise of no JIT, no child process, no network and no written file gets an error.

Off unless it is asked for: GRISTMILL_STRICT=1 in the environment when `gristmill` is imported, or `enable()`. While on,
StrictModeError is raised before any of this happens:

- an import of triton, `gristmill.aot` (the emulated driver is of it), `gristmill.kernels` or `gristmill.csrc`, found or
  not;
- a child process or an exec;
- a socket or a look-up of a host name;
- a file opened for writing, or anything else that changes the file system; Python's own bytecode files are switched
  off for as long.

"By the runtime" means: in a thread that has a function of `gristmill` on its stack, whether Gristmill does it or
something that Gristmill has called. Torch is the exception: what it does when Gristmill calls it, itself or by others,
is torch's own affair, be it an import, a file, a socket or a child process. Torch looks for triton, reads caches and
starts helpers at times of its own choosing: when it is imported, at the first use of a GPU, where your code has asked
for torch.compile and a layer of ours comes first. It does so in the same way with Gristmill or without, and nothing in
torch that Gristmill calls compiles (a test reads the sources for it). So going outwards from what happens, the first
function that is torch's or Gristmill's decides; a function of ours that torch calls is watched like any other.

What your own code does is left alone; `enable(whole_process=True)`, or GRISTMILL_STRICT=process, watches all,
torch too.

A finder on `sys.meta_path` sees imports, an audit hook (`sys.addaudithook`) nearly all else that Python code does;
`_posixsubprocess.fork_exec`, by which multiprocessing spawns without an event, is wrapped. Not seen are `os.mkfifo` and
`os.mknod`, which have no event, and what C code does behind Python's back: a driver library that opens its device
files, say. An audit hook can never be taken out again; it is put in at the first `enable()`, so that a process which
never asks pays nothing. One that has asked pays for a look into a table at each audit event; a call of a loaded kernel
raises one, for Python's `id`.
"""

from __future__ import annotations

import _posixsubprocess
import os
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from gristmill.environment import strict_scope
from gristmill.errors import StrictModeError

FORBIDDEN_IMPORTS = ("triton", "gristmill.aot", "gristmill.kernels", "gristmill.csrc")

# Audit events of the Python documentation, with what they stand for.
_EVENTS = {
    "open": "",  # the flags decide
    **dict.fromkeys(
        (
            "subprocess.Popen", "os.system", "os.fork", "os.forkpty", "os.exec", "os.posix_spawn", "os.spawn",
            "pty.spawn",
        ),
        "a child process",
    ),
    **dict.fromkeys(
        (
            "socket.__new__", "socket.bind", "socket.connect", "socket.getaddrinfo", "socket.gethostbyaddr",
            "socket.gethostbyname", "socket.getnameinfo", "socket.sendmsg", "socket.sendto",
        ),
        "a socket",
    ),
    **dict.fromkeys(
        (
            "os.chflags", "os.chmod", "os.chown", "os.link", "os.mkdir", "os.remove", "os.removexattr", "os.rename",
            "os.rmdir", "os.setxattr", "os.symlink", "os.truncate", "os.utime", "fcntl.flock", "fcntl.lockf",
            "sqlite3.connect", "tempfile.mkdtemp", "tempfile.mkstemp",
        ),
        "a change of the file system",
    ),
}  # fmt: skip
_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

MAX_VIOLATIONS = 100

violations: deque[str] = deque(maxlen=MAX_VIOLATIONS)
"""What has been refused since the first `enable()`: an error that a caller swallowed leaves its trace here."""

_on = False
_whole_process = False
_hooked = False
_bytecode_off_before = False


def enable(*, whole_process: bool = False) -> None:
    """Raise StrictModeError from now on.

    Parameters
    ----------
    whole_process : watch all code of the process, not only what runs beneath a function of `gristmill`
    """
    global _on, _whole_process, _hooked, _bytecode_off_before
    if not _hooked:
        sys.addaudithook(_hook)
        _hooked = True
    if not _on:
        _bytecode_off_before = sys.dont_write_bytecode
        sys.dont_write_bytecode = True
        sys.meta_path.insert(0, _finder)
        _posixsubprocess.fork_exec = _fork_exec
    _whole_process = whole_process
    _on = True


def disable() -> None:
    """Let everything through again."""
    global _on
    if _on:
        sys.dont_write_bytecode = _bytecode_off_before
        sys.meta_path.remove(_finder)
        _posixsubprocess.fork_exec = _plain_fork_exec
    _on = False


def enabled() -> bool:
    """Whether strict mode is on."""
    return _on


@contextmanager
def enforced(*, whole_process: bool = False) -> Iterator[None]:
    """Strict mode for the length of a `with` block, in all threads."""
    former = (_on, _whole_process)
    enable(whole_process=whole_process)
    try:
        yield
    finally:
        disable()
        if former[0]:
            enable(whole_process=former[1])


def enable_as_asked() -> None:
    """Do what GRISTMILL_STRICT says."""
    scope = strict_scope()
    if scope is not None:
        enable(whole_process=scope == "process")


class _Finder:
    """Finds no module, and refuses to look for some. The audit event "import" would miss `importlib.import_module`."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if any(name == root or name.startswith(root + ".") for root in FORBIDDEN_IMPORTS):
            _refuse(f"the import of {name}", sys._getframe(1))


_finder: Any = _Finder()


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if event not in _EVENTS or not _on:
        return
    if event != "open":
        _refuse(f"{_EVENTS[event]} ({' '.join([event, *map(repr, arguments[:1])])})", sys._getframe(1))
    elif arguments[2] & _WRITE_FLAGS:
        _refuse(f"opening {arguments[0]!r} for writing", sys._getframe(1))


_plain_fork_exec = _posixsubprocess.fork_exec


def _fork_exec(arguments: Any, *others: Any) -> int:
    if _on:  # whoever was imported meanwhile keeps this one
        _refuse(f"a child process (fork_exec {arguments!r})", sys._getframe(1))
    return _plain_fork_exec(arguments, *others)


def _refuse(what: str, frame: FrameType) -> None:
    """StrictModeError if `frame`, where `what` was asked for, is of the code that is watched."""
    culprit = _runtime_frame(frame) or (_outside_importlib(frame) if _whole_process else None)
    if culprit is None:
        return
    where = f"{culprit.f_globals.get('__name__')}:{culprit.f_lineno}"
    message = f"strict mode forbids {what}; it was asked for beneath {where}, in {culprit.f_code.co_name}"
    violations.append(message)
    raise StrictModeError(message)


def _outside_importlib(frame: FrameType) -> FrameType:
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith("importlib."):
        frame = frame.f_back
    return frame


def _runtime_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost function of `gristmill` among `frame` and its callers; None where one of torch is further in."""
    while frame is not None:
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if package == "torch":
            return None
        if package == "gristmill":
            return frame
        frame = frame.f_back
    return None
