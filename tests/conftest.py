"""Fixtures that several test files share: a fake device with a pack of its own."""

import fake_driver
import gristmill.drivers
import pytest
from gristmill.loader import forget_loaders


@pytest.fixture
def fake_device(monkeypatch, tmp_path):
    """A `FakeDriver` called "fake" with two sm90 devices, and a pack that covers every problem."""
    driver = fake_driver.FakeDriver(archs=("sm90", "sm90"))
    monkeypatch.setitem(gristmill.drivers._drivers, "fake", driver)
    monkeypatch.setenv("GRISTMILL_PACK_PATH", str(tmp_path / "packs"))
    fake_driver.usual_pack(tmp_path / "packs")
    yield driver
    driver.failing.clear()
    forget_loaders()


@pytest.fixture
def fake_weight(fake_device):
    """A `PreparedWeight` on the fake device."""
    from gristmill.placement import to_device
    from gristmill.prepared import PreparedWeight

    weight = to_device(fake_driver.random_weight(24, 72, 32, zero_points=True, bias=True), "fake:0")
    prepared = PreparedWeight(weight)
    yield prepared
    del weight
