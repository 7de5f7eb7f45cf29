import logging
import pickle
import subprocess
import sys
import textwrap
from dataclasses import dataclass

import fake_driver
import gristmill
import numpy as np
import pytest
from gristmill.arrays import Device, DeviceArray, numpy_dtype
from gristmill.errors import (
    ArgumentError,
    DeviceMismatchError,
    DriverError,
    DTypeError,
    NoKernelError,
    NotLoadedError,
    ShapeError,
    StrideError,
)
from gristmill.gemm import stream_handle
from gristmill.loader import loader_for
from gristmill.packed_weight import dequantize
from gristmill.placement import to_device
from gristmill.preloading import preload
from gristmill.prepared import prepare, prepared_weights
from gristmill.reference import error_bound, linear_float64, worst_error_over_bound
from together import together


@dataclass(frozen=True)
class Case:
    M: int
    N: int
    K: int
    group_size: int = 32
    dtype: str = "float16"
    zero_points: bool = False
    bias: bool = False

    def weight(self):
        return fake_driver.random_weight(
            self.N, self.K, self.group_size, self.dtype, zero_points=self.zero_points, bias=self.bias
        )


CASES = [
    Case(0, 24, 72),
    Case(1, 1, 8, 8),
    Case(1, 7, 72, zero_points=True),
    Case(4, 24, 128, 64, bias=True),
    Case(5, 136, 128, 128, "bfloat16", zero_points=True, bias=True),
    Case(15, 8, 72, 48),
    Case(16, 72, 576, -1, "bfloat16"),
    Case(17, 576, 136, 64, zero_points=True),
    Case(33, 7, 9, -1),
]


def check(out, x, weight) -> None:
    bias = weight.bias
    reference = linear_float64(x, dequantize(weight), bias)
    bound = error_bound(x, dequantize(weight), bias, dtype=weight.dtype, roundings=1, weights_in_dtype=False)
    assert worst_error_over_bound(out, reference, bound) <= 1


@pytest.mark.parametrize("case", CASES, ids=str)
def test_result(fake_device, case):
    weight = case.weight()
    placed = to_device(weight, "fake:0")
    x = fake_driver.random_x(case.M, case.K, case.dtype)
    out = gristmill.linear(DeviceArray.from_numpy(x, "fake:0"), placed)
    assert (out.shape, out.dtype, out.device) == ((case.M, case.N), case.dtype, Device("fake", 0))
    check(out.to_numpy(), x, weight)
    assert len(fake_device.called("launch")) == (case.M > 0)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_apart_and_guards(fake_device, case):
    weight = case.weight()
    x = fake_driver.random_x(case.M, case.K, case.dtype)
    placed_x = DeviceArray.from_numpy(x, "fake:0", row_stride=case.K + 3)
    outer = DeviceArray.from_numpy(np.full((case.M + 2, case.N + 5), 7, numpy_dtype(case.dtype)), "fake:0")
    out = outer.part(case.N + 5 + 2, (case.M, case.N), (case.N + 5, 1))
    assert gristmill.linear(placed_x, to_device(weight, "fake:0"), out=out) is out
    check(out.to_numpy(), x, weight)
    guards = outer.to_numpy()
    guards[1 : case.M + 1, 2 : case.N + 2] = 7
    assert (guards == 7).all()


def test_launch_as_the_manifest_says(fake_device):
    weight = to_device(fake_driver.random_weight(72, 128, 32), "fake:1")
    x = DeviceArray.from_numpy(fake_driver.random_x(3, 128), "fake:1")
    gristmill.linear(x, weight, stream=77)
    ((ordinal, function, grid, block, shared_bytes, stream, values),) = fake_device.called("launch")
    assert (ordinal, grid, block, shared_bytes, stream) == (1, (1, 2, 1), (128, 1, 1), 3 * 16 * 2, 77)
    assert function.startswith("symbol_small_float16 of module")
    assert values[:6] == [x.address, weight.qweight.address, weight.scales.address, 0, 0, values[5]]
    assert values[6:] == [3, 72, 128, 32, 4, 128, 16, 4, 72, 0]
    limits = {symbol: limit for _, _, symbol, limit in fake_device.called("function")}
    assert limits["symbol_small_float16"] == 232448
    assert limits["symbol_tiled_float16"] == 49664


@pytest.mark.parametrize(
    ("offset", "row_stride", "entry"),
    [(0, 128, "tiled"), (8, 128, "tiled"), (1, 128, "floor"), (4, 128, "floor"), (0, 132, "floor"), (0, 136, "tiled")],
)
def test_alignment_counts_address_and_row_stride(fake_device, offset, row_stride, entry):
    weight = fake_driver.random_weight(64, 128, 32)
    whole = DeviceArray.empty("fake:0", (16, 200), "float16")
    whole.fill_bytes(0)
    x = whole.part(offset, (9, 128), (row_stride, 1))
    out = gristmill.linear(x, to_device(weight, "fake:0"))
    assert not out.to_numpy().any()
    assert fake_device.called("launch")[0][1].startswith(f"symbol_{entry}_float16")


def test_one_row_has_no_stride(fake_device):
    weight = fake_driver.random_weight(7, 9, -1)
    whole = DeviceArray.from_numpy(np.zeros((1, 33), np.float16), "fake:0")
    gristmill.linear(whole.part(0, (1, 9), (33, 1)), to_device(weight, "fake:0"))
    values = fake_device.called("launch")[0][-1]
    assert (values[11], values[14]) == (16, 8)  # whatever breaks no alignment
    assert fake_device.called("launch")[0][1].startswith("symbol_small")


def test_selection_is_cached_by_class(fake_device, monkeypatch):
    import gristmill.prepared

    calls = []
    select = gristmill.prepared.select
    monkeypatch.setattr(gristmill.prepared, "select", lambda *a: calls.append(a) or select(*a))
    x = DeviceArray.from_numpy(fake_driver.random_x(9, 128), "fake:0")
    for seed in range(3):
        weight = to_device(fake_driver.random_weight(64, 128, 32, seed=seed), "fake:0")
        for _ in range(2):
            gristmill.linear(x, weight)
    assert len(calls) == 1
    assert len(fake_device.called("launch")) == 6


def test_choices_are_bounded(fake_device, monkeypatch):
    import gristmill.prepared

    monkeypatch.setattr(gristmill.prepared, "MAX_CHOICES", 4)
    weight = to_device(fake_driver.random_weight(8, 32, 32), "fake:0")
    for M in range(1, 12):
        gristmill.linear(DeviceArray.from_numpy(fake_driver.random_x(M, 32), "fake:0"), weight)
        assert len(prepare(weight).choices) <= 4


def test_floor_is_logged_once_per_shape(fake_device, caplog):
    weight = to_device(fake_driver.random_weight(8, 32, 32), "fake:0")
    with caplog.at_level(logging.WARNING, logger="gristmill"):
        for _ in range(3):
            gristmill.linear(DeviceArray.from_numpy(fake_driver.random_x(5, 32), "fake:0"), weight)
    (record,) = caplog.records
    assert "floor kernel floor_float16 for M=5 N=8 K=32 group_size=32 float16 alignment=16 on fake:0" in record.message


def test_prepared_weight_goes_with_its_weight(fake_device):
    weight = to_device(fake_driver.random_weight(8, 32, 32), "fake:0")
    before = len(prepared_weights)
    del weight
    assert len(prepared_weights) == before - 1
    assert fake_device.live_bytes() == 0


def test_preload_loads_all_that_any_call_can_hit(fake_device):
    loader = loader_for(Device("fake", 0))
    weight = fake_driver.random_weight(8, 32, 32, "bfloat16", zero_points=True)
    placed = to_device(weight, "fake:0")  # preloads; K >= 64 rules the tiles out
    assert loader.loaded() == ["small_bfloat16_zp", "floor_bfloat16_zp"]
    assert preload(placed, range(1, 3)).entries == ("small_bfloat16_zp", "floor_bfloat16_zp")
    loaded = len(fake_device.called("load_module"))
    for M in (1, 4, 5, 300):
        for offset in (0, 1):
            x = DeviceArray.empty("fake:0", (M * 32 + 1,), "bfloat16").part(offset, (M, 32))
            x.fill_bytes(0)
            gristmill.linear(x, placed)
    assert len(fake_device.called("load_module")) == loaded == 1


def test_rows_that_lost_their_padding_get_it_back(fake_device):
    """As a weight comes out of pickle."""
    packed = fake_driver.random_weight(24, 72, 32)
    weight = pickle.loads(pickle.dumps(packed))
    assert weight.qweight.strides[0] == 36
    placed = to_device(weight, "fake:0")
    assert placed.qweight.strides == (12, 1)
    x = fake_driver.random_x(3, 72)
    check(gristmill.linear(DeviceArray.from_numpy(x, "fake:0"), placed).to_numpy(), x, packed)
    assert [call[1].split()[0] for call in fake_device.called("launch")] == ["symbol_small_float16"]


def test_capture_needs_preload(fake_device):
    weight = fake_driver.random_weight(8, 128, 32)
    loader = loader_for(Device("fake", 0))
    placed = weight.map(lambda array: DeviceArray.from_numpy(array, "fake:0"))
    x = DeviceArray.from_numpy(fake_driver.random_x(9, 128), "fake:0")
    out = DeviceArray.empty("fake:0", (9, 8), "float16")
    fake_device.capturing.add(3)
    with pytest.raises(NotLoadedError, match=r"floor_float16|tiled_float16"):
        gristmill.linear(x, placed, out=out, stream=3)
    assert loader.loaded() == []
    assert not fake_device.called("launch")
    preload(placed)
    gristmill.linear(x, placed, out=out, stream=3)
    assert len(fake_device.called("launch")) == 1


def test_threads_share_no_arguments(fake_device):
    weights = [fake_driver.random_weight(24, 72, 32, seed=seed) for seed in range(3)]
    placed = [to_device(weight, "fake:0") for weight in weights]

    def work(thread: int) -> None:
        for i in range(20):
            at = (thread + i) % 3
            x = fake_driver.random_x(1 + (thread * i) % 5, 72, seed=thread)
            out = gristmill.linear(DeviceArray.from_numpy(x, "fake:0"), placed[at])
            check(out.to_numpy(), x, weights[at])

    together(20, work)
    assert len(fake_device.called("load_module")) == 1


def test_failed_launch_leaves_the_next_one_right(fake_device):
    weight = fake_driver.random_weight(8, 128, 32)
    placed = to_device(weight, "fake:0")
    x = fake_driver.random_x(9, 128)
    placed_x = DeviceArray.from_numpy(x, "fake:0")
    fake_device.failing["launch"] = "cuLaunchKernel failed: CUDA_ERROR_ILLEGAL_ADDRESS"
    with pytest.raises(DriverError, match="ILLEGAL_ADDRESS"):
        gristmill.linear(placed_x, placed)
    fake_device.failing.clear()
    check(gristmill.linear(placed_x, placed).to_numpy(), x, weight)


def test_no_kernel(fake_device, tmp_path):
    from gristmill.formula import Formula
    from gristmill.loader import forget_loaders
    from gristmill.manifest import Needs, Rule

    forget_loaders()
    needs = Needs("float16", False, (Formula("K % 64 == 0"),))
    folder = tmp_path / "packs" / "sm90"
    folder.rename(tmp_path / "old")
    row = fake_driver.entry("narrow", b"code", needs=needs)
    fake_driver.write_pack(tmp_path / "packs", "sm90", [(row, b"code")], (Rule(Formula("1"), ("narrow",), "test"),))
    weight = to_device(fake_driver.random_weight(8, 72, 8), "fake:0")
    with pytest.raises(
        NoKernelError, match=r"(?s)no w4a16_gemm kernel for M=1 N=8 K=72 .*narrow: needs K % 64 == 0, got K=72"
    ):
        gristmill.linear(DeviceArray.from_numpy(fake_driver.random_x(1, 72), "fake:0"), weight)


# Bad input: nothing is launched, and the message names tensor, value and rule.


def on_device(array, **options) -> DeviceArray:
    return DeviceArray.from_numpy(array, "fake:0", **options)


def zeros(*shape, dtype=np.float16) -> np.ndarray:
    return np.zeros(shape, dtype)


BAD_CALLS = [
    (lambda: (on_device(zeros(3, 73)), {}), ShapeError, r"x must have shape \(M, K\) with K=72, got \(3, 73\)"),
    (lambda: (on_device(zeros(72)), {}), ShapeError, r"x must have shape \(M, K\) with K=72, got \(72,\)"),
    (lambda: (on_device(zeros(2, 3, 72)), {}), ShapeError, r"got \(2, 3, 72\)"),
    (lambda: (on_device(zeros(3, 72, dtype=np.float32)), {}), DTypeError,
     "x must be float16, the dtype of weight, got float32"),
    (lambda: (on_device(zeros(3, 72).astype(numpy_dtype("bfloat16"))), {}), DTypeError, "got bfloat16"),
    (lambda: (on_device(zeros(72, 3)).part(0, (3, 72), (1, 3)), {}), StrideError,
     "x must have an inner stride of one element, got 3"),
    (lambda: (DeviceArray.from_numpy(zeros(3, 72), "fake:1"), {}), DeviceMismatchError,
     "x must be on fake:0, the device of weight, got fake:1"),
    (lambda: (zeros(3, 72), {}), DeviceMismatchError, None),
    (lambda: (on_device(zeros(3, 72)), {"out": on_device(zeros(3, 25))}), ShapeError,
     r"out must have shape \(M, N\) = \(3, 24\), got \(3, 25\)"),
    (lambda: (on_device(zeros(3, 72)), {"out": on_device(zeros(3, 24, dtype=np.float32))}), DTypeError,
     "out must be float16, the dtype of x, got float32"),
    (lambda: (on_device(zeros(3, 72)), {"out": DeviceArray.from_numpy(zeros(3, 24), "fake:1")}), DeviceMismatchError,
     "out must be on fake:0, the device of x, got fake:1"),
    (lambda: (on_device(zeros(3, 72)), {"out": zeros(3, 24)}), DeviceMismatchError,
     "out must be on fake:0, .*, got cpu"),
    (lambda: (on_device(zeros(3, 72)), {"out": on_device(zeros(24, 3)).part(0, (3, 24), (1, 3))}), StrideError,
     "out must have an inner stride of one element, got 3"),
    (lambda: (on_device(zeros(3, 72)), {"out": on_device(zeros(3, 24)).part(0, (3, 24), (8, 1))}), StrideError,
     "out's rows must not overlap: row stride 8 is less than N=24"),
    (lambda: ((x := on_device(zeros(3, 72))), {"out": x.part(144, (3, 24))}), ArgumentError,
     "out must not overlap x: 0x"),
    (lambda: (on_device(zeros(3, 72)), {"stream": "main"}), ArgumentError,
     "stream must be an integer handle or .*, got str"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "message"), BAD_CALLS)
def test_bad_call(fake_device, call, error, message):
    weight = to_device(fake_driver.random_weight(24, 72, 32), "fake:0")
    x, options = call()
    with pytest.raises(error, match=message):
        gristmill.linear(x, weight, **options)
    assert not fake_device.called("launch")


def test_out_beside_x_in_one_buffer(fake_device):
    weight = fake_driver.random_weight(24, 72, 32)
    whole = on_device(zeros(5, 96))
    gristmill.linear(whole.part(0, (5, 72), (96, 1)), to_device(weight, "fake:0"), out=whole.part(72, (5, 24), (96, 1)))


def test_out_over_the_weight(fake_device):
    weight = to_device(fake_driver.random_weight(24, 72, 32), "fake:0")
    out = DeviceArray(
        weight.scales._memory, weight.scales.address, (3, 24), (24, 1), "float16"
    )  # one and a half times as long as the scales; refused before anything is written
    with pytest.raises(ArgumentError, match="out must not overlap scales: 0x"):
        gristmill.linear(on_device(zeros(3, 72)), weight, out=out)


def test_weight_on_two_devices(fake_device):
    weight = fake_driver.random_weight(24, 72, 32)
    at = iter(["fake:0", "fake:1"])
    mixed = weight.map(lambda array: DeviceArray.from_numpy(array, next(at)))
    with pytest.raises(DeviceMismatchError, match="scales must be on fake:0, the device of qweight, got fake:1"):
        gristmill.linear(on_device(zeros(3, 72)), mixed)


def test_weight_on_the_host(fake_device):
    with pytest.raises(DeviceMismatchError, match="x must be on cpu, the device of weight, got fake:0"):
        gristmill.linear(on_device(zeros(3, 72)), fake_driver.random_weight(24, 72, 32))
    with pytest.raises(
        DeviceMismatchError, match=r"weight must be on a device, got arrays on cpu; see gristmill\.to_torch"
    ):
        preload(fake_driver.random_weight(24, 72, 32))


def test_scales_and_zero_points_of_different_strides(fake_device):
    weight = fake_driver.random_weight(24, 72, 32, zero_points=True)
    strides = iter([None, 3, 5])
    placed = weight.map(
        lambda array: DeviceArray.from_numpy(array, "fake:0", row_stride=next(strides) or array.strides[0] // 4)
    )
    with pytest.raises(StrideError, match="scales and zero_points must have one row stride, got 3 and 5"):
        gristmill.linear(on_device(zeros(3, 72)), placed)


def test_act_order_needs_torch(fake_device):
    weight = fake_driver.random_weight(24, 72, 32, perm=True)
    with pytest.raises(ArgumentError, match=r"weight has perm \(act-order\): without torch, gather x\[:, perm\]"):
        gristmill.linear(on_device(zeros(3, 72)), to_device(weight, "fake:0"))


@pytest.mark.parametrize("perm", [False, True])
def test_on_the_host(perm):
    weight = fake_driver.random_weight(24, 72, 32, "bfloat16", zero_points=True, bias=True, perm=perm)
    x = fake_driver.random_x(5, 72, "bfloat16")
    out = gristmill.linear(x, weight)
    assert out.dtype == numpy_dtype("bfloat16")
    check(out, x, weight)
    given = np.empty_like(out)
    assert gristmill.linear(x, weight, out=given) is given
    np.testing.assert_array_equal(given, out)
    assert gristmill.linear(x[:0], weight).shape == (0, 24)
    with pytest.raises(ShapeError, match=r"out must be bfloat16 of shape \(5, 24\), got bfloat16 of shape \(4, 24\)"):
        gristmill.linear(x, weight, out=given[:4])


class OnHost:
    """An array of another library."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def read_only():
    out = np.empty((3, 64), np.float16)
    out.flags.writeable = False
    return out


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (lambda: DeviceArray.empty("fake:0", (3, 64), "float16"), "out must be a numpy array .*, got DeviceArray"),
        (lambda: [[0.0] * 64] * 3, "out must be a numpy array where x is on the host, got list"),
        (read_only, "out must be writeable, got an array that is read-only"),
    ],
)
def test_out_on_the_host_that_cannot_be_written(fake_device, out, message):
    with pytest.raises(ArgumentError, match=message):
        gristmill.linear(fake_driver.random_x(3, 128), fake_driver.random_weight(64, 128, 32), out=out())


def test_bfloat16_of_another_library_on_the_host():
    torch = pytest.importorskip("torch")
    x, weight = OnHost(torch.zeros(3, 128).bfloat16()), fake_driver.random_weight(64, 128, 32, "bfloat16")
    with pytest.raises(DTypeError, match=r"x must be a numpy array of ml_dtypes\.bfloat16, or a torch tensor"):
        gristmill.linear(x, weight)
    half = fake_driver.random_x(3, 128)
    out = gristmill.linear(OnHost(half), fake_driver.random_weight(64, 128, 32))
    np.testing.assert_array_equal(out, gristmill.linear(half, fake_driver.random_weight(64, 128, 32)))


@pytest.mark.parametrize("on_host", [True, False])
def test_what_is_no_weight(fake_device, on_host):
    x = fake_driver.random_x(3, 128)
    x = x if on_host else DeviceArray.from_numpy(x, "fake:0")
    with pytest.raises(ArgumentError, match=r"weight must be a PackedWeight, got ndarray; gristmill\.pack makes one"):
        gristmill.linear(x, np.zeros((64, 128), np.float16))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda weight: (weight, 5), "M must be a range of numbers of rows or None, got int"),
        (lambda weight: (5,), "weights must be one PackedWeight or several, got int"),
        (lambda weight: ([weight, "x"],), "weight must be a PackedWeight, got str"),
    ],
)
def test_preload_of_nonsense(fake_device, arguments, message):
    weight = to_device(fake_driver.random_weight(64, 128, 32), "fake:0")
    with pytest.raises(ArgumentError, match=message):
        preload(*arguments(weight))


def test_weight_of_padded_scales_and_compact_zero_points_is_placed(fake_device):
    weight = fake_driver.random_weight(64, 128, 32, zero_points=True)
    padded = np.zeros((64, 8), np.float16)
    padded[:, :4] = weight.scales
    x = fake_driver.random_x(3, 128)
    placed = to_device(weight.replace(scales=padded[:, :4]), "fake:0")
    check(gristmill.linear(DeviceArray.from_numpy(x, "fake:0"), placed).to_numpy(), x, weight)


def test_weight_of_tensors_is_not_placed_by_to_device(fake_device):
    pytest.importorskip("torch")
    weight = gristmill.to_torch(fake_driver.random_weight(64, 128, 32), "cpu")
    with pytest.raises(ArgumentError, match=r"weight must be of numpy arrays, got Tensors; gristmill\.to_torch places"):
        to_device(weight, "fake:0")


def test_stream_handles():
    assert stream_handle(None) == 0
    assert stream_handle(12) == 12
    assert stream_handle(type("Torch", (), {"cuda_stream": 5})()) == 5
    assert stream_handle(type("CuPy", (), {"ptr": 6})()) == 6
    assert stream_handle(type("Core", (), {"__cuda_stream__": lambda self: (0, 7)})()) == 7


def test_a_call_imports_no_compiler_and_writes_no_file(fake_device, tmp_path):
    """In a fresh interpreter: neither triton nor the build half is imported, and no file is opened for writing."""
    program = textwrap.dedent(
        """
        import os, sys

        written = []

        def watch(event, details):
            if event == "open" and isinstance(details[2], int) and details[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                written.append(details[0])
            if event in ("subprocess.Popen", "os.fork", "os.posix_spawn", "socket.connect", "os.mkdir", "os.rename"):
                written.append((event, details))

        sys.dont_write_bytecode = True
        sys.addaudithook(watch)
        import gristmill
        assert "numpy" not in sys.modules
        sys.path.append(sys.argv[1])
        import fake_driver
        from gristmill.drivers import register
        from gristmill.arrays import DeviceArray

        driver = fake_driver.FakeDriver()
        register(driver)
        weight = gristmill.to_device(fake_driver.random_weight(24, 72, 32), "fake:0")
        x = DeviceArray.from_numpy(fake_driver.random_x(5, 72), "fake:0")
        assert gristmill.linear(x, weight).to_numpy().any()
        assert len(driver.called("launch")) == 1
        unwanted = [name for name in sys.modules if name.split(".")[0] in ("triton", "torch", "cuda", "hip")]
        unwanted += [name for name in sys.modules if name.startswith(("gristmill.aot", "gristmill.kernels"))]
        assert not unwanted, unwanted
        assert not written, written
        """
    )
    import os
    from pathlib import Path

    environment = {**os.environ, "GRISTMILL_PACK_PATH": str(tmp_path / "packs")}
    result = subprocess.run(
        [sys.executable, "-c", program, str(Path(__file__).parent)],
        env=environment, cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr


def test_import_is_light():
    """Importing the package costs under 50 ms beside the interpreter's own start."""
    program = "import time; t = time.perf_counter(); import gristmill; print(time.perf_counter() - t)"
    best = min(float(subprocess.check_output([sys.executable, "-c", program])) for _ in range(5))
    assert best < 0.05


def test_rows_of_scales_that_overlap_are_refused(fake_device):
    """One scale for all rows: the kernels read N numbers where the scales lie."""
    weight = to_device(fake_driver.random_weight(8, 72, -1), "fake:0")
    one = weight.replace(scales=weight.scales.part(0, (8, 1), (0, 1)))
    with pytest.raises(StrideError, match="rows of scales must not overlap, got row stride 0"):
        gristmill.linear(DeviceArray.from_numpy(fake_driver.random_x(3, 72), "fake:0"), one)


@pytest.mark.parametrize("name", ["qweight", "scales"])
def test_rows_of_a_weight_that_lie_too_far_apart_are_refused(fake_device, name):
    """The CUDA C++ kernels keep them in 32 bits."""
    weight = to_device(fake_driver.random_weight(8, 72, 8), "fake:0")
    view = getattr(weight, name)
    far = weight.replace(**{name: DeviceArray(view._memory, view.address, view.shape, (2**32, 1), view.dtype)})
    with pytest.raises(StrideError, match=f"rows of {name} must be less than 2\\^32 elements apart, got 4294967296"):
        gristmill.linear(DeviceArray.from_numpy(fake_driver.random_x(3, 72), "fake:0"), far)


def test_the_host_rounds_once():
    """1 + 2^-8 + 2^-30 lies above a tie of bfloat16; float32 on the way would lose that."""
    q = np.full((1, 24), 8)
    q[0, :3] = 9
    weight = gristmill.pack(q, np.ones((1, 1)), group_size=-1, dtype="bfloat16")
    x = np.zeros((1, 24), numpy_dtype("bfloat16"))
    x[0, :3] = 1, 2.0**-8, 2.0**-30
    assert float(gristmill.linear(x, weight)[0, 0]) == 1 + 2.0**-7
