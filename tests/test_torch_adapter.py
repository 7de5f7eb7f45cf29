import copy
import io
import pickle

import fake_driver
import gristmill
import gristmill.arrays
import gristmill.nn
import gristmill.torch_adapter as adapter
import numpy as np
import pytest
import torch
from gristmill.arrays import Device
from gristmill.errors import (
    ArgumentError,
    DeviceMismatchError,
    DTypeError,
    NoDeviceError,
    ShapeError,
    StrideError,
)
from gristmill.packed_weight import dequantize
from gristmill.prepared import prepare
from gristmill.reference import error_bound, linear_float64, worst_error_over_bound
from gristmill.torch_weights import pad_rows, to_numpy
from torch.autograd import forward_ad

DTYPES = ["float16", "bfloat16"]


def weights(dtype="float16", *, N=24, K=72, group_size=32, **options):
    """A host weight and the same as tensors on the CPU."""
    weight = fake_driver.random_weight(N, K, group_size, dtype, zero_points=True, bias=True, **options)
    return weight, gristmill.to_torch(weight, "cpu")


def random_x(*shape, dtype="float16") -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(adapter.DTYPES[dtype])


def check(out: torch.Tensor, x: torch.Tensor, weight) -> None:
    assert out.shape == (*x.shape[:-1], weight.N)
    assert out.dtype == x.dtype
    dense, flat = dequantize(weight), x.reshape(-1, weight.K).double().numpy()
    reference = linear_float64(flat, dense, weight.bias)
    bound = error_bound(flat, dense, weight.bias, dtype=weight.dtype, roundings=1, weights_in_dtype=False)
    assert worst_error_over_bound(out.reshape(-1, weight.N).double().numpy(), reference, bound) <= 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("perm", [False, True])
def test_linear_on_the_cpu(dtype, perm):
    host, weight = weights(dtype, perm=perm)
    for shape in ((72,), (0, 72), (1, 72), (5, 72), (2, 3, 72), (2, 0, 72)):
        x = random_x(*shape, dtype=dtype)
        check(gristmill.linear(x, weight), x, host)


def test_weight_round_trip_through_torch():
    host, weight = weights("bfloat16", perm=True)
    back = to_numpy(weight)
    assert weight.qweight.stride() == (12, 1)  # padding is kept
    for name in ("qweight", "scales", "zero_points", "bias", "perm"):
        np.testing.assert_array_equal(getattr(back, name), getattr(host, name))


def test_out_and_stream():
    host, weight = weights()
    x = random_x(2, 3, 72)
    out = torch.empty(2, 3, 24, dtype=torch.float16)
    assert gristmill.linear(x, weight, out=out) is out
    check(out, x, host)


def other_weight():
    return weights()[1]


BAD_CALLS = [
    (lambda: (random_x(3, 73), {}), ShapeError, r"x must have shape \(..., K\) with K=72, got \(3, 73\)"),
    (lambda: (random_x().reshape(()), {}), ShapeError, r"got \(\)"),
    (lambda: (random_x(3, 72).float(), {}), DTypeError, "x must be float16, the dtype of weight, got float32"),
    (lambda: (random_x(3, 72).bfloat16(), {}), DTypeError, "got bfloat16"),
    (lambda: (random_x(72, 3).t(), {}), StrideError, "x must have an inner stride of one element, got 3"),
    (lambda: (random_x(3, 72).to("meta"), {}), DeviceMismatchError, "x must be on cpu, the device of weight, got meta"),
    (lambda: (random_x(3, 72), {"out": torch.empty(3, 25)}), ShapeError,
     r"out must be a tensor of shape \(3, 24\), got \(3, 25\)"),
    (lambda: (random_x(3, 72), {"out": torch.empty(3, 24)}), ArgumentError,
     "out must be torch.float16 on cpu, got torch.float32"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "message"), BAD_CALLS)
def test_bad_call(call, error, message):
    x, options = call()
    with pytest.raises(error, match=message):
        gristmill.linear(x, weights()[1], **options)


def test_tensor_with_a_weight_of_numpy_arrays():
    with pytest.raises(ArgumentError, match=r"x is a torch tensor, weight has ndarrays; see gristmill\.to_torch"):
        gristmill.linear(random_x(3, 72), weights()[0])


def test_tensor_with_a_dense_weight():
    with pytest.raises(ArgumentError, match="weight must be a PackedWeight, got Tensor"):
        gristmill.linear(random_x(3, 72), torch.zeros(24, 72))


def test_to_torch_of_device_arrays(fake_device):
    placed = gristmill.to_device(weights()[0], "fake:0")
    with pytest.raises(
        ArgumentError, match=r"of numpy arrays or torch tensors, got DeviceArrays; place the host's weight"
    ):
        gristmill.to_torch(placed, "cpu")


def test_to_torch_of_rows_that_run_backwards():
    host, _ = weights()
    reversed_rows = host.map(lambda array: array[::-1] if array.ndim == 2 else array)
    back = to_numpy(gristmill.to_torch(reversed_rows, "cpu"))
    np.testing.assert_array_equal(dequantize(back), dequantize(host)[::-1])


def test_to_torch_without_a_gpu():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(NoDeviceError, match="cuda:0: torch sees no GPU"):
        gristmill.to_torch(weights()[0], "cuda:0")


# The op.


def op_arguments(dtype="float16", *, x=None, **options):
    _, weight = weights(dtype, **options)
    x = random_x(2, 3, 72, dtype=dtype) if x is None else x
    return (x, weight.qweight, weight.scales, weight.zero_points, weight.bias, weight.perm, weight.K, weight.group_size)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("perm", [False, True])
def test_opcheck(dtype, perm):
    torch.library.opcheck(torch.ops.gristmill.w4a16_linear, op_arguments(dtype, perm=perm))


def test_op_without_options():
    host = fake_driver.random_weight(8, 24, -1)
    weight = gristmill.to_torch(host, "cpu")
    arguments = (random_x(3, 24), weight.qweight, weight.scales, None, None, None, 24, 24)
    torch.library.opcheck(torch.ops.gristmill.w4a16_linear, arguments)
    check(torch.ops.gristmill.w4a16_linear(*arguments), arguments[0], host)
    check(torch.ops.gristmill.w4a16_linear(*arguments[:-1], -1), arguments[0], host)


def test_op_checks_the_weight():
    arguments = op_arguments()
    with pytest.raises(ShapeError, match=r"scales must have shape \(24, 5\) = \(N, ceil\(K/group_size\)\)"):
        torch.ops.gristmill.w4a16_linear(*arguments[:-1], 16)


def test_compile_with_dynamic_rows_compiles_once():
    _, weight = weights()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def model(x):
        return gristmill.linear(x, weight) * 2

    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=backend)
    for M in (4, 5, 17, 33):  # none the size of another dimension
        x = random_x(M, 72)
        torch.testing.assert_close(compiled(x), model(x))
    assert len(graphs) == 1
    assert any(node.target is torch.ops.gristmill.w4a16_linear.default for node in graphs[0].graph.nodes)


def test_compile_of_the_module():
    host, _ = weights()
    layer = gristmill.nn.W4A16Linear(host)
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for M in (3, 5, 17):
        with torch.inference_mode():
            check(compiled(random_x(M, 72)), random_x(M, 72), host)
    assert counters["stats"]["unique_graphs"] == 1


def test_export():
    host, _ = weights()
    layer = gristmill.nn.W4A16Linear(host)
    rows = torch.export.Dim("rows", min=2, max=4096)
    program = torch.export.export(layer, (random_x(5, 72),), dynamic_shapes=({0: rows},))
    x = random_x(9, 72)
    check(program.module()(x), x, host)


def test_gradient_is_refused_where_it_is_asked_for():
    _, weight = weights()
    x = random_x(3, 72).requires_grad_()
    out = gristmill.linear(x, weight)
    with pytest.raises(NotImplementedError, match="gristmill::w4a16_linear is for inference"):
        out.sum().backward()
    with torch.no_grad():
        assert not gristmill.linear(x, weight).requires_grad


def with_tangent(function, x):
    with forward_ad.dual_level():
        return function(forward_ad.make_dual(x, torch.ones_like(x)))


def with_gradient(function, x):
    return function(x.requires_grad_())


DERIVATIVES = {
    "tangent": with_tangent,
    "torch.func.jvp": lambda function, x: torch.func.jvp(function, (x,), (x,)),
    "torch.func.grad": lambda function, x: torch.func.grad(lambda x: function(x).sum())(x),
    "torch.func.vjp": torch.func.vjp,
}


@pytest.mark.parametrize("take", DERIVATIVES.values(), ids=DERIVATIVES)
@pytest.mark.parametrize("grad", [True, False])
def test_other_derivatives_are_refused(take, grad):
    _, weight = weights()
    message = "gristmill::w4a16_linear is for inference and has no derivative"
    with torch.set_grad_enabled(grad), pytest.raises(NotImplementedError, match=message):
        take(lambda x: gristmill.linear(x, weight), random_x(3, 72))


@pytest.mark.parametrize("take", [with_gradient, *DERIVATIVES.values()], ids=["gradient", *DERIVATIVES])
def test_derivative_is_not_lost_on_the_way_to_out(take):
    _, weight = weights()
    out = torch.zeros(3, 24, dtype=torch.float16)
    with pytest.raises(
        ArgumentError, match=r"out and stream must be None where x has a derivative or is under torch\.f"
    ):
        take(lambda x: gristmill.linear(x, weight, out=out), random_x(3, 72))
    assert not out.any()


def test_level_of_forward_mode_without_a_tangent():
    host, weight = weights()
    x, out = random_x(3, 72), torch.empty(3, 24, dtype=torch.float16)
    with forward_ad.dual_level():
        check(gristmill.linear(x, weight), x, host)
        check(gristmill.linear(x, weight, out=out), x, host)
    with torch.no_grad():
        check(gristmill.linear(x.requires_grad_(), weight, out=out), x.detach(), host)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap():
    host, weight = weights()
    x = random_x(2, 3, 72)
    check(torch.func.vmap(lambda x: gristmill.linear(x, weight))(x), x, host)


def test_profiler_sees_the_op():
    _, weight = weights()
    with torch.profiler.profile() as profile:
        gristmill.linear(random_x(3, 72), weight)
    assert "gristmill::w4a16_linear" in {event.key for event in profile.key_averages()}


# The module.


def test_module():
    host, _ = weights("bfloat16")
    layer = gristmill.nn.W4A16Linear(host)
    x = random_x(2, 3, 72, dtype="bfloat16")
    check(layer(x), x, host)
    assert repr(layer) == (
        "W4A16Linear(in_features=72, out_features=24, group_size=32, dtype=bfloat16, "
        "zero_points=True, bias=True, perm=False)"
    )
    assert not list(layer.parameters())


def test_module_state_round_trip():
    first, second = (fake_driver.random_weight(24, 72, 32, zero_points=True, bias=True, seed=seed) for seed in (0, 1))
    layer, other = gristmill.nn.W4A16Linear(first), gristmill.nn.W4A16Linear(second)
    x = random_x(5, 72)
    check(other(x), x, second)
    saved = io.BytesIO()
    torch.save(layer.state_dict(), saved)
    saved.seek(0)
    other.load_state_dict(torch.load(saved, weights_only=True))
    check(other(x), x, first)
    assert all(buffer.is_contiguous() for buffer in layer.state_dict().values())  # as safetensors wants them


def test_state_of_another_group_size_is_refused():
    layer = gristmill.nn.W4A16Linear(fake_driver.random_weight(24, 72, 64))
    other = gristmill.nn.W4A16Linear(fake_driver.random_weight(24, 72, 40))  # two groups, too
    with pytest.raises(ArgumentError, match="of a layer with K=72 group_size=64, this one has K=72 group_size=40"):
        other.load_state_dict(layer.state_dict())


def test_module_copies_and_converts():
    host, _ = weights("bfloat16")
    layer = gristmill.nn.W4A16Linear(host)
    x = random_x(5, 72, dtype="bfloat16")
    expected = layer(x)
    torch.testing.assert_close(copy.deepcopy(layer)(x), expected, rtol=0, atol=0)
    torch.testing.assert_close(pickle.loads(pickle.dumps(layer))(x), expected, rtol=0, atol=0)
    half = layer.half()
    assert half(x.half()).dtype == torch.float16
    with pytest.raises(DTypeError, match="x must be float16, the dtype of weight, got bfloat16"):
        half(x)
    with pytest.raises(DTypeError, match="must be float16 or bfloat16, got float32"):
        layer.float()(x.float())


def test_module_sees_a_buffer_that_was_replaced():
    host, _ = weights()
    layer = gristmill.nn.W4A16Linear(host)
    x = random_x(5, 72)
    layer(x)
    layer.bias = torch.zeros_like(layer.bias)
    check(layer(x), x, fake_driver.random_weight(24, 72, 32, zero_points=True))


def test_module_as_another_thread_sees_it_in_its_first_forward():
    """Whenever the layer sets something, the layer can be called."""

    class Watched(gristmill.nn.W4A16Linear):
        def __setattr__(self, name, value):
            super().__setattr__(name, value)
            if value and "_packed" in vars(self):
                seen.append(self.packed_weight())

    seen: list = []
    layer = Watched(weights()[0])
    assert layer.packed_weight() is seen[-1] is layer.packed_weight()


# The eager path of a GPU, with tensors on the CPU that pass for tensors of the fake device.


@pytest.fixture
def tensors_on_fake(fake_device, monkeypatch):
    view = gristmill.arrays._view_torch

    def view_as_fake(tensor, torch):
        found = view(tensor, torch)
        return gristmill.arrays.ArrayView(found.address, found.shape, found.strides, found.dtype, Device("fake", -1))

    monkeypatch.setattr(gristmill.arrays, "_view_torch", view_as_fake)
    monkeypatch.setattr(adapter, "DRIVER", "fake")
    monkeypatch.setattr(adapter, "_current_raw_stream", lambda ordinal: 77)
    return fake_device


def launch(x, weight):
    return adapter._launch(x, prepare(weight), weight.perm)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("perm", [False, True])
def test_eager(tensors_on_fake, dtype, perm):
    host, weight = weights(dtype, perm=perm)
    wide = random_x(7, 100, dtype=dtype)
    views = [wide[:, :72], wide[:, 3:75], wide[::2, :72], wide[2, 8:80], wide[:0, :72], wide[:, :72].expand(2, 7, 72)]
    views += [random_x(3, 1, 100, dtype=dtype)[:, :, :72], random_x(3, 4, 72, dtype=dtype).transpose(0, 1)]
    for x in (
        *views,
        random_x(2, 3, 72, dtype=dtype),
        random_x(4, 6, 72, dtype=dtype)[:, ::3],
        random_x(1, 72, dtype=dtype),
    ):
        check(launch(x, weight), x, host)
    assert {call[5] for call in tensors_on_fake.called("launch")} == {77}


def test_eager_makes_no_copy_where_strides_allow(tensors_on_fake):
    _, weight = weights()
    x = random_x(4, 6, 80)[:, :, :72]
    launch(x, weight)
    values = tensors_on_fake.called("launch")[0][-1]
    assert (values[0], values[6], values[11]) == (x.data_ptr(), 24, 80)


def test_op_tells_weights_of_one_memory_apart(tensors_on_fake):
    """Tensors of other dtypes or strides at the addresses of a weight that is known are checked like any other."""
    _, weight = weights()
    tensors = {name: getattr(weight, name) for name in ("qweight", "scales", "zero_points", "bias")}
    x = random_x(2, 72)
    adapter._op_cuda(x, *tensors.values(), None, 72, 32)
    others = [(name, DTypeError, tensors[name].view(torch.int16)) for name in ("scales", "zero_points", "bias")]
    others += [("qweight", DTypeError, tensors["qweight"].view(torch.float32))]
    others += [("bias", StrideError, tensors["bias"].as_strided((24,), (0,)))]
    for name, error, other in others:
        assert other.data_ptr() == tensors[name].data_ptr()
        with pytest.raises(error, match=f"{name} must|the weight's dtype must"):
            adapter._op_cuda(x, *{**tensors, name: other}.values(), None, 72, 32)
    assert len(tensors_on_fake.called("launch")) == 1


def test_op_with_a_weight_of_another_device(tensors_on_fake):
    with pytest.raises(DeviceMismatchError, match="x must be on cpu, the device of weight, got meta"):
        adapter._op_cuda(random_x(3, 72).to("meta"), *op_arguments()[1:])


def test_eager_and_op_launch_the_same(tensors_on_fake):
    host, weight = weights()
    x = random_x(2, 3, 72)
    padded = pad_rows(weight.qweight)
    for qweight in (weight.qweight, padded):
        out = adapter._op_cuda(x, qweight, weight.scales, weight.zero_points, weight.bias, None, 72, 32)
        check(out, x, host)
    check(launch(x, weight), x, host)
    first, _, third = (call[-1] for call in tensors_on_fake.called("launch"))
    assert [value for i, value in enumerate(first) if i != 5] == [value for i, value in enumerate(third) if i != 5]
    assert first[11:15] == [72, 12, 3, 24]


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (lambda: random_x(3, 73), ShapeError, r"x must have shape \(..., K\) with K=72, got \(3, 73\)"),
        (lambda: random_x(2, 3, 73), ShapeError, r"got \(2, 3, 73\)"),
        (lambda: random_x(3, 72).float(), DTypeError, "x must be float16, the dtype of weight, got float32"),
        (lambda: random_x(72, 3).t(), StrideError, "x must have an inner stride of one element, got 3"),
        (lambda: random_x(2, 72, 3).transpose(1, 2), StrideError, "got 3"),
    ],
)
def test_eager_bad_call(tensors_on_fake, x, error, message):
    _, weight = weights()
    with pytest.raises(error, match=message):
        launch(x(), weight)
    assert not tensors_on_fake.called("launch")


def test_eager_on_another_device(tensors_on_fake, monkeypatch):
    _, weight = weights()
    prepared = prepare(weight)
    monkeypatch.setattr(prepared, "ordinal", 1)
    monkeypatch.setattr(prepared, "device", Device("fake", 1))
    with pytest.raises(DeviceMismatchError, match="x must be on fake:1, the device of weight, got fake:-1"):
        adapter._launch(random_x(3, 72), prepared, None)


def rows_at_two_strides() -> torch.Tensor:
    return random_x(3, 4, 72).transpose(0, 1)


@pytest.mark.parametrize(
    ("x", "perm", "fix"),
    [
        (rows_at_two_strides, False, "give x with its rows at one stride"),
        (
            lambda: random_x(4, 3, 72),
            True,
            r"gather x\[..., perm\] before the call and pass a weight whose perm is None",
        ),
    ],
)
def test_eager_on_another_stream_refuses_what_torch_would_do_on_its_own(tensors_on_fake, x, perm, fix):
    host, weight = weights(perm=perm)
    x, out = x(), torch.zeros(4, 3, 24, dtype=torch.float16)
    with pytest.raises(ArgumentError, match=f"stream must be torch's current stream where x has to be .*: {fix}"):
        adapter._launch_into(x, weight, out.view(12, 24), 9)
    assert not tensors_on_fake.called("launch")
    assert not out.any()
    for stream in (None, 77):  # the current one
        adapter._launch_into(x, weight, out.view(12, 24), stream)
        check(out, x, host)


def test_eager_on_another_stream(tensors_on_fake):
    host, weight = weights()
    x, out = random_x(4, 3, 80)[..., :72], torch.zeros(4, 3, 24, dtype=torch.float16)
    adapter._launch_into(x, weight, out.view(12, 24), 9)
    check(out, x, host)
    assert [call[5] for call in tensors_on_fake.called("launch")] == [9]
    adapter._launch_into(rows_at_two_strides()[:, :0], weight, out.view(12, 24)[:0], 9)  # nothing to copy


# Autocast and inference mode, beside nn.Linear.


def dense_linear(host, dtype=torch.float32) -> torch.nn.Linear:
    layer = torch.nn.Linear(host.K, host.N)
    layer.weight.data = torch.from_numpy(dequantize(host)).to(dtype)
    layer.bias.data = torch.from_numpy(host.bias.astype(np.float32)).to(dtype)
    return layer


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("x_dtype", ["float32", "float16", "bfloat16"])
def test_autocast_as_nn_linear(dtype, x_dtype):
    host, _ = weights(dtype)
    layer, dense = gristmill.nn.W4A16Linear(host), dense_linear(host)
    x = torch.randn(2, 3, 72, generator=torch.Generator().manual_seed(3)).to(getattr(torch, x_dtype))
    wanted = adapter.DTYPES[dtype]
    with torch.autocast("cpu", wanted):
        out, expected = layer(x), dense(x)
        assert torch.is_autocast_enabled("cpu")
    assert out.dtype == expected.dtype == wanted
    check(out, x.to(wanted), host)
    torch.testing.assert_close(out, expected, rtol=2**-6, atol=2**-5)


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
def test_autocast_to_another_dtype_is_refused(x_dtype):
    host, weight = weights("float16")
    x = random_x(3, 72).to(x_dtype)
    message = r"x is \w+ and torch.autocast asks for bfloat16, but weight is float16: convert the layer with .*bfloat16"
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(DTypeError, match=message):
            gristmill.linear(x, weight)
        check(gristmill.linear(random_x(3, 72), weight), random_x(3, 72), host)  # the weight's own dtype stays
        layer = gristmill.nn.W4A16Linear(host).to(torch.bfloat16)  # what the message says
        assert layer(x).dtype == torch.bfloat16


def test_autocast_leaves_alone_what_it_leaves_alone_elsewhere():
    host, weight = weights("bfloat16")
    with torch.autocast("cpu", torch.bfloat16):
        for x in (random_x(3, 72).double(), random_x(3, 72).int()):
            with pytest.raises(DTypeError, match=r"x must be .*bfloat16, the dtype of weight, got"):
                gristmill.linear(x, weight)
            with pytest.raises(RuntimeError):
                dense_linear(host)(x)
    with torch.autocast("cpu", torch.bfloat16, enabled=False), pytest.raises(DTypeError, match="got float32"):
        gristmill.linear(random_x(3, 72).float(), weight)


def test_autocast_under_compile():
    host, _ = weights("bfloat16")
    layer = gristmill.nn.W4A16Linear(host)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    x = random_x(5, 72).float()
    with torch.autocast("cpu", torch.bfloat16):
        out, expected = compiled(x), layer(x)
    torch.testing.assert_close(out, expected, rtol=0, atol=0)


def test_autocast_keeps_opcheck():
    with torch.autocast("cpu", torch.float16):
        torch.library.opcheck(torch.ops.gristmill.w4a16_linear, op_arguments(x=random_x(3, 72).float()))


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
def test_eager_autocast(tensors_on_fake, x_dtype):
    """The path of a GPU: cast where nn.Linear casts, refused where the weight is of another dtype."""
    host, weight = weights("float16")
    x = random_x(2, 3, 72).to(x_dtype)
    with torch.autocast("cpu", torch.float16):
        check(launch(x, weight), x.half(), host)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(DTypeError, match="asks for bfloat16, but weight is"):
        launch(x, weight)
    with pytest.raises(DTypeError, match="x must be float16, the dtype of weight, got"):
        launch(x, weight)


def test_inference_mode_as_nn_linear():
    host, _ = weights("bfloat16")
    layer, dense = gristmill.nn.W4A16Linear(host), dense_linear(host, torch.bfloat16)
    with torch.inference_mode():
        made_inside = random_x(3, 72, dtype="bfloat16").clone()
        for module in (layer, dense):
            out = module(made_inside)
            assert out.is_inference()
            assert not out.requires_grad
    for module in (layer, dense.requires_grad_(False)):
        out = module(made_inside)  # an inference tensor outside
        assert not out.is_inference()
        out.add_(1)
