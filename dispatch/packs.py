"""Packs on disk: where they are found, how they are read. Read-only; nothing here writes."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from gristmill.device import PACKS_FOR_ARCH
from gristmill.environment import pack_path
from gristmill.errors import DamagedPackError, ManifestError, NoPackError
from gristmill.manifest import Entry, Manifest

if TYPE_CHECKING:
    from gristmill.verified import Record

NAMESPACE = "gristmill_packs"


class Pack(NamedTuple):
    """One pack: a folder with `manifest.json`, `objects/` and, once it has been verified, `verified.json`."""

    folder: Path
    manifest: Manifest

    @staticmethod
    def open(folder: Path) -> Pack:
        """Read and check the manifest of `folder`; the code objects are read when they are loaded."""
        path = folder / "manifest.json"
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ManifestError(f"{path}: {error.strerror}") from None
        return Pack(folder, Manifest.parse(data, origin=str(path)))

    def object_path(self, entry: Entry) -> Path:
        """The file of the entry's code object."""
        return self.folder / "objects" / f"{entry.object}.{self.manifest.kind}"

    def object_bytes(self, entry: Entry) -> int:
        """Size of the entry's code object; DamagedPackError when it is not there."""
        path = self.object_path(entry)
        try:
            return path.stat().st_size
        except OSError as error:
            raise self._damaged(f"{path}: {error.strerror}") from None

    def read_object(self, entry: Entry) -> bytes:
        """The bytes of the entry's code object; DamagedPackError unless their sha256 is the manifest's."""
        path = self.object_path(entry)
        try:
            code = path.read_bytes()
        except OSError as error:
            raise self._damaged(f"{path}: {error.strerror}") from None
        digest = hashlib.sha256(code).hexdigest()
        if digest != entry.object:
            raise self._damaged(f"{path}: {len(code)} bytes with sha256 {digest}, the manifest says {entry.object}")
        return code

    def verified(self) -> dict[str, Record]:
        """Per entry on what it was run and how far it was off; only records of the objects that are in the pack."""
        from gristmill.verified import read_records, records_of  # a launch needs none of it

        path = self.folder / "verified.json"
        if not path.exists():
            return {}
        return records_of(self.manifest.entries, read_records(path.read_bytes(), str(path)))

    def _damaged(self, what: str) -> DamagedPackError:
        return DamagedPackError(f"{what}; reinstall {distribution_name(self.manifest.arch)}")


def distribution_name(arch: str) -> str:
    """Name of the wheel that holds the pack of `arch`."""
    return f"gristmill-{arch}"


def pack_folders() -> list[Path]:
    """Folders of all packs: first those on GRISTMILL_PACK_PATH, then the installed portions of `gristmill_packs`."""
    roots = list(pack_path())
    spec = importlib.util.find_spec(NAMESPACE)
    if spec is not None and spec.submodule_search_locations is not None:
        roots += [Path(location) for location in spec.submodule_search_locations]
    folders = []
    for root in roots:
        if not root.is_dir():
            continue
        folders += sorted(child for child in root.iterdir() if (child / "manifest.json").is_file())
    return folders


def installed_archs() -> list[str]:
    """Archs of the packs found, by folder name, first found first."""
    return list(dict.fromkeys(folder.name for folder in pack_folders()))


def find_pack(arch: str, folders: Sequence[Path] | None = None) -> Pack:
    """The pack that serves devices of `arch`.

    Raises
    ------
    NoPackError : none is installed; the message has the pip line
    ManifestError : the pack found cannot be read
    """
    folders = pack_folders() if folders is None else folders
    serving = PACKS_FOR_ARCH.get(arch, ())
    for pack_arch in serving:
        for folder in folders:
            if folder.name == pack_arch:
                pack = Pack.open(folder)
                if pack.manifest.arch != pack_arch:
                    raise ManifestError(f"{folder}: the folder says {pack_arch}, the manifest {pack.manifest.arch}")
                return pack
    found = ", ".join(dict.fromkeys(folder.name for folder in folders)) or "none"
    if not serving:
        raise NoPackError(
            f"no pack is made for {arch}; archs served: {', '.join(PACKS_FOR_ARCH)}. Packs found: {found}"
        )
    raise NoPackError(
        f"no pack for {arch} is installed; run: pip install {distribution_name(serving[0])}. Packs found: {found}"
    )
