"""`doctor` on machines that are made up: drivers, packs, and the kernel's list of AMD chips."""

import errno
import json
import os
import shlex

import fake_driver
import pytest
from gristmill import drivers, packs
from gristmill.cli import main
from gristmill.errors import NoDriverError
from gristmill.kfd import arch_of, arch_of_override, chips
from gristmill.packs import Pack
from gristmill.verified import Record, dump_records


class Missing:
    """A driver whose library is not there."""

    def __init__(self, reason):
        self.reason = reason

    def unavailable_reason(self):
        return self.reason

    def device_count(self):
        raise NoDriverError(self.reason)


@pytest.fixture
def machine(monkeypatch, tmp_path, capsys):
    """Describes a machine and runs `doctor` on it; returns exit code, JSON and text."""
    monkeypatch.setattr(packs, "NAMESPACE", "gristmill_packs_of_nobody")
    monkeypatch.setenv("GRISTMILL_PACK_PATH", str(tmp_path / "packs"))
    monkeypatch.delenv("HSA_OVERRIDE_GFX_VERSION", raising=False)

    def run(cuda=(), hip=(), amd_chips=(), override=None):
        for name, archs in (("cuda", cuda), ("hip", hip)):
            driver = fake_driver.FakeDriver(name, archs) if archs else Missing(f"no {name} library; install it")
            monkeypatch.setitem(drivers._drivers, name, driver)
        for i, version in enumerate((0, *amd_chips)):
            node = tmp_path / "kfd" / str(i)
            node.mkdir(parents=True)
            (node / "properties").write_text(f"cpu_cores_count {0 if version else 16}\ngfx_target_version {version}\n")
        if override:
            monkeypatch.setenv("HSA_OVERRIDE_GFX_VERSION", override)
        arguments = ["doctor", "--kfd", str(tmp_path / "kfd")]
        code = main([*arguments, "--json"])
        answer = json.loads(capsys.readouterr().out)
        assert main(arguments) == code == (0 if answer["can_run"] else 1)
        return code, answer, capsys.readouterr().out

    def pack(arch, verified=True, root=tmp_path / "packs"):
        folder = fake_driver.usual_pack(root, arch)
        if verified:
            entries = Pack.open(folder).manifest.entries.values()
            records = {entry.name: Record(entry.object, "a device", "silicon", 9, 0.5) for entry in entries}
            (folder / "verified.json").write_bytes(dump_records(records))
        return folder

    def install(arch):
        """A pack that pip installed, not one below GRISTMILL_PACK_PATH."""
        folder = pack(arch, root=tmp_path / "site" / "gristmill_packs_of_a_test")
        monkeypatch.setattr(packs, "NAMESPACE", folder.parent.name)
        monkeypatch.syspath_prepend(tmp_path / "site")
        return folder

    run.pack, run.install = pack, install
    return run


def devices(answer, driver):
    (row,) = [row for row in answer["drivers"] if row["driver"] == driver]
    return row["devices"]


def test_all_is_well(machine):
    folder = machine.pack("sm90")
    code, answer, text = machine(cuda=("sm90",))
    assert code == 0
    (device,) = devices(answer, "cuda")
    assert (device["device"], device["arch"], device["problem"]) == ("cuda:0", "sm90", None)
    assert device["pack"] == str(folder)
    assert answer["fixes"] == answer["mismatches"] == []
    (pack,) = answer["packs"]
    assert (pack["arch"], pack["entries"], pack["verified"], pack["problem"]) == ("sm90", 12, 12, None)
    for line in ("driver cuda: usable, version 0.0", "driver hip: no hip library; install it",
                 "cuda:0: fake sm90, sm90, 232448 bytes", f"runs with {folder}", "something can run here"):  # fmt: skip
        assert line in text


def test_entries_that_nobody_has_run(machine):
    """The command that is named is the one that mends it, on the device that the pack serves."""
    folder = machine.pack("sm90", verified=False)
    code, answer, text = machine(cuda=("sm75", "sm90"))
    assert code == 0
    unserved, unrecorded = answer["mismatches"]
    assert unserved.startswith("cuda:0: no pack is made for sm75")
    assert unrecorded == (
        "pack sm90: 12 of 12 entries have no record of a run that passed; "
        f"run: gristmill selftest --device cuda:1 --record {folder}/verified.json"
    )
    assert f"12 entries, 0 with a record of a run that passed, in {folder}" in text
    assert main(shlex.split(unrecorded.partition("run: gristmill ")[2])) == 0
    assert Pack.open(folder).verified().keys() == Pack.open(folder).manifest.entries.keys()


def test_no_device(machine):
    machine.pack("sm90")
    code, answer, text = machine()
    assert code == 1
    assert answer["fixes"] == ["for cuda: no cuda library; install it", "for hip: no hip library; install it"]
    assert text.index("nothing can run here") < text.index("fix: for cuda")


def test_no_device_but_a_chip_that_the_kernel_sees(machine):
    """Without ROCm and hip-python the pip line is still exact."""
    code, answer, text = machine(amd_chips=(110501, 120001))
    assert code == 1
    assert answer["amd_chips"] == ["gfx1151", "gfx1201"]
    assert answer["fixes"][0] == "pip install 'gristmill[rocm]' gristmill-gfx1151 gristmill-gfx1201"
    assert "AMD chips that the kernel sees: gfx1151, gfx1201" in text


def test_no_pack(machine):
    code, answer, text = machine(cuda=("sm89",))
    assert code == 1
    assert answer["fixes"] == ["pip install gristmill-sm80"]
    assert "cannot run: no pack for sm89 is installed" in text
    assert text.endswith("nothing can run here\nfix: pip install gristmill-sm80\n")


def test_no_pack_is_made(machine):
    code, answer, _ = machine(cuda=("sm75",))
    assert code == 1
    assert "no pack is made for sm75; archs served: gfx1151" in devices(answer, "cuda")[0]["problem"]
    assert answer["fixes"] == []


def test_one_of_two_devices_can_run(machine):
    machine.pack("sm90")
    code, answer, _ = machine(cuda=("sm75", "sm90"))
    assert code == 0
    assert [device["problem"] is None for device in devices(answer, "cuda")] == [False, True]
    assert "cuda:0: no pack is made for sm75" in answer["mismatches"][0]


def test_pack_that_serves_nothing(machine):
    machine.pack("sm90")
    folder = machine.pack("gfx1201")
    code, answer, _ = machine(cuda=("sm90",))
    assert code == 0
    assert answer["mismatches"] == [f"pack gfx1201 in {folder} serves no device here"]


@pytest.mark.parametrize(
    ("old", "new", "problem", "fix"),
    [
        (b'"schema": 1', b'"schema": 2', "is newer than", "pip install --upgrade gristmill"),
        (b'"schema": 1', b'"schema": 0', "is older than", "pip install --upgrade gristmill-sm90"),
        (b'"schema": 1', b'"schema": ', "not JSON", "pip install --force-reinstall --no-deps gristmill-sm90"),
    ],
)
def test_pack_of_another_time_or_damaged(machine, old, new, problem, fix):
    manifest = machine.install("sm90") / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(old, new))
    code, answer, _ = machine(cuda=("sm90",))
    assert code == 1
    assert problem in answer["packs"][0]["problem"]
    assert problem in devices(answer, "cuda")[0]["problem"]
    assert answer["fixes"] == [fix]


def damage(folder, what):
    path = {"object": next(folder.glob("objects/*")), "records": folder / "verified.json",
            "manifest": folder / "manifest.json"}[what]  # fmt: skip
    path.write_bytes(b"not what it was")
    return path


@pytest.mark.parametrize("what", ["object", "records", "manifest"])
def test_pack_with_a_damaged_file(machine, what):
    path = damage(machine.install("sm90"), what)
    code, answer, _ = machine(cuda=("sm90",))
    assert code == 1
    assert str(path) in devices(answer, "cuda")[0]["problem"]
    assert answer["fixes"] == ["pip install --force-reinstall --no-deps gristmill-sm90"]


@pytest.mark.parametrize("what", ["object", "records", "manifest"])
def test_pip_does_not_mend_what_lies_below_the_pack_path(machine, what):
    """It is found before the pack that pip would install."""
    machine.install("sm80")
    folder = machine.pack("sm80")
    damage(folder, what)
    code, answer, _ = machine(cuda=("sm86",))
    assert code == 1
    assert answer["fixes"] == [f"gristmill build --arch sm80 --out {folder.parent}; or remove {folder}"]


def test_folder_that_cannot_be_read_does_not_hide_the_next(machine, tmp_path, monkeypatch):
    really = os.listdir

    def listdir(path="."):
        if path == str(tmp_path / "locked"):
            raise PermissionError(errno.EACCES, "Permission denied")
        return really(path)

    locked = tmp_path / "locked"
    locked.mkdir()
    folders = [machine.pack("sm90"), machine.install("gfx1201")]
    monkeypatch.setenv("GRISTMILL_PACK_PATH", f"{locked}:{tmp_path / 'packs'}")
    monkeypatch.setattr(os, "listdir", listdir)
    code, answer, text = machine(cuda=("sm90",))
    assert code == 1  # a call would fail as `find_pack` does
    assert [(pack["folder"], pack["problem"]) for pack in answer["packs"]] == [(str(f), None) for f in folders]
    assert f"mismatch: packs cannot be read: {locked}: Permission denied" in text
    assert devices(answer, "cuda")[0]["problem"] == f"{locked}: Permission denied"
    assert answer["fixes"] == [f"let this process read {locked}, or take it off GRISTMILL_PACK_PATH"]


def test_override_that_hides_the_chip(machine):
    """A pack for what ROCm reports is there; it is not for the chip, so nothing can run; the fix says what would."""
    machine.pack("gfx1151")
    code, answer, text = machine(hip=("gfx1151",), amd_chips=(120001,), override="11.5.1")
    assert code == 1
    (device,) = devices(answer, "hip")
    assert (device["arch"], device["chip"]) == ("gfx1151", "gfx1201")
    assert device["problem"].startswith("ROCm reports gfx1151, the chip is gfx1201")
    assert answer["fixes"] == ["unset HSA_OVERRIDE_GFX_VERSION; pip install gristmill-gfx1201"]
    expected = "HSA_OVERRIDE_GFX_VERSION=11.5.1 makes ROCm report gfx1151; the chips are gfx1201"
    assert any(expected in line for line in answer["mismatches"])
    assert "mismatch: hip:0: ROCm reports gfx1151" in text


def test_override_of_a_chip_that_is_not_served(machine):
    code, answer, _ = machine(hip=("gfx1100",), amd_chips=(110003,), override="11.0.0")
    assert code == 1
    assert answer["fixes"] == ["unset HSA_OVERRIDE_GFX_VERSION"]


def test_override_with_the_truth(machine):
    machine.pack("gfx1151")
    code, answer, _ = machine(hip=("gfx1151",), amd_chips=(110501,), override="11.5.1")
    assert code == 0
    assert answer["mismatches"] == []


def test_override_where_the_kernel_tells_nothing(machine):
    machine.pack("gfx1151")
    code, answer, _ = machine(hip=("gfx1151",), override="11.5.1")
    assert code == 0
    assert "the true chip is not known" in answer["mismatches"][0]


def test_devices_in_another_order_than_the_kernels(machine):
    for arch in ("gfx1151", "gfx1201"):
        machine.pack(arch)
    code, answer, _ = machine(hip=("gfx1201", "gfx1151"), amd_chips=(110501, 120001))
    assert code == 0
    assert answer["mismatches"] == []


def test_one_override_over_two_chips(machine):
    machine.pack("gfx1151")
    code, answer, _ = machine(hip=("gfx1151", "gfx1151"), amd_chips=(110501, 110003), override="11.5.1")
    assert code == 0
    assert [device["problem"] is None for device in devices(answer, "hip")] == [True, False]


def test_names_of_chips(tmp_path):
    assert [arch_of(v) for v in (110501, 120001, 90010, 90402, 100306)] == [
        "gfx1151", "gfx1201", "gfx90a", "gfx942", "gfx1036",
    ]  # fmt: skip
    assert [arch_of_override(text) for text in ("11.0.0", "9.0.10", "11", "11.x.0", "")] == [
        "gfx1100", "gfx90a", None, None, None,
    ]  # fmt: skip
    assert chips(tmp_path / "nowhere") == []
    for name, text in (("0", "gfx_target_version 0\n"), ("10", "gfx_target_version 120001\n"), ("2", "junk\n\n"),
                       ("3", "gfx_target_version 110501\nsimd_count 80\n")):  # fmt: skip
        (tmp_path / name).mkdir()
        (tmp_path / name / "properties").write_text(text)
    (tmp_path / "4").mkdir()  # without properties
    assert chips(tmp_path) == ["gfx1151", "gfx1201"]
