"""Runs a command with a read-only file system, no network and a uid that nobody has: python sandbox.py UID COMMAND...

As root it takes mount and network namespaces of its own and then becomes UID. Where that uid could not read the Python
that runs here, and for anyone but root, user namespaces do the same: the command sees itself as UID, and has no right
that its user does not have. Exit code 77 and a sentence on standard error: the kernel does not allow it.
"""

from __future__ import annotations

import ctypes
import os
import stat
import sys
from pathlib import Path

FORBIDDEN = 77

CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWNET = 0x00020000, 0x10000000, 0x40000000
MS_REC, MS_PRIVATE, MS_REMOUNT, MS_BIND = 0x4000, 0x40000, 32, 4096
# Options of a mount that has to keep them when it is mounted again.
MS_OPTIONS = {"ro": 1, "nosuid": 2, "nodev": 4, "noexec": 8, "noatime": 1024, "nodiratime": 2048, "relatime": 1 << 21}
MS_RDONLY = MS_OPTIONS["ro"]

# No files lie there; a driver's library names its threads through /proc.
KERNEL_FILE_SYSTEMS = ("proc", "sysfs", "cgroup", "cgroup2", "devpts", "mqueue", "debugfs", "tracefs", "securityfs")

_libc = ctypes.CDLL(None, use_errno=True)


def enter(uid: int) -> None:
    """Put this process into the sandbox; OSError where the kernel does not allow it."""
    as_root = os.getuid() == 0 and all(map(_readable_by_all, (sys.prefix, sys.base_prefix, Path(__file__).parent)))
    if not as_root:
        _new_user(0)
    _call("unshare", CLONE_NEWNS | CLONE_NEWNET)
    _call("mount", None, b"/", None, MS_REC | MS_PRIVATE, None)
    for mount in _mounts():
        options = sum(MS_OPTIONS.get(option, 0) for option in mount[5].split(","))
        kind = mount[mount.index("-") + 1]
        if kind not in KERNEL_FILE_SYSTEMS and os.path.exists(mount[4]):
            _call("mount", None, mount[4].encode(), None, MS_REMOUNT | MS_BIND | MS_RDONLY | options, None)
    if as_root:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    else:
        _new_user(uid)


def _new_user(uid: int) -> None:
    """A user namespace in which this user is `uid`."""
    outside = os.getuid(), os.getgid()
    _call("unshare", CLONE_NEWUSER)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{uid} {outside[0]} 1")
    Path("/proc/self/gid_map").write_text(f"{uid} {outside[1]} 1")


def _mounts() -> list[list[str]]:
    rows = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    for row in rows:
        row[4] = row[4].encode().decode("unicode_escape")  # a blank is \040
    return rows


def _readable_by_all(folder: str | Path) -> bool:
    wanted = stat.S_IROTH | stat.S_IXOTH
    resolved = Path(folder).resolve()
    return all(part.stat().st_mode & wanted == wanted for part in (resolved, *resolved.parents))


def _call(name: str, *arguments: object) -> None:
    if getattr(_libc, name)(*arguments):
        code = ctypes.get_errno()
        raise OSError(code, f"{name}{arguments}: {os.strerror(code)}")


if __name__ == "__main__":
    try:
        enter(int(sys.argv[1]))
    except OSError as error:
        print(f"the kernel does not allow a sandbox here: {error}", file=sys.stderr)
        sys.exit(FORBIDDEN)
    os.execv(sys.argv[2], sys.argv[2:])
