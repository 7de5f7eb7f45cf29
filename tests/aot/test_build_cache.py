"""The build cache: whole entries or none, damage never trusted, many writers at once."""

from __future__ import annotations

import errno
import json
import multiprocessing
from pathlib import Path

import pytest
from gristmill.aot.cache import ObjectCache
from gristmill.aot.compiled_object import CompiledObject
from gristmill.aot.errors import BuildError

KEY = "ab" * 32
COMPILED = CompiledObject(b"\x7fELF" + bytes(range(256)) * 40, "kernel", 128, 4096, {"triton": "3.9.0"})


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def cache(tmp_path, said) -> ObjectCache:
    return ObjectCache(tmp_path / "cache", said.append)


def test_empty_cache_has_nothing_and_writes_nothing(cache, said):
    assert cache.load(KEY) is None
    assert not said
    assert not cache.folder.exists()


def test_stored_is_loaded(cache, said):
    cache.store(KEY, COMPILED)
    assert cache.load(KEY) == COMPILED
    assert cache.load("cd" * 32) is None
    assert not said


def test_second_store_keeps_the_first(cache):
    cache.store(KEY, COMPILED)
    before = (cache.entry_folder(KEY) / "object").stat().st_ino
    cache.store(KEY, COMPILED)
    assert (cache.entry_folder(KEY) / "object").stat().st_ino == before
    assert [path.name for path in cache.folder.iterdir()] == [KEY[:2]], "temporary folders stayed"


def _alter_object(folder: Path) -> None:
    data = bytearray((folder / "object").read_bytes())
    data[1000] ^= 1
    (folder / "object").write_bytes(data)


def _cut_object(folder: Path) -> None:
    (folder / "object").write_bytes(COMPILED.code[:-1])


def _alter_fact(folder: Path) -> None:
    record = json.loads((folder / "record.json").read_text())
    record["facts"]["dynamic_shared_bytes"] = 0
    (folder / "record.json").write_text(json.dumps(record))


def _cut_record(folder: Path) -> None:
    (folder / "record.json").write_text((folder / "record.json").read_text()[:40])


def _other_record(folder: Path) -> None:
    (folder / "record.json").write_text("[]")


def _remove_object(folder: Path) -> None:
    (folder / "object").unlink()


DAMAGES = [_alter_object, _cut_object, _alter_fact, _cut_record, _other_record, _remove_object]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_entry_is_dropped_with_a_message_and_can_be_stored_again(damage, cache, said):
    cache.store(KEY, COMPILED)
    damage(cache.entry_folder(KEY))
    assert cache.load(KEY) is None
    assert len(said) == 1
    assert f"{KEY} is damaged" in said[0]
    assert not cache.entry_folder(KEY).exists()
    cache.store(KEY, COMPILED)
    assert cache.load(KEY) == COMPILED
    assert len(said) == 1


def test_entry_under_another_key_is_damage(cache, said):
    cache.store(KEY, COMPILED)
    other = "ab" + "cd" * 31
    cache.entry_folder(KEY).rename(cache.entry_folder(other))
    assert cache.load(other) is None
    assert "its digest does not match its content" in said[0]


@pytest.mark.parametrize("look", ["exists", "read_bytes"])
def test_entry_that_comes_while_a_reader_looks_is_not_damage(look, cache, said, monkeypatch):
    """Another process renames the entry into place just before the reader's look."""
    real = getattr(Path, look)

    def late(path: Path):
        monkeypatch.undo()
        ObjectCache(cache.folder, said.append).store(KEY, COMPILED)
        return real(path)

    monkeypatch.setattr(Path, look, late)
    assert cache.load(KEY) in (COMPILED, None)
    assert not said


def test_entries_may_be_read_by_others(cache):
    cache.store(KEY, COMPILED)
    assert cache.entry_folder(KEY).stat().st_mode & 0o777 == 0o755


def test_entry_that_may_not_be_read_is_not_damage(cache, said, monkeypatch):
    cache.store(KEY, COMPILED)

    def refuse(path: Path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(BuildError, match=r"cannot read the build cache .*cache: .*Permission denied.*--cache"):
        cache.load(KEY)
    monkeypatch.undo()
    assert cache.load(KEY) == COMPILED
    assert not said


def test_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(BuildError, match=r"cannot write the build cache .*file.*; choose another with --cache"):
        ObjectCache(tmp_path / "file", print).store(KEY, COMPILED)


def _write_and_read(folder: Path, times: int) -> int:
    """Store, load and sometimes damage one entry; the number of loads that gave something else."""
    cache = ObjectCache(folder, lambda line: None)
    wrong = 0
    for turn in range(times):
        cache.store(KEY, COMPILED)
        if turn % 5 == 4 and folder.name == "damaged":
            (cache.entry_folder(KEY) / "record.json").unlink(missing_ok=True)
        wrong += cache.load(KEY) not in (COMPILED, None)
    return wrong


@pytest.mark.parametrize("name", ["whole", "damaged"])
def test_writers_at_once_leave_one_whole_entry(name, tmp_path):
    folder = tmp_path / name
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        wrong = pool.starmap(_write_and_read, [(folder, 25)] * 4)
    assert wrong == [0] * 4
    cache = ObjectCache(folder, lambda line: None)
    cache.load(KEY)
    cache.store(KEY, COMPILED)
    assert cache.load(KEY) == COMPILED
    assert [path.name for path in folder.iterdir()] == [KEY[:2]], "temporary folders stayed"
