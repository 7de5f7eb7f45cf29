import errno
import hashlib
import importlib
import json
import os
import subprocess
import sys

import pytest
from gristmill import packs
from gristmill.errors import DamagedPackError, ManifestError, NoPackError, PackError
from sample_pack import CODE, manifest, write_pack


@pytest.fixture(autouse=True)
def no_installed_packs(monkeypatch):
    monkeypatch.setattr(packs, "NAMESPACE", "gristmill_packs_of_nobody")


def test_pack_on_the_path_is_found_and_its_object_read(tmp_path, monkeypatch):
    write_pack(tmp_path)
    monkeypatch.setenv("GRISTMILL_PACK_PATH", str(tmp_path))
    pack = packs.find_pack("gfx1151")
    (entry,) = pack.manifest.entries.values()
    assert pack.read_object(entry) == CODE
    assert packs.installed_archs() == ["gfx1151"]
    assert pack.verified() == {}


def test_family_member_takes_the_familys_pack(tmp_path, monkeypatch):
    write_pack(tmp_path, manifest(arch="sm80", kind="cubin"))
    monkeypatch.setenv("GRISTMILL_PACK_PATH", str(tmp_path))
    for arch in ("sm80", "sm86", "sm87", "sm89"):
        assert packs.find_pack(arch).manifest.arch == "sm80"
    with pytest.raises(NoPackError):
        packs.find_pack("sm90")


def test_no_pack_names_the_pip_line(tmp_path, monkeypatch):
    write_pack(tmp_path)
    monkeypatch.setenv("GRISTMILL_PACK_PATH", str(tmp_path))
    with pytest.raises(NoPackError, match=r"pip install gristmill-gfx1201\. Packs found: gfx1151"):
        packs.find_pack("gfx1201")
    with pytest.raises(NoPackError, match="no pack is made for gfx906"):
        packs.find_pack("gfx906")


@pytest.mark.parametrize("code", [CODE[:-1], b"", CODE + b"\0", bytes([CODE[0] ^ 1]) + CODE[1:]])
def test_altered_object_is_refused(tmp_path, code):
    pack = packs.Pack.open(write_pack(tmp_path, code=code))
    with pytest.raises(DamagedPackError, match=rf"{len(code)} bytes with sha256 .* reinstall gristmill-gfx1151"):
        pack.read_object(*pack.manifest.entries.values())


def test_missing_object_is_refused(tmp_path):
    folder = write_pack(tmp_path)
    pack = packs.Pack.open(folder)
    for path in (folder / "objects").iterdir():
        path.unlink()
    with pytest.raises(DamagedPackError, match="No such file"):
        pack.read_object(*pack.manifest.entries.values())


def test_damage_on_the_path_is_not_mended_by_pip(tmp_path, monkeypatch):
    monkeypatch.setenv("GRISTMILL_PACK_PATH", str(tmp_path))
    folder = write_pack(tmp_path)
    (folder / "objects" / object_of(folder).name).write_bytes(b"other")
    with pytest.raises(DamagedPackError, match=rf"the manifest says \w+; build the pack anew or remove {folder}$"):
        read_object(folder)


def test_what_is_no_damage_is_not_mended_by_pip(tmp_path, monkeypatch):
    pack = packs.Pack.open(write_pack(tmp_path))

    monkeypatch.setattr(packs, "_read", refuse_with(errno.EMFILE))
    with pytest.raises(DamagedPackError, match=r"hsaco: Too many open files$"):
        pack.read_object(*pack.manifest.entries.values())


@pytest.mark.parametrize("code", [errno.EACCES, errno.ENAMETOOLONG])
def test_root_that_cannot_be_entered(code, tmp_path, monkeypatch):
    """Tests may run as root, who can enter any; a name that is too long is as real for everyone."""
    root = tmp_path / ("x" * 300)
    if code == errno.EACCES:
        root = tmp_path
        for name in ("listdir", "scandir", "stat"):
            monkeypatch.setattr(os, name, refuse_with(code))
    monkeypatch.setenv("GRISTMILL_PACK_PATH", str(root))
    with pytest.raises(PackError, match=f"{root}: {os.strerror(code)}"):
        packs.find_pack("gfx1151")


def refuse_with(code):
    def refuse(*_, **__):
        raise OSError(code, os.strerror(code))

    return refuse


def test_folder_and_manifest_must_agree(tmp_path, monkeypatch):
    write_pack(tmp_path).rename(tmp_path / "gfx1201")
    monkeypatch.setenv("GRISTMILL_PACK_PATH", str(tmp_path))
    with pytest.raises(ManifestError, match="the folder says gfx1201, the manifest gfx1151"):
        packs.find_pack("gfx1201")


def test_damaged_record_of_verification_is_refused(tmp_path):
    folder = write_pack(tmp_path)
    (folder / "verified.json").write_text("[")
    with pytest.raises(ManifestError, match=r"verified\.json"):
        packs.Pack.open(folder).verified()


def object_of(folder):
    (path,) = (folder / "objects").iterdir()
    return path


def read_object(folder):
    pack = packs.Pack.open(folder)
    return pack.read_object(*pack.manifest.entries.values())


def test_object_behind_a_symbolic_link_is_not_followed(tmp_path):
    """Not even where what it leads to is right: a link can lead out of the pack."""
    path = object_of(write_pack(tmp_path))
    path.rename(tmp_path / "outside")
    path.symlink_to(tmp_path / "outside")
    with pytest.raises(DamagedPackError, match="is a symbolic link, a pack must hold its files itself; reinstall"):
        read_object(tmp_path / "gfx1151")


def test_folder_of_objects_behind_a_symbolic_link_is_not_followed(tmp_path):
    folder = write_pack(tmp_path)
    (folder / "objects").rename(tmp_path / "outside")
    (folder / "objects").symlink_to(tmp_path / "outside")
    with pytest.raises(DamagedPackError, match="objects is a symbolic link"):
        read_object(folder)


@pytest.mark.parametrize("name", ["manifest.json", "verified.json"])
def test_manifest_and_records_behind_a_symbolic_link_are_not_followed(name, tmp_path):
    folder = write_pack(tmp_path)
    (folder / "verified.json").write_text("{}")
    (folder / name).rename(tmp_path / "outside")
    (folder / name).symlink_to(tmp_path / "outside")
    with pytest.raises(ManifestError, match=f"{name}: {name} is a symbolic link"):
        packs.Pack.open(folder).verified()


def test_pack_whose_folder_is_reached_by_a_link_is_read(tmp_path):
    write_pack(tmp_path / "elsewhere")
    (tmp_path / "gfx1151").symlink_to(tmp_path / "elsewhere" / "gfx1151")
    assert read_object(tmp_path / "gfx1151") == CODE


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/../../../secret"])
def test_no_object_outside_the_pack_is_read_whatever_the_manifest_says(name, tmp_path):
    """The parser refuses such a digest; the reader does not rely on it."""
    folder = write_pack(tmp_path)
    (folder / "secret.hsaco").write_text("secret")
    pack = packs.Pack.open(folder)
    (entry,) = pack.manifest.entries.values()
    with pytest.raises(DamagedPackError, match="leads out of the pack"):
        pack.read_object(entry._replace(object=name))


@pytest.mark.parametrize("place", ["manifest.json", "objects"])
def test_pipe_in_a_pack_does_not_wait_for_its_writer(place, tmp_path):
    folder = write_pack(tmp_path)
    path = object_of(folder) if place == "objects" else folder / place
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ManifestError if place == "manifest.json" else DamagedPackError, match="not a regular file"):
        read_object(folder)


@pytest.mark.parametrize(("place", "most"), [("manifest.json", "16777216"), ("objects", "67108864")])
def test_file_of_absurd_size_is_refused_before_it_is_read(place, most, tmp_path):
    folder = write_pack(tmp_path)
    os.truncate(object_of(folder) if place == "objects" else folder / place, 2**40)
    error = ManifestError if place == "manifest.json" else DamagedPackError
    with pytest.raises(error, match=f"1099511627776 bytes, more than {most}"):
        read_object(folder)


@pytest.mark.parametrize(
    "record",
    [
        {"worst_error_over_bound": -1.0},
        {"worst_error_over_bound": float("nan")},
        {"cases": 0},
        {"how": "hope"},
        {"on": "\x1b[2J"},
    ],
)
def test_record_that_is_no_verification_is_refused(record, tmp_path):
    folder = write_pack(tmp_path)
    (entry,) = packs.Pack.open(folder).manifest.entries.values()
    good = {"object": entry.object, "on": "a device", "how": "silicon", "cases": 1, "worst_error_over_bound": 0.5}
    (folder / "verified.json").write_text(json.dumps({"entries": {entry.name: good}}))
    assert packs.Pack.open(folder).verified()
    (folder / "verified.json").write_text(json.dumps({"entries": {entry.name: good | record}}))
    with pytest.raises(ManifestError, match=r"not a record of a verification|must be printable"):
        packs.Pack.open(folder).verified()


@pytest.mark.parametrize("usable", ["OpenSSL", "Python's own", "nothing but hashlib"])
def test_sha256_by_whatever_python_has(usable, monkeypatch):
    expected = hashlib.sha256(b"abc").hexdigest()
    if usable != "OpenSSL":
        monkeypatch.delitem(sys.modules, "_hashlib")
    if usable == "nothing but hashlib":
        monkeypatch.setattr(packs.importlib, "import_module", lambda name: importlib.__import__(f"no{name}"))
    assert packs.sha256(b"abc") == expected


def test_hashlib_is_not_loaded_for_a_pack(tmp_path):
    program = (
        "import sys, pathlib; from gristmill.packs import Pack; pack = Pack.open(pathlib.Path(sys.argv[1]));"
        "pack.read_object(*pack.manifest.entries.values()); assert '_hashlib' not in sys.modules, 'loaded'"
    )
    subprocess.run([sys.executable, "-c", program, write_pack(tmp_path)], check=True)


def test_a_launch_needs_no_pathlib():
    """It takes 4 ms to import, for which the first result of a process would wait."""
    modules = "gristmill.prepared, gristmill.preloading, gristmill.placement, gristmill.drivers.cuda"
    program = f"import sys, numpy; sys.modules['pathlib'] = None; import {modules}"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
