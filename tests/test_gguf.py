import contextlib
import struct
import tracemalloc

import gguf_files
import numpy as np
import pytest
from gristmill.checkpoints.gguf import GgufCheckpoint
from gristmill.checkpoints.gguf_header import FOUR_BIT_TYPES, TENSOR_TYPES, read_header
from gristmill.errors import CheckpointError
from gristmill.packed_weight import dequantize

N, K = 6, 96


@pytest.fixture
def rng():
    return np.random.default_rng()


def write_q4_1(path, q, d, m):
    return gguf_files.write(path, {"blk.0.attn_q.weight": (gguf_files.blocks_q4_1(q, d, m), "Q4_1")})


def random_q4_1(rng):
    q = rng.integers(0, 16, (N, K))
    d = rng.uniform(0.001, 0.1, (N, K // 32)).astype(np.float16)
    m = rng.uniform(-1, 1, (N, K // 32)).astype(np.float16)
    return q, d, m


def load(path):
    return GgufCheckpoint(path).load("blk.0.attn_q.weight")


def by_definition(q, d, m):
    group = np.arange(K) // 32
    return q * d.astype(np.float64)[:, group] + m.astype(np.float64)[:, group]


def test_q4_1_is_read_by_its_definition(tmp_path, rng):
    q, d, m = random_q4_1(rng)
    weight = load(write_q4_1(tmp_path / "model.gguf", q, d, m))
    np.testing.assert_array_equal(weight.dense(), by_definition(q, d, m))
    assert (weight.info.K, weight.info.N, weight.info.group_size) == (K, N, 32)
    assert weight.info.has_zero_points


def test_q4_0_is_read_by_its_definition(tmp_path, rng):
    q = rng.integers(0, 16, (N, K))
    d = rng.standard_normal((N, K // 32)).astype(np.float16)
    path = gguf_files.write(tmp_path / "model.gguf", {"blk.0.attn_q.weight": (gguf_files.blocks_q4_0(q, d), "Q4_0")})
    weight = load(path)
    np.testing.assert_array_equal(weight.dense(), by_definition(q, d, -8.0 * d.astype(np.float64)))
    # Without minimums nothing is rounded: the packed float16 weight is the same number for number.
    np.testing.assert_array_equal(dequantize(weight.pack("float16")), weight.dense())


def test_both_types_agree_with_the_gguf_package(tmp_path, rng):
    import gguf

    q, d, m = random_q4_1(rng)
    blocks = gguf_files.blocks_q4_1(q, d, m)
    theirs = gguf.dequantize(blocks, gguf.GGMLQuantizationType.Q4_1)
    np.testing.assert_allclose(load(write_q4_1(tmp_path / "model.gguf", q, d, m)).dense(), theirs, rtol=2**-22)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_packing_stays_within_the_rounding_of_scale_and_zero_point(tmp_path, rng, dtype):
    weight = load(write_q4_1(tmp_path / "model.gguf", *random_q4_1(rng)))
    error = np.abs(dequantize(weight.pack(dtype)) - weight.dense())
    assert (error <= weight.conversion_bound(dtype)).all()
    assert error.max() > 0


HARD_BLOCKS = [
    # d, m: what is special
    (0.0, 0.5),  # no zero point exists
    (0.0, -3e-5),  # the same, below float16's normal range
    (0.0, 0.0),
    (6e-8, 1.0),  # the zero point is past float16
    (6e-8, -65504.0),
    (-6e-8, 7.0),
    (6e-8, 0.0039),  # just around the largest zero point
    (1.0, 65504.0),
    (-0.25, 2.0),  # a negative scale
    (3.0, 6e-8),  # a zero point below float16's normal range
    (65504.0, 1.0),
]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("d", "m"), HARD_BLOCKS)
def test_hard_block_still_gives_the_right_weight(tmp_path, rng, dtype, d, m):
    q, scales, minimums = random_q4_1(rng)
    scales[2, 1], minimums[2, 1] = d, m
    weight = load(write_q4_1(tmp_path / "model.gguf", q, scales, minimums))
    packed = dequantize(weight.pack(dtype))
    np.testing.assert_array_equal(weight.dense(), by_definition(q, scales, minimums))
    assert np.isfinite(packed).all()
    assert (np.abs(packed - weight.dense()) <= weight.conversion_bound(dtype)).all()
    if d == 0 and dtype == "float16":
        np.testing.assert_array_equal(packed[2, 32:64], np.full(32, float(np.float16(m))))


def test_scale_that_is_not_finite_is_refused(tmp_path, rng):
    q, d, m = random_q4_1(rng)
    m[4, 2] = np.inf
    with pytest.raises(CheckpointError, match="row 4, block 2: scale or minimum is not finite"):
        load(write_q4_1(tmp_path / "model.gguf", q, d, m))


def test_type_that_is_not_supported_is_named(tmp_path, rng):
    tensors = {
        "blk.0.attn_q.weight": (rng.integers(0, 256, (4, 144), dtype=np.uint8), "Q4_K"),
        "norm.weight": (rng.standard_normal(8).astype(np.float32), "F32"),
    }
    checkpoint = GgufCheckpoint(gguf_files.write(tmp_path / "model.gguf", tensors))
    assert checkpoint.layers == checkpoint.left_out == {}
    assert checkpoint.not_read == {"blk.0.attn_q.weight": "type Q4_K is not supported; Q4_0 and Q4_1 are"}
    with pytest.raises(CheckpointError, match=r"blk\.0\.attn_q\.weight: type Q4_K is not supported; Q4_0 and Q4_1 are"):
        checkpoint.load("blk.0.attn_q.weight")
    with pytest.raises(CheckpointError, match="no tensor 'lm_head'"):
        checkpoint.load("lm_head")


def test_file_cut_short_anywhere_is_refused(tmp_path, rng):
    path = write_q4_1(tmp_path / "model.gguf", *random_q4_1(rng))
    data = path.read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in [*range(0, 400, 3), len(data) - N * K // 32 * 20 - 1, len(data) // 2, len(data) - 40]:
        cut.write_bytes(data[:length])
        with pytest.raises(CheckpointError, match=r"damaged or cut short|not a GGUF file"):
            GgufCheckpoint(cut)


def test_absurd_counts_are_refused_at_once(tmp_path, rng):
    data = bytearray(write_q4_1(tmp_path / "model.gguf", *random_q4_1(rng)).read_bytes())
    for offset in (8, 16):  # the tensor count, the key count
        absurd = data.copy()
        absurd[offset : offset + 8] = (2**62).to_bytes(8, "little")
        path = tmp_path / "absurd.gguf"
        path.write_bytes(absurd)
        with pytest.raises(CheckpointError, match="damaged or cut short"):
            GgufCheckpoint(path)


def test_damaged_byte_gives_a_typed_error_or_the_same_kind_of_answer(tmp_path, rng):
    data = write_q4_1(tmp_path / "model.gguf", *random_q4_1(rng)).read_bytes()
    path = tmp_path / "damaged.gguf"
    for offset in range(min(len(data), 300)):
        damaged = bytearray(data)
        damaged[offset] ^= int(rng.integers(1, 256))
        path.write_bytes(damaged)
        try:
            checkpoint = GgufCheckpoint(path)
            for name in checkpoint.layers:
                assert np.isfinite(checkpoint.load(name).dense()).all()
        except CheckpointError:
            continue


def test_missing_file_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"nothing\.gguf: No such file"):
        GgufCheckpoint(tmp_path / "nothing.gguf")


def test_tensor_types_are_those_of_the_gguf_package():
    import gguf

    theirs = {int(type_): (type_.name, *sizes) for type_, sizes in gguf.GGML_QUANT_SIZES.items()}
    common = theirs.keys() & TENSOR_TYPES.keys()
    assert len(common) > 30
    assert {number: TENSOR_TYPES[number] for number in common} == {number: theirs[number] for number in common}


def test_four_bit_types_are_those_of_that_size():
    """Four bits a value, and at most one more for what a block has beside them."""
    sizes = {name: 8 * block_bytes / values for name, values, block_bytes in TENSOR_TYPES.values()}
    assert {name for name, bits in sizes.items() if 4 <= bits <= 5} == FOUR_BIT_TYPES


def test_header_agrees_with_the_gguf_package(tmp_path, rng):
    """Offsets and shapes of a file with keys of every kind, strings and arrays among them."""
    import gguf

    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(64)
    writer.add_string("a.name", "x" * 37)
    writer.add_array("a.tokens", ["one", "", "three"])
    writer.add_array("a.scores", [0.5, 1.5])
    writer.add_bool("a.flag", True)
    writer.add_float64("a.number", 2.5)
    for index in range(3):
        writer.add_tensor(f"tensor {index}", rng.standard_normal((3, 5 + index)).astype(np.float32))
    writer.add_tensor("packed", rng.integers(0, 256, (4, 40), dtype=np.uint8),
                      raw_dtype=gguf.GGMLQuantizationType.Q4_1)  # fmt: skip
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = read_header(memoryview(path.read_bytes()))
    theirs = gguf.GGUFReader(path).tensors
    assert [(t.name, t.type, t.shape, t.offset, t.bytes) for t in found.values()] == [
        (t.name, t.tensor_type.name, tuple(t.shape), t.data_offset, t.n_bytes) for t in theirs
    ]


def header(*, tensors: int = 0, keys: int = 0, rest: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + rest


def text(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data


def tensor(name: bytes, type_: int, shape: tuple[int, ...], offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, type_, offset)


ALIGNMENT = text(b"general.alignment")

DAMAGED = [
    (header(version=3 << 24), "big-endian GGUF files are not supported"),
    (header(version=1), r"GGUF version 1 is not supported; \(2, 3\) are"),
    (header(keys=1, rest=ALIGNMENT + struct.pack("<II", 4, 0)), "general.alignment is not a power of two"),
    (header(keys=1, rest=ALIGNMENT + struct.pack("<II", 4, 48)), "general.alignment is not a power of two"),
    (header(keys=1, rest=ALIGNMENT + struct.pack("<II", 5, 32)), "not a power of two of type uint32"),
    (header(keys=1, rest=text(b"k") + struct.pack("<IIQ", 9, 9, 1)), "is an array of type 9"),
    (header(keys=1, rest=text(b"k") + struct.pack("<I", 13)), "has type 13"),
    (header(keys=1, rest=text(b"k") + struct.pack("<IIQ", 9, 0, 2**40)), "needs 1099511627776 bytes"),
    (header(keys=1, rest=text(b"k") + struct.pack("<IIQ", 9, 12, 2**63)), "needs 73786976294838206464 bytes"),
    (header(tensors=1, rest=struct.pack("<Q", 2**64 - 1)), "tensor 0 needs 18446744073709551615 bytes"),
    (header(tensors=2, rest=tensor(b"a", 0, (1,)) * 2 + bytes(64)), "two tensors are called 'a'"),
    (header(tensors=1, rest=tensor(b"\xff", 0, (1,)) + bytes(64)), "is not UTF-8"),
    (header(tensors=1, rest=tensor(b"n" * 1025, 0, (1,)) + bytes(64)), "has 1025 bytes, more than 1024"),
    (header(tensors=1, rest=tensor(b"a", 0, (1, 1, 1, 1, 1)) + bytes(64)), "tensor 0 has 5 dimensions"),
    (header(tensors=100_001, rest=bytes(200)), "100001 tensors, more than 100000"),
    # Extents whose product is 0 in 64 bits, and an offset that is past the end in 64 bits and not in 65.
    (header(tensors=1, rest=tensor(b"a", 2, (2**32, 2**32)) + bytes(64)), "a needs 10376293541461622784 bytes"),
    (header(tensors=1, rest=tensor(b"a", 3, (32, 1), 2**64 - 64) + bytes(64)), "a needs 20 bytes"),
    (header(tensors=1, rest=tensor(b"a", 2, (33, 1)) + bytes(96)), "shape 33 x 1 is not made of blocks of 32"),
    (header(tensors=1, rest=tensor(b"a", 2, (32, 0)) + bytes(64)), "shape 32 x 0 is not made of blocks of 32"),
]


@pytest.mark.parametrize(("data", "message"), DAMAGED)
def test_damaged_header_is_refused_with_the_place(data, message, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=message):
        GgufCheckpoint(path)


def test_tensor_of_a_type_that_is_not_known_is_left_out(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(header(tensors=1, rest=tensor(b"a", 99, (32, 4)) + bytes(64)))
    assert GgufCheckpoint(path).left_out == {"a": "type 99"}


EXPERTS = "blk.0.ffn_gate_exps.weight"


def test_experts_are_named_as_not_read(tmp_path):
    """Three dimensions: the experts of a mixture. Norms, and experts that are not in 4 bits, are no 4-bit layers."""
    path = tmp_path / "model.gguf"
    tensors = [tensor(EXPERTS.encode(), 2, (32, 4, 2)), tensor(b"exps_f16", 1, (32, 4, 2)), tensor(b"norm", 0, (32,))]
    path.write_bytes(header(tensors=3, rest=b"".join(tensors) + bytes(1024)))
    checkpoint = GgufCheckpoint(path)
    reason = "Q4_0 with 3 dimensions is not supported; with 2 it is"
    assert (checkpoint.layers, checkpoint.left_out, checkpoint.not_read) == ({}, {}, {EXPERTS: reason})
    with pytest.raises(CheckpointError, match=f"{EXPERTS}: {reason}"):
        checkpoint.load(EXPERTS)


HOSTILE_LENGTHS = {
    "an array of bytes": header(keys=1, rest=text(b"k") + struct.pack("<IIQ", 9, 0, 8 << 20) + bytes(8 << 20)),
    "an array of empty strings": header(keys=1, rest=text(b"k") + struct.pack("<IIQ", 9, 8, 1 << 18) + bytes(8 << 18)),
    "counts of 2**63": header(tensors=2**63, keys=2**63, rest=bytes(1 << 20)),
    "a name of the whole file": header(tensors=1, rest=text(bytes(8 << 20)) + bytes(64)),
}


@pytest.mark.parametrize("hostile", HOSTILE_LENGTHS)
def test_no_length_of_a_header_makes_the_reader_allocate(hostile, tmp_path):
    """The `gguf` package takes more than 6 GB for the first of these, of 8 MB: objects for each element of an array."""
    path = tmp_path / "model.gguf"
    path.write_bytes(HOSTILE_LENGTHS[hostile])
    tracemalloc.start()
    try:
        with contextlib.suppress(CheckpointError):
            GgufCheckpoint(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 18
