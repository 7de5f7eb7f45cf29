import pytest
from gristmill import packs
from gristmill.errors import DamagedPackError, ManifestError, NoPackError
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
