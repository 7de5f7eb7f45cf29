"""The build cache: compiled objects by the digest of all that they depend on.

An entry is a folder with the object and a record of it. It is written under a temporary name, synced and
renamed whole, so that a reader sees all of it or none, and two writers of one key do no harm. What is read is
checked against the record; an entry that does not match is dropped, said so, and built again.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gristmill.aot.compiled_object import CompiledObject
from gristmill.aot.errors import BuildError

_OBJECT = "object"
_RECORD = "record.json"


class ObjectCache:
    """The cache below one folder.

    Parameters
    ----------
    folder : created when the first entry is stored
    report : gets a line for each damaged entry that was dropped
    """

    def __init__(self, folder: Path, report: Callable[[str], None]) -> None:
        self.folder = folder
        self.report = report

    def entry_folder(self, key: str) -> Path:
        return self.folder / key[:2] / key

    def load(self, key: str) -> CompiledObject | None:
        """The object of `key`; None when there is none, or a damaged one that was dropped.

        Raises
        ------
        BuildError : the entry may not be read, or is damaged and cannot be dropped
        """
        folder = self.entry_folder(key)
        try:
            # Asked first: a folder that is there is whole, one that was not may come while its files are looked for.
            if not folder.exists():
                return None
            record = json.loads((folder / _RECORD).read_bytes())
            code = (folder / _OBJECT).read_bytes()
        except FileNotFoundError:
            self._drop(key, "incomplete")
            return None
        except PermissionError as error:
            raise BuildError(
                f"cannot read the build cache {self.folder}: {error}; choose another with --cache"
            ) from None
        except (OSError, ValueError) as error:
            self._drop(key, f"unreadable: {error}")
            return None
        if not isinstance(record, dict) or record.get("digest") != _digest(key, code, record.get("facts")):
            self._drop(key, "its digest does not match its content")
            return None
        facts = record["facts"]
        return CompiledObject(
            code=code,
            symbol=facts["symbol"],
            threads=facts["threads"],
            dynamic_shared_bytes=facts["dynamic_shared_bytes"],
            compilers=facts["compilers"],
        )

    def store(self, key: str, compiled: CompiledObject) -> None:
        """Keep `compiled` under `key`; an entry that is already there stays, as it has the same content.

        Raises
        ------
        BuildError : the folder cannot be written
        """
        facts = {
            "symbol": compiled.symbol,
            "threads": compiled.threads,
            "dynamic_shared_bytes": compiled.dynamic_shared_bytes,
            "compilers": dict(compiled.compilers),
        }
        record = {"digest": _digest(key, compiled.code, facts), "facts": facts}
        final = self.entry_folder(key)
        try:
            final.parent.mkdir(parents=True, exist_ok=True)
            temporary = Path(tempfile.mkdtemp(prefix=".writing-", dir=self.folder))
            try:
                temporary.chmod(0o755)  # a cache may be shared; mkdtemp's folders are for their owner alone
                _write_synced(temporary / _OBJECT, compiled.code)
                _write_synced(temporary / _RECORD, json.dumps(record, indent=1, sort_keys=True).encode())
                _rename_unless_there(temporary, final)
                _sync_folder(final.parent)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
        except OSError as error:
            raise BuildError(
                f"cannot write the build cache {self.folder}: {error}; choose another with --cache"
            ) from None

    def _drop(self, key: str, why: str) -> None:
        """Take a damaged entry out of the way; by renaming first, so that no reader sees half of it."""
        folder = self.entry_folder(key)
        self.report(f"cache entry {folder} is damaged ({why}); dropped, will be built again")
        try:
            doomed = Path(tempfile.mkdtemp(prefix=".dropped-", dir=self.folder))
            try:
                folder.rename(doomed / key)
            except FileNotFoundError:
                pass  # another process dropped it first
            finally:
                shutil.rmtree(doomed, ignore_errors=True)
        except OSError as error:
            raise BuildError(f"cannot drop the damaged cache entry {folder}: {error}; remove it by hand") from None


def _digest(key: str, code: bytes, facts: Any) -> str:
    digest = hashlib.sha256(f"{key}\n{json.dumps(facts, sort_keys=True)}\n".encode())
    digest.update(code)
    return digest.hexdigest()


def _rename_unless_there(folder: Path, final: Path) -> None:
    """Rename `folder`, or leave it where `final` exists; that one may be dropped while we look."""
    while True:
        try:
            folder.rename(final)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        if final.is_dir():
            return


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
