"""The eager path in C, with tensors on the CPU that pass for tensors of a fake device whose launch is a C function."""

import ctypes
import gc
import os
import sys
import weakref
from typing import NamedTuple

import fake_driver
import gristmill
import gristmill.arrays
import gristmill.drivers
import gristmill.torch_adapter as adapter
import numpy as np
import pytest
import torch
from gristmill import fastcall
from gristmill.arrays import Device
from gristmill.drivers.protocol import LaunchPointers
from gristmill.errors import ArgumentError, DriverError, DTypeError, ShapeError, StrideError
from gristmill.loader import LoadedKernel, forget_loaders
from gristmill.manifest import MAX_ARGUMENTS
from gristmill.prepared import Choice, prepare
from together import together
from torch.autograd import forward_ad

if fastcall._fastcall is None and "GRISTMILL_NEEDS_FASTCALL" not in os.environ:
    pytest.skip("the extension is not built", allow_module_level=True)
if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
    pytest.skip("torch has no exchange table", allow_module_level=True)

LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, *(ctypes.c_uint,) * 7, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p),
    ctypes.c_void_p,
)  # fmt: skip
IS_CAPTURING = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int))
GET_CURRENT = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_uint64))
CONTEXT = 2**63 + 5
EXCHANGE_NAME = b"dlpack_exchange_api"


class Function(NamedTuple):
    handle: int
    symbol: str

    def __contains__(self, text: object) -> bool:
        return str(text) in self.symbol


class NativeDriver(fake_driver.FakeDriver):
    """A fake whose launches can also come from C; those are in `native`."""

    def __init__(self) -> None:
        super().__init__(archs=("sm90",))
        self.native: list[tuple] = []
        self.status = 0
        self.context = CONTEXT
        self._symbols: dict[int, str] = {}
        self.capturing = 0
        self._launch, self._get_current = LAUNCH(self._launch_from_c), GET_CURRENT(self._current_to_c)
        self._is_capturing = IS_CAPTURING(self._capturing_to_c)

    def function(self, ordinal, module, symbol, max_dynamic_shared_bytes, early_start):
        handle = 2**40 + len(self._symbols)
        self._symbols[handle] = symbol
        return Function(handle, symbol)

    def launch_pointers(self, ordinal):
        functions = (self._launch, self._get_current, self._is_capturing)
        launch, get_current, is_capturing = (ctypes.cast(f, ctypes.c_void_p).value for f in functions)
        return LaunchPointers(launch, get_current, is_capturing, CONTEXT, self._error)

    def _error(self, function, grid, block, shared_bytes, status):
        return DriverError(f"launch failed: {status} [{function.symbol} {grid} {block} {shared_bytes}]")

    def _launch_from_c(self, function, gx, gy, gz, bx, by, bz, shared_bytes, stream, arguments, extra):
        sizes = [4 if argument.type == "int32" else 8 for argument in fake_driver.ARGUMENTS]
        values = [
            int.from_bytes(ctypes.string_at(arguments[i], size), "little", signed=True) for i, size in enumerate(sizes)
        ]
        self.native.append((function, (gx, gy, gz), (bx, by, bz), shared_bytes, stream, values))
        if not self.status:
            fake_driver.compute(values, "bfloat16" if "bfloat16" in self._symbols[function] else "float16")
        return self.status

    def _current_to_c(self, current):
        current[0] = self.context
        return 0

    def _capturing_to_c(self, stream, status):
        status[0] = self.capturing
        return 0


@pytest.fixture
def device(monkeypatch, tmp_path):
    driver = NativeDriver()
    monkeypatch.setitem(gristmill.drivers._drivers, "fake", driver)
    monkeypatch.setenv("GRISTMILL_PACK_PATH", str(tmp_path / "packs"))
    fake_driver.usual_pack(tmp_path / "packs")
    view = gristmill.arrays._view_torch

    def view_as_fake(tensor, torch):
        return view(tensor, torch)._replace(device=Device("fake", -1))

    monkeypatch.setattr(gristmill.arrays, "_view_torch", view_as_fake)
    monkeypatch.setattr(adapter, "DRIVER", "fake")
    monkeypatch.setattr(adapter, "_current_raw_stream", lambda ordinal: 0)
    yield driver
    forget_loaders()


def weight_of(dtype="float16", **options):
    host = fake_driver.random_weight(24, 72, 32, dtype, zero_points=True, bias=True, **options)
    return gristmill.to_torch(host, "cpu").map(lambda array: array)  # not the one that is known to be on the CPU


def random_x(*shape, dtype="float16") -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(adapter.DTYPES[dtype])


def in_python(x, weight):
    """The Python path, which also teaches the one in C."""
    return adapter._launch(x, prepare(weight), weight.perm)


def in_c(x, weight, out=None, stream=None):
    return prepare(weight).fast(x, out, stream)


def views(dtype):
    wide = random_x(7, 100, dtype=dtype)
    return [
        random_x(72, dtype=dtype), random_x(1, 72, dtype=dtype), random_x(5, 72, dtype=dtype),
        wide[:, :72], wide[:, 3:75], wide[::2, :72], wide[2, 8:80],
        random_x(2, 3, 72, dtype=dtype), random_x(2, 1, 3, 100, dtype=dtype)[..., :72],
        random_x(3, 4, 72, dtype=dtype)[:, :1], random_x(72, dtype=dtype).expand(4, 72),
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_launch_is_the_one_that_python_makes(device, dtype):
    weight = weight_of(dtype)
    for x in views(dtype):
        expected = in_python(x, weight)
        function, grid, block, shared_bytes, stream, values = device.called("launch")[-1][1:]
        found = gristmill.linear(x, weight)
        assert device.native[-1][:5] == (function.handle, grid, block, shared_bytes, stream or None)
        assert [v for i, v in enumerate(device.native[-1][5]) if i != 5] == [v for i, v in enumerate(values) if i != 5]
        assert (found.shape, found.stride(), found.dtype) == (expected.shape, expected.stride(), expected.dtype)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert len(device.native) == len(views(dtype))


def test_outputs_have_the_shape_of_their_own_call(device):
    """The description of the last output is kept for the next call."""
    weight = weight_of()
    shapes = [(5, 72), (5, 72), (1, 5, 72), (5, 1, 72), (6, 72), (72,), (1,) * 9 + (5, 72), (1,) * 9 + (6, 72), (5, 72)]
    for shape in shapes:
        in_python(random_x(*shape), weight)
    for shape in shapes * 2:
        x = random_x(*shape)
        found, expected = in_c(x, weight), in_python(x, weight)
        assert (found.shape, found.stride(), found.dtype) == (expected.shape, expected.stride(), expected.dtype)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_what_is_new_goes_to_python_once(device):
    weight = weight_of()
    in_python(random_x(5, 72), weight)
    assert in_c(random_x(6, 72), weight) is None  # another M
    assert in_c(random_x(6, 80)[:, 3:75], weight) is None  # another alignment
    in_python(random_x(6, 72), weight)
    other = weight_of(seed=1)
    assert prepare(other).fast is None
    in_python(random_x(5, 72), other)
    assert in_c(random_x(6, 72), other) is not None  # learned by a weight of its class


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (lambda: random_x(3, 73), ShapeError, r"x must have shape \(..., K\) with K=72, got \(3, 73\)"),
        (lambda: random_x(3, 72).float(), DTypeError, "x must be float16, the dtype of weight, got float32"),
        (lambda: random_x(3, 72).bfloat16(), DTypeError, "got bfloat16"),
        (lambda: random_x(72, 3).t(), StrideError, "x must have an inner stride of one element, got 3"),
        (lambda: random_x().reshape(()), ShapeError, r"got \(\)"),
    ],
)
def test_mistakes_are_left_to_python(device, x, error, message):
    weight = weight_of()
    in_python(random_x(3, 72), weight)
    assert in_c(x(), weight) is None
    with pytest.raises(error, match=message):
        in_python(x(), weight)
    assert not device.native


def test_what_is_not_alike_is_left_to_python(device):
    weight = weight_of()
    x = random_x(3, 72)
    in_python(x, weight)
    shuffled = random_x(3, 4, 72).transpose(0, 1)
    subclass = random_x(3, 72).as_subclass(type("Own", (torch.Tensor,), {}))
    sparse, meta = random_x(3, 72).to_sparse(), random_x(3, 72).to("meta")
    for other in (shuffled, random_x(0, 72), subclass, sparse, meta, torch.nn.Parameter(x), None, "x"):
        assert in_c(other, weight) is None
        assert in_c(x, weight, out=other) is None or other is None
    device.context = 7
    assert in_c(x, weight) is None
    assert len(device.native) == 1


def test_what_is_recorded_to_start_early_is_left_to_python(device, monkeypatch):
    weight, x = weight_of(), random_x(3, 72)
    prepared = prepare(weight)
    in_python(x, weight)
    (choice,) = prepared.choices.values()
    early = LoadedKernel(choice.kernel.entry._replace(early_start=True), choice.kernel.function)
    prepared.choices[next(iter(prepared.choices))] = Choice(early, choice.grid, choice.shared_bytes, choice.origin)
    in_python(x, weight)
    for capturing, stream, in_c_too in ((0, 9, True), (1, 9, False), (1, 0, True)):  # stream 0 cannot be captured
        device.capturing = capturing
        assert (in_c(x, weight, stream=stream) is not None) == in_c_too


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # by torch, for make_dual
def test_gradients_modes_and_the_profiler_see_an_operator(device):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    weight = weight_of()
    x = random_x(3, 72)
    in_python(x, weight)
    wanted = random_x(3, 72).requires_grad_()
    assert in_c(wanted, weight) is None
    with torch.no_grad():
        assert in_c(wanted, weight) is not None
    with torch.inference_mode():
        assert in_c(wanted, weight).is_inference()
    with Mode():
        assert in_c(x, weight) is None
    with forward_ad.dual_level():
        assert in_c(forward_ad.make_dual(x, torch.ones_like(x)), weight) is None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert in_c(x, weight) is None
    assert in_c(x, weight) is not None


def test_the_op_goes_the_same_way(device):
    weight = weight_of()
    x = random_x(2, 3, 72)
    arguments = (x, weight.qweight, weight.scales, weight.zero_points, weight.bias, None, 72, 32)
    expected = adapter._op_cuda(*arguments)
    assert not device.native
    torch.testing.assert_close(adapter._op_cuda(*arguments), expected, rtol=0, atol=0)
    assert len(device.native) == 1


def test_out_and_stream(device):
    weight = weight_of()
    x = random_x(4, 3, 72)
    expected = in_python(x, weight)
    rows = torch.zeros(12, 80, dtype=torch.float16)
    in_python(x, weight)
    for out in (torch.empty_like(expected), rows.view(4, 3, 80)[..., 8:32]):
        assert gristmill.linear(x, weight, out=out, stream=9) is out
        torch.testing.assert_close(out, expected, rtol=0, atol=0)
        assert device.native[-1][4] == 9
    assert (rows[:, :8] == 0).all()
    assert (rows[:, 32:] == 0).all()
    assert len(device.native) == 2
    assert in_c(x, weight, stream=2**64 - 1) is not None
    assert device.native[-1][4] == 2**64 - 1
    assert in_c(x, weight, stream=2**64) is None
    assert in_c(x, weight, stream="9") is None


def test_out_that_cannot_be_written_is_left_to_python(device):
    weight = weight_of()
    x = random_x(4, 72)
    in_python(x, weight)
    buffer = random_x(4, 100)
    in_python(buffer[:, :72], weight)
    for out in (
        torch.empty(4, 25, dtype=torch.float16),
        torch.empty(3, 24, dtype=torch.float16),
        torch.empty(2, 2, 24, dtype=torch.float16),
        torch.empty(4, 24),
        torch.empty(24, dtype=torch.float16).expand(4, 24),
        torch.empty(24, 4, dtype=torch.float16).t(),
        x[:, :24],
        weight.scales.view(-1)[:24].expand(4, 24),
    ):
        assert in_c(x, weight, out=out) is None
    assert in_c(buffer[:, :72], weight, out=buffer[:, 72:96]) is None  # side by side: Python looks closer
    assert not device.native
    with pytest.raises(ArgumentError, match="out must not overlap x"):
        adapter.check_out(gristmill.arrays.view(x[:, :24]), gristmill.arrays.view(x), weight, prepare(weight))


def test_a_launch_that_fails(device):
    weight = weight_of()
    x = random_x(4, 72)
    in_python(x, weight)
    device.status = 719
    message = r"^launch failed: 719 \[symbol_small_float16_zp \(1, 1, 1\) \(128, 1, 1\) 128\]$"
    with pytest.raises(DriverError, match=message):
        gristmill.linear(x, weight)
    device.status = 0
    assert gristmill.linear(x, weight) is not None


def test_threads_share_nothing(device):
    weights = [weight_of(seed=seed) for seed in range(4)]
    inputs = [random_x(M, 72) for M in (1, 3, 5)]
    expected = [[in_python(x, weight) for x in inputs] for weight in weights]
    wrong = []

    def work(thread):
        own = thread % 4
        for _ in range(40):
            for x, right in zip(inputs, expected[own], strict=True):
                if not torch.equal(gristmill.linear(x, weights[own]), right):
                    wrong.append(own)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    together(8, work)
    sys.setswitchinterval(interval)
    assert not wrong
    assert len(device.native) == 8 * 40 * 3


def test_nothing_is_kept_or_lost(device):
    weight = weight_of()
    x = random_x(4, 72)
    out = in_python(x, weight)
    kept = weakref.ref(weight)
    choice = next(iter(prepare(weight).choices.values()))
    counts = []
    for _ in range(3):
        for _ in range(50):
            in_c(x, weight)
            in_c(random_x(9, 72), weight)
            in_c(x, weight, out=out)
        device.native.clear()
        held = [sys.getrefcount(thing) for thing in (x, out, torch.float16, torch.Tensor, choice, choice.record)]
        counts.append(held)
    assert counts[1] == counts[2]
    del weight
    gc.collect()
    assert kept() is None


def test_a_pack_that_is_unloaded_is_not_launched(device):
    weight = weight_of()
    x = random_x(4, 72)
    in_python(x, weight)
    forget_loaders()
    assert prepare(weight).fast is None


@pytest.mark.parametrize("missing", ["extension", "exchange table", "known exchange table", "pointers"])
def test_python_serves_where_c_cannot(device, monkeypatch, missing):
    if missing == "extension":
        monkeypatch.setattr(fastcall, "_fastcall", None)
    elif missing == "known exchange table":
        new_capsule = ctypes.pythonapi.PyCapsule_New
        new_capsule.restype, new_capsule.argtypes = (
            ctypes.py_object,
            [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p],
        )
        table = ctypes.create_string_buffer(b"\x02", 256)  # DLPack 2
        capsule = new_capsule(ctypes.addressof(table), EXCHANGE_NAME, None)
        monkeypatch.setattr(torch.Tensor, "__dlpack_c_exchange_api__", capsule)
    elif missing == "pointers":
        monkeypatch.setattr(device, "launch_pointers", lambda ordinal: None)
    else:
        monkeypatch.setattr(fastcall, "_has_exchange_table", lambda: False)
    weight = weight_of()
    x = random_x(4, 72)
    for _ in range(2):
        torch.testing.assert_close(in_python(x, weight), in_python(x, weight), rtol=0, atol=0)
    assert prepare(weight).fast is False
    assert not device.native


def test_permuted_weights_are_left_to_python(device):
    weight = weight_of(perm=True)
    in_python(random_x(4, 72), weight)
    assert prepare(weight).fast is False


def test_what_python_hands_over_is_checked():
    native = fastcall._fastcall
    record = native.record(2**63, (1, 2, 3), (4, 5, 6), 7, True, 2**31 - 1, bytes(range(16)))
    assert record == native.record(2**63, (1, 2, 3), (4, 5, 6), 7, True, 2**31 - 1, bytes(range(16)))
    assert native.record(0, (1, 1, 1), (1, 1, 1), 0, False, 0, bytes(MAX_ARGUMENTS))
    for sources in (bytes(MAX_ARGUMENTS + 1), b"\x10"):
        with pytest.raises(ValueError, match="sources: at most 64, each below 16"):
            native.record(0, (1, 1, 1), (1, 1, 1), 0, False, 0, sources)
    with pytest.raises(TypeError):
        native.bind(x=np.zeros(3))


TRANSFORMS = {
    "vmap": lambda function, x: torch.func.vmap(function)(x),
    "grad": lambda function, x: torch.func.grad(lambda x: function(x).sum())(x),
    "jvp": lambda function, x: torch.func.jvp(function, (x,), (x,)),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("grad", [True, False])
def test_a_tensor_of_a_functional_transform_is_left_to_python(device, transform, grad):
    weight = weight_of()
    in_python(random_x(3, 72), weight)
    seen = []

    def function(x):
        seen.append(in_c(x, weight))
        return x

    with torch.set_grad_enabled(grad):
        transform(function, random_x(3, 2, 72))
    assert seen == [None]
