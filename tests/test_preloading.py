"""What `preload` reports and refuses, and `unload`."""

import fake_driver
import gristmill
import pytest
from gristmill.arrays import Device, DeviceArray
from gristmill.device import nominal_device
from gristmill.errors import DamagedPackError, PreloadLimitError
from gristmill.formula import Formula
from gristmill.loader import loader_for
from gristmill.manifest import Needs, Rule
from gristmill.packs import Pack
from gristmill.preloading import preload, reachable_entries, unload
from gristmill.problem import Problem


def unloaded_weight(device="fake:0", dtype="float16", **options):
    """A weight whose kernels are not loaded."""
    host = fake_driver.random_weight(24, 128, 32, dtype, **options)
    return host.map(lambda array: DeviceArray.from_numpy(array, device))


def object_bytes(dtype, zero_points=False):
    return len(f"object {dtype} {zero_points}")


def test_report(fake_device):
    weight = unloaded_weight()
    report = preload(weight)
    assert report.entries == report.loaded == ("small_float16", "tiled_float16", "floor_float16")
    assert report.code_bytes == object_bytes("float16")  # the three are in one object
    assert 0 < report.time_us < 60e6
    again = preload(weight)
    assert (again.entries, again.loaded, again.code_bytes) == (report.entries, (), 0)


def test_several_weights_on_several_devices(fake_device):
    weights = [unloaded_weight(device, dtype) for device in ("fake:0", "fake:1") for dtype in ("float16", "bfloat16")]
    report = preload(iter(weights * 2))
    assert len(report.entries) == 6
    assert report.code_bytes == 2 * (object_bytes("float16") + object_bytes("bfloat16"))
    assert len(fake_device.called("load_module")) == 4


def test_only_the_rows_that_will_come(fake_device):
    assert preload(unloaded_weight(), range(100, 103)).entries == ("tiled_float16", "floor_float16")


def test_what_an_earlier_choice_always_comes_before_is_not_loaded(fake_device, tmp_path):
    """Rules are walked in ranges of M: an entry is out of reach behind one whose needs hold all over a range."""
    grid = (Formula("min(ceil_div(M, 8), 65535)"), Formula("1"), Formula("1"))

    def entry(name, *conditions, shared="512 * min(M, 8)"):
        needs = Needs("float16", False, tuple(map(Formula, conditions)))
        code = name.encode()
        return fake_driver.entry(name, code, needs=needs, grid=grid, dynamic_shared_bytes=Formula(shared)), code

    rows = [
        entry("aligned", "alignment % 16 == 0", "K % 64 == 0"),
        entry("aligned_too", "alignment % 16 == 0"),
        entry("no_group", "group_size == 64"),
        entry("few", "M <= 4"),
        entry("large", shared="M * 1024"),
        entry("rest"),
        entry("behind"),
    ]
    rules = (
        Rule(Formula("M <= 8"), ("no_group", "aligned", "aligned_too", "few", "rest", "behind"), "test"),
        Rule(Formula("M > 4"), ("large", "rest"), "test"),
        Rule(Formula("1"), ("behind",), "test"),
    )
    manifest = fake_driver.write_pack(tmp_path / "other", "sm90", rows, rules)
    manifest = Pack.open(manifest).manifest
    problem = Problem("w4a16_gemm", 1, 24, 128, 32, "float16", False, False, 16)
    reachable = reachable_entries(problem, nominal_device("sm90"), manifest)
    # "rest" for M = 5..8 without alignment, and where "large" is too large; "few" up to 4, without alignment.
    assert [entry.name for entry in reachable] == ["aligned", "few", "large", "rest"]


def test_limit(fake_device):
    weights = [unloaded_weight(), unloaded_weight(dtype="bfloat16")]
    total = object_bytes("float16") + object_bytes("bfloat16")
    with pytest.raises(
        PreloadLimitError,
        match=rf"6 kernels with {total} bytes of device code .*, the limit is {total - 1} bytes: small",
    ):
        preload(weights, limit_bytes=total - 1)
    assert not fake_device.called("load_module")
    assert loader_for(Device("fake", 0)).loaded() == []
    assert preload(weights, limit_bytes=total).code_bytes == total
    assert preload(weights, limit_bytes=0).code_bytes == 0  # it is there already


def test_limit_counts_an_object_once_that_is_there_for_another_entry(fake_device):
    weight = unloaded_weight()
    preload(weight, range(1, 2))
    report = preload(weight, limit_bytes=0)
    assert report.loaded == ("tiled_float16",)


def test_object_that_is_not_there(fake_device, tmp_path):
    for path in (tmp_path / "packs").rglob("*.cubin"):
        path.unlink()
    with pytest.raises(DamagedPackError, match=r"No such file or directory; build the pack anew"):
        preload(unloaded_weight())


def test_unload(fake_device):
    weights = [unloaded_weight(f"fake:{i}") for i in (0, 1)]
    preload(weights)
    unload("fake:1")
    assert [call[0] for call in fake_device.called("unload_module")] == [1]
    assert loader_for(Device("fake", 0)).loaded()
    gristmill.unload()
    assert [call[0] for call in fake_device.called("unload_module")] == [1, 0]
    for i, weight in enumerate(weights):  # weights are as good as before
        x = DeviceArray.from_numpy(fake_driver.random_x(3, 128), f"fake:{i}")
        assert gristmill.linear(x, weight).shape == (3, 24)
    unload("fake:7")  # nothing is loaded there
