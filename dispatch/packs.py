"""Packs on disk: where they are found, how they are read. Read-only; nothing here writes.

Folders are strings: the first result of a process would wait 4 ms for pathlib.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import stat
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gristmill.device import PACKS_FOR_ARCH
from gristmill.environment import pack_path
from gristmill.errors import DamagedPackError, ManifestError, NoPackError, PackError
from gristmill.manifest import MAX_BYTES, Entry, Manifest
from gristmill.named_tuple import NamedTuple

if TYPE_CHECKING:
    from gristmill.verified import Record

NAMESPACE = "gristmill_packs"
MANIFEST_FILE = "manifest.json"
RECORDS_FILE = "verified.json"

# The most that is read of a code object: the largest wheel has 10 MB.
MAX_OBJECT_BYTES = 64 * 2**20

# What an OSError says of a file that another installation would bring in order; not "too many open files".
_DAMAGE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EINVAL, errno.EFBIG)


class Pack(NamedTuple):
    """One pack: a folder with `manifest.json`, `objects/` and, once it has been verified, `verified.json`."""

    folder: str
    manifest: Manifest

    @staticmethod
    def open(folder: str | os.PathLike[str]) -> Pack:
        """Read the manifest of `folder`; its entries are checked, and the code objects read, when they are needed."""
        folder = os.fspath(folder)
        path = f"{folder}/{MANIFEST_FILE}"
        try:
            data = _read(folder, (MANIFEST_FILE,), MAX_BYTES)
        except OSError as error:
            raise ManifestError(f"{path}: {error.strerror}") from None
        return Pack(folder, Manifest.open(data, origin=path))

    def object_bytes(self, entry: Entry) -> int:
        """Size of the entry's code object; DamagedPackError when it is not there."""
        path = f"{self.folder}/objects/{entry.object}.{self.manifest.kind}"
        try:
            return os.lstat(path).st_size
        except OSError as error:
            raise self._damaged(f"{path}: {error.strerror}", error.errno) from None

    def read_object(self, entry: Entry) -> bytes:
        """The bytes of the entry's code object; DamagedPackError unless their sha256 is the manifest's."""
        name = f"{entry.object}.{self.manifest.kind}"
        path = f"{self.folder}/objects/{name}"
        try:
            code = _read(self.folder, ("objects", name), MAX_OBJECT_BYTES)
        except OSError as error:
            raise self._damaged(f"{path}: {error.strerror}", error.errno) from None
        digest = sha256(code)
        if digest != entry.object:
            raise self._damaged(f"{path}: {len(code)} bytes with sha256 {digest}, the manifest says {entry.object}")
        return code

    def verified(self) -> dict[str, Record]:
        """Per entry on what it was run and how far it was off; only records of the objects that are in the pack."""
        from gristmill.verified import read_records, records_of  # a launch needs none of it

        path = f"{self.folder}/{RECORDS_FILE}"
        try:
            data = _read(self.folder, (RECORDS_FILE,), MAX_BYTES)
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise ManifestError(f"{path}: {error.strerror}") from None
        return records_of(self.manifest.entries, read_records(data, path))

    def _damaged(self, what: str, code: int | None = None) -> DamagedPackError:
        """The error for `what`, with its fix unless `code` is of an OSError that has nothing to do with the pack."""
        if code is not None and code not in _DAMAGE:
            return DamagedPackError(what)
        if os.path.dirname(self.folder) in pack_path():
            return DamagedPackError(f"{what}; build the pack anew or remove {self.folder}")
        return DamagedPackError(f"{what}; reinstall {distribution_name(self.manifest.arch)}")


def sha256(data: bytes) -> str:
    """The sha256 of `data` in hex.

    By OpenSSL, as `hashlib` has it, where that is loaded already, as it is beside torch. To load it takes longer than
    Python's own, which is at hand, needs for all that a model loads.
    """
    if "_hashlib" not in sys.modules:
        for name in ("_sha2", "_sha256"):  # from 3.12 on, before
            try:
                return importlib.import_module(name).sha256(data).hexdigest()
            except ImportError:
                continue
    import hashlib

    return hashlib.sha256(data).hexdigest()


def distribution_name(arch: str) -> str:
    """Name of the wheel that holds the pack of `arch`."""
    return f"gristmill-{arch}"


def pack_folders() -> list[str]:
    """Folders of all packs, in the order of `pack_roots`.

    Raises
    ------
    PackError : a root that is there cannot be read
    """
    return [folder for root in pack_roots() for folder in folders_in(root)]


def pack_roots() -> list[str]:
    """Where packs are looked for: first GRISTMILL_PACK_PATH, then the installed portions of `gristmill_packs`."""
    roots = pack_path()
    spec = importlib.util.find_spec(NAMESPACE)
    if spec is not None and spec.submodule_search_locations is not None:
        roots += spec.submodule_search_locations
    return roots


def folders_in(root: str) -> list[str]:
    """Folders of the packs in `root`, none where it is not there; PackError when it cannot be read."""
    try:
        return [folder for name in sorted(os.listdir(root)) if _has_manifest(folder := f"{root}/{name}")]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise PackError(f"{root}: {error.strerror}") from None


def _has_manifest(folder: str) -> bool:
    try:
        return stat.S_ISREG(os.stat(f"{folder}/{MANIFEST_FILE}").st_mode)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return False
        raise


def installed_archs() -> list[str]:
    """Archs of the packs found, by folder name, first found first."""
    return list(dict.fromkeys(map(os.path.basename, pack_folders())))


def find_pack(arch: str, folders: Sequence[str | os.PathLike[str]] | None = None) -> Pack:
    """The pack that serves devices of `arch`.

    Raises
    ------
    NoPackError : none is installed; the message has the pip line
    ManifestError : the pack found cannot be read
    """
    folders = pack_folders() if folders is None else [os.fspath(folder) for folder in folders]
    serving = PACKS_FOR_ARCH.get(arch, ())
    for pack_arch in serving:
        for folder in folders:
            if os.path.basename(folder) == pack_arch:
                pack = Pack.open(folder)
                if pack.manifest.arch != pack_arch:
                    raise ManifestError(f"{folder}: the folder says {pack_arch}, the manifest {pack.manifest.arch}")
                return pack
    found = ", ".join(dict.fromkeys(map(os.path.basename, folders))) or "none"
    if not serving:
        raise NoPackError(
            f"no pack is made for {arch}; archs served: {', '.join(PACKS_FOR_ARCH)}. Packs found: {found}"
        )
    raise NoPackError(
        f"no pack for {arch} is installed; run: pip install {distribution_name(serving[0])}. Packs found: {found}"
    )


def _read(folder: str, names: Sequence[str], most: int) -> bytes:
    """The content of a file below the pack in `folder`; OSError, also for more than `most` bytes.

    The folder may be reached by a link. What lies in it may not be one: a pack holds its files itself, and a link could
    lead out of it, or to a device that never ends.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for name in names:
            if name != os.path.basename(name):
                raise OSError(errno.EINVAL, "leads out of the pack")
            try:
                inner = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=handle)
            except OSError as error:
                if error.errno == errno.ELOOP:
                    raise OSError(
                        errno.ELOOP, f"{name} is a symbolic link, a pack must hold its files itself"
                    ) from None
                raise
            os.close(handle)
            handle = inner
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        if status.st_size > most:
            raise OSError(errno.EFBIG, f"{status.st_size} bytes, more than {most}")
        data = os.read(handle, status.st_size)
        while len(data) < status.st_size and (rest := os.read(handle, status.st_size - len(data))):
            data += rest
        return data
    finally:
        os.close(handle)
