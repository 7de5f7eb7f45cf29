import gc

import fake_driver
import gristmill.drivers
import ml_dtypes
import numpy as np
import pytest
import torch
from gristmill.arrays import HOST, ArrayView, Device, DeviceArray, view
from gristmill.errors import ArgumentError, DTypeError, NoDeviceError, NoDriverError, ShapeError, StrideError
from gristmill.gemm import overlap


@pytest.fixture
def driver(monkeypatch):
    driver = fake_driver.FakeDriver(archs=("sm90", "sm80"))
    monkeypatch.setitem(gristmill.drivers._drivers, "fake", driver)
    return driver


class Producer:
    """Offers DLPack and nothing else."""

    def __init__(self, array):
        self.array = array
        self.streams = []

    def __dlpack__(self, stream="not given"):
        self.streams.append(stream)
        return self.array.__dlpack__()

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_device_text():
    assert Device.parse("cuda") == ("cuda", 0)
    assert str(Device.parse("hip:3")) == "hip:3"
    assert str(Device(HOST, 0)) == "cpu"


def test_device_by_arch(driver):
    assert Device.parse("fake:sm80") == ("fake", 1)
    with pytest.raises(NoDeviceError, match=r"fake has no device 'gfx1151'; its devices: sm90, sm80"):
        Device.parse("fake:gfx1151")
    with pytest.raises(NoDriverError, match="no driver is called 'vulkan'; installed: cuda, "):
        Device.parse("vulkan:apple")


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.int32])
def test_view_of_numpy(dtype):
    array = np.zeros((3, 8), dtype=dtype)[1:, 2:]
    found = view(array)
    assert found == ArrayView(array.ctypes.data, (2, 6), (8, 1), np.dtype(dtype).name, Device(HOST, 0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int32])
def test_view_of_torch_and_dlpack_agree(dtype):
    tensor = torch.zeros((3, 8), dtype=dtype)[1:, 2:]
    producer = Producer(tensor)
    assert view(tensor) == view(producer)
    assert view(tensor).strides == (8, 1)
    assert producer.streams == ["not given"]  # on the host there is nothing to order


def test_view_of_cuda_array_interface(driver, monkeypatch):
    array = DeviceArray.from_numpy(np.zeros((4, 6), np.float16), "fake:0", row_stride=8)
    monkeypatch.setitem(gristmill.drivers._drivers, "cuda", driver)

    class Foreign:
        __cuda_array_interface__ = {  # noqa: RUF012
            "shape": (4, 6), "strides": (16, 2), "typestr": "<f2", "data": (array.address, False), "version": 3,
        }  # fmt: skip

    assert view(Foreign()) == ArrayView(array.address, (4, 6), (8, 1), "float16", Device("cuda", 0))
    Foreign.__cuda_array_interface__ = {**Foreign.__cuda_array_interface__, "typestr": "<V2", "strides": None}
    assert view(Foreign()).dtype == "bfloat16"
    assert view(Foreign()).strides == (6, 1)
    Foreign.__cuda_array_interface__ = {**Foreign.__cuda_array_interface__, "typestr": ">f2"}
    with pytest.raises(DTypeError, match="typestr must be a float or an integer, got '>f2'"):
        view(Foreign())


def test_device_array_offers_cuda_array_interface_on_cuda_alone(driver, monkeypatch):
    assert not hasattr(DeviceArray.empty("fake:0", (2, 3), "float16"), "__cuda_array_interface__")
    monkeypatch.setitem(gristmill.drivers._drivers, "cuda", driver)
    array = DeviceArray.empty("cuda:0", (2, 3), "bfloat16", row_stride=5)
    assert view(type("Foreign", (), {"__cuda_array_interface__": array.__cuda_array_interface__})()) == array.view()


def test_what_is_no_array_is_refused():
    with pytest.raises(ArgumentError, match=r"must be a torch tensor, a numpy array, a DeviceArray .*, got list"):
        view([1, 2])
    with pytest.raises(DTypeError, match=r"dtype must be one of .*, got complex64"):
        view(np.zeros(3, np.complex64))
    with pytest.raises(ArgumentError, match=r"must be on cpu or cuda .*, got meta"):
        view(torch.zeros(3, device="meta"))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.int32])
@pytest.mark.parametrize("row_stride", [None, 7, 16])
@pytest.mark.parametrize("shape", [(0, 7), (1, 7), (5, 7)])
def test_round_trip(driver, dtype, row_stride, shape):
    array = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    placed = DeviceArray.from_numpy(array, "fake:1", row_stride=row_stride)
    assert placed.view().strides == (row_stride or 7, 1)
    assert placed.to_numpy().dtype == array.dtype
    np.testing.assert_array_equal(placed.to_numpy(), array)


def test_round_trip_of_a_strided_host_array(driver):
    array = np.arange(60, dtype=np.int32).reshape(5, 12)[::2, 1:9]
    np.testing.assert_array_equal(DeviceArray.from_numpy(array, "fake:0").to_numpy(), array)


def test_memory_lives_as_long_as_any_part(driver):
    whole = DeviceArray.from_numpy(np.arange(20, dtype=np.int32).reshape(4, 5), "fake:0")
    part = whole.part(6, (2, 3), (5, 1))
    del whole
    gc.collect()
    np.testing.assert_array_equal(part.to_numpy(), [[6, 7, 8], [11, 12, 13]])
    assert not driver.called("free")
    del part
    gc.collect()
    assert len(driver.called("free")) == 1
    assert driver.live_bytes() == 0


def test_part_within_memory(driver):
    whole = DeviceArray.empty("fake:0", (4, 5), "float16")
    with pytest.raises(ShapeError, match="passes the end of the memory"):
        whole.part(16, (1, 5))


def test_memory_is_never_counted_backwards(driver):
    with pytest.raises(ShapeError, match=r"shape must have no negative extent, got \(-1, 4\)"):
        DeviceArray.empty("fake:0", (-1, 4), "float16")
    array = DeviceArray.empty("fake:0", (3, 4), "float16")
    for shape, strides in (((3, 4), (-4, 1)), ((-1, 4), (4, 1)), ((3, 4), (1,))):
        with pytest.raises(ShapeError, match="a part must have extents and strides of at least 0"):
            array.part(0, shape, strides)


def test_bad_requests(driver):
    with pytest.raises(StrideError, match="row_stride must be at least the row of a 2-D shape, got 4"):
        DeviceArray.empty("fake:0", (2, 5), "float16", row_stride=4)
    with pytest.raises(DTypeError, match="got 'half'"):
        DeviceArray.empty("fake:0", (2, 5), "half")


def rows_at(address: int, rows: int, columns: int, stride: int) -> ArrayView:
    return ArrayView(address, (rows, columns), (stride, 1), "float16", Device("fake", 0))


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (rows_at(0, 4, 8, 8), rows_at(64, 4, 8, 8), False),  # one after the other
        (rows_at(0, 4, 8, 8), rows_at(62, 4, 8, 8), True),
        (rows_at(0, 4, 8, 20), rows_at(16, 4, 12, 20), False),  # side by side in one buffer
        (rows_at(16, 4, 12, 20), rows_at(0, 4, 8, 20), False),
        (rows_at(0, 4, 9, 20), rows_at(16, 4, 12, 20), True),
        (rows_at(0, 4, 8, 20), rows_at(16, 4, 13, 20), True),  # a row runs into the next one of the other
        (rows_at(0, 4, 8, 20), rows_at(16, 4, 12, 24), True),  # strides differ: refused without looking closer
        (rows_at(0, 0, 8, 8), rows_at(0, 4, 8, 8), False),  # nothing there
    ],
)
def test_overlap(a, b, expected):
    assert overlap(a, b) is expected
    assert overlap(b, a) is expected
