import fake_driver
import gristmill.drivers
import pytest
from gristmill.arrays import Device
from gristmill.errors import (
    DamagedPackError,
    DriverError,
    ManifestError,
    NoDeviceError,
    NoPackError,
    NotLoadedError,
    PackSchemaError,
)
from gristmill.formula import Formula
from gristmill.loader import LoadedKernel, Loader, forget_loaders, loader_for, max_dynamic_shared_bytes
from gristmill.manifest import Argument, Rule
from gristmill.packs import Pack
from together import together

DEVICE = Device("fake", 0)


@pytest.fixture
def driver(monkeypatch, tmp_path):
    driver = fake_driver.FakeDriver(archs=("sm90", "sm89", "sm75"))
    monkeypatch.setitem(gristmill.drivers._drivers, "fake", driver)
    monkeypatch.setenv("GRISTMILL_PACK_PATH", str(tmp_path / "packs"))
    yield driver
    driver.failing.clear()
    forget_loaders()


def loader_of(folder, driver) -> Loader:
    return Loader(DEVICE, driver, driver.device_facts(0), Pack.open(folder))


def two_entries_of_one_object(tmp_path):
    rows = [(fake_driver.entry(name, b"code"), b"code") for name in ("first", "second")]
    rows.append((fake_driver.entry("other", b"other code"), b"other code"))
    return fake_driver.write_pack(tmp_path / "packs", "sm90", rows, (Rule(Formula("1"), ("first",), "test"),))


def test_entries_of_one_object_share_a_module(driver, tmp_path):
    loader = loader_of(two_entries_of_one_object(tmp_path), driver)
    entries = loader.pack.manifest.entries
    first = loader.kernel(entries["first"])
    assert loader.kernel(entries["first"]) is first
    loader.kernel(entries["second"])
    loader.kernel(entries["other"])
    assert [code for _, code in driver.called("load_module")] == [b"code", b"other code"]
    assert [symbol for _, _, symbol, _ in driver.called("function")] == [
        "symbol_first",
        "symbol_second",
        "symbol_other",
    ]
    assert loader.loaded() == ["first", "second", "other"]


def test_twenty_threads_load_once(driver, tmp_path):
    driver.load_seconds = 0.05
    loader = loader_of(two_entries_of_one_object(tmp_path), driver)
    entry = loader.pack.manifest.entries["first"]
    found = []
    together(20, lambda thread: found.append(loader.kernel(entry)))
    assert len(found) == 20
    assert len(set(map(id, found))) == 1
    assert len(driver.called("load_module")) == 1


def test_load_during_capture_is_refused_before_the_stream_is_touched(driver, tmp_path):
    loader = loader_of(two_entries_of_one_object(tmp_path), driver)
    entry = loader.pack.manifest.entries["first"]
    driver.capturing.add(5)
    with pytest.raises(NotLoadedError, match=r"first is not loaded on fake:0 .* captured; call gristmill\.preload"):
        loader.kernel(entry, stream=5)
    assert driver.calls == []
    loader.kernel(entry)
    assert loader.kernel(entry, stream=5).entry is entry


def test_altered_object(driver, tmp_path):
    folder = two_entries_of_one_object(tmp_path)
    loader = loader_of(folder, driver)
    entry = loader.pack.manifest.entries["first"]
    path = folder / "objects" / f"{entry.object}.cubin"
    path.write_bytes(b"c0de")
    with pytest.raises(DamagedPackError, match=r"4 bytes with sha256 .*, the manifest says .*build the pack anew"):
        loader.kernel(entry)
    path.write_bytes(b"cod")
    with pytest.raises(DamagedPackError, match="3 bytes with sha256"):
        loader.kernel(entry)
    path.unlink()
    with pytest.raises(DamagedPackError, match="No such file or directory; build the pack anew"):
        loader.kernel(entry)
    assert driver.calls == []
    path.write_bytes(b"code")
    loader.kernel(entry)


def test_failed_load_is_tried_again(driver, tmp_path):
    loader = loader_of(two_entries_of_one_object(tmp_path), driver)
    entry = loader.pack.manifest.entries["first"]
    driver.failing["load_module"] = "no memory left"
    with pytest.raises(DriverError, match="no memory left"):
        loader.kernel(entry)
    driver.failing = {"function": "no such symbol"}
    with pytest.raises(DriverError, match="no such symbol"):
        loader.kernel(entry)
    driver.failing = {}
    loader.kernel(entry)
    assert len(driver.called("load_module")) == 2  # the module that lacked the function is kept and used


def test_unload(driver, tmp_path):
    loader = loader_of(two_entries_of_one_object(tmp_path), driver)
    for entry in loader.pack.manifest.entries.values():
        loader.kernel(entry)
    loader.unload()
    assert len(driver.called("unload_module")) == 2
    assert loader.loaded() == []


def test_shared_memory_that_a_kernel_may_ask_for(driver):
    facts = driver.device_facts(0)
    constant = fake_driver.entry("a", b"", dynamic_shared_bytes=Formula("70000"))
    assert max_dynamic_shared_bytes(constant, facts) == 70000
    growing = fake_driver.entry("a", b"", dynamic_shared_bytes=Formula("M * 2"), static_shared_bytes=1024)
    assert max_dynamic_shared_bytes(growing, facts) == facts.lds_bytes_per_block - 1024


def test_an_argument_named_twice_is_refused():
    entry = fake_driver.entry("a", b"", arguments=(Argument("M", "int32"), Argument("M", "int32")))
    with pytest.raises(ManifestError, match="entry a: an argument is named twice"):
        LoadedKernel(entry, None)


def test_pack_by_device(driver, tmp_path):
    fake_driver.usual_pack(tmp_path / "packs", "sm90")
    fake_driver.usual_pack(tmp_path / "packs", "sm80")
    assert loader_for(Device("fake", 0)).pack.manifest.arch == "sm90"
    assert loader_for(Device("fake", 1)).pack.manifest.arch == "sm80"
    assert loader_for(Device("fake", 0)) is loader_for(Device("fake", 0))


def test_no_pack(driver, tmp_path):
    with pytest.raises(NoPackError, match="no pack for sm90 is installed; run: pip install gristmill-sm90"):
        loader_for(Device("fake", 0))
    with pytest.raises(NoPackError, match="no pack is made for sm75; archs served: gfx1151"):
        loader_for(Device("fake", 2))
    with pytest.raises(NoDeviceError, match="no device fake:9"):
        loader_for(Device("fake", 9))
    fake_driver.usual_pack(tmp_path / "packs", "sm90")  # installing it is enough
    assert loader_for(Device("fake", 0)).pack.manifest.arch == "sm90"


def test_pack_of_a_newer_schema(driver, tmp_path):
    manifest = fake_driver.usual_pack(tmp_path / "packs") / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"schema": 1', b'"schema": 2'))
    with pytest.raises(PackSchemaError, match=r"schema 2 is newer than schema 1, .*pip install --upgrade gristmill"):
        loader_for(Device("fake", 0))
