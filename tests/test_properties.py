"""Properties that hold for every input, held against plain readings of the definitions."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest
import sample_pack
from formula_by_ast import names_in
from gristmill.checkpoints.affine import AffineWeight, LayerInfo
from gristmill.checkpoints.gguf import GgufCheckpoint
from gristmill.device import nominal_device
from gristmill.errors import (
    ArgumentError,
    CheckpointError,
    FormulaError,
    GristmillError,
    ManifestError,
    NoKernelError,
    PackSchemaError,
)
from gristmill.formula import MAX_LENGTH, Formula
from gristmill.manifest import Manifest
from gristmill.packed_weight import dequantize, pack, unpack_nibbles
from gristmill.preloading import reachable_entries
from gristmill.problem import Problem
from gristmill.ranges import Range, UndecidedError
from gristmill.select import select
from hypothesis import HealthCheck, assume, given, reject, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

# Time is bounded by the number of examples, not by a clock that a busy machine upsets.
settings.register_profile("here", deadline=None, max_examples=150, suppress_health_check=list(HealthCheck))
settings.load_profile("here")

NAMES = ("M", "N", "K", "group_size")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=20),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=8), children, max_size=4),
    max_leaves=6,
)

# Formulas.


@dataclass(frozen=True)
class Expression:
    """An expression with its value: None where it cannot be evaluated."""

    text: str
    value: int | None


VALUES = {"M": 65, "N": 4096, "K": 2112, "group_size": 64}

LEAVES = st.one_of(
    st.sampled_from([Expression(name, VALUES[name]) for name in NAMES]),
    st.integers(0, 2**63).map(lambda number: Expression(str(number), number)),
)


def compound(children):
    return st.one_of(
        st.tuples(st.sampled_from(["+", "-", "*", "//", "%"]), children, children).map(lambda t: arithmetic(*t)),
        st.tuples(st.sampled_from(["min", "max", "ceil_div"]), children, children).map(lambda t: call(*t)),
        st.tuples(st.sampled_from(["<", "<=", "==", "!=", ">", ">="]), children, children).map(lambda t: compare(*t)),
        children.map(lambda a: Expression(f"-({a.text})", None if a.value is None else -a.value)),
        children.map(lambda a: Expression(f"(not ({a.text}))", None if a.value is None else int(not a.value))),
    )


def arithmetic(operator: str, a: Expression, b: Expression) -> Expression:
    text = f"({a.text}) {operator} ({b.text})"
    if a.value is None or b.value is None or (operator in ("//", "%") and b.value == 0):
        return Expression(text, None)
    floor = a.value // b.value if operator in ("//", "%") else 0
    results = {
        "+": a.value + b.value,
        "-": a.value - b.value,
        "*": a.value * b.value,
        "//": floor,
        "%": a.value - floor * b.value,
    }
    return Expression(text, results[operator])


def call(name: str, a: Expression, b: Expression) -> Expression:
    text = f"{name}({a.text}, {b.text})"
    if a.value is None or b.value is None or (name == "ceil_div" and b.value == 0):
        return Expression(text, None)
    if name == "ceil_div":
        whole, rest = divmod(a.value, b.value)
        return Expression(text, whole + (rest != 0))
    smaller = a.value < b.value
    return Expression(text, a.value if smaller == (name == "min") else b.value)


def compare(operator: str, a: Expression, b: Expression) -> Expression:
    text = f"(({a.text}) {operator} ({b.text}))"
    if a.value is None or b.value is None:
        return Expression(text, None)
    holds = {"<": a.value < b.value, "==": a.value == b.value, ">": a.value > b.value}
    holds |= {"<=": holds["<"] or holds["=="], ">=": holds[">"] or holds["=="], "!=": not holds["=="]}
    return Expression(text, int(holds[operator]))


@given(st.recursive(LEAVES, compound, max_leaves=8))
def test_formula_has_the_value_of_its_expression(expression):
    try:
        found = Formula(expression.text)(VALUES)
    except FormulaError:
        assert expression.value is None or len(expression.text) > MAX_LENGTH
        return
    assert found == expression.value


ALPHABET = st.sampled_from(
    [*"MNK0123456789 +-*/%<>=!(),.'\"[]{}:;@\\\n\0x_\u00e9\ud800", "min", "max", "and", "not", "lambda"]
)


@given(st.one_of(st.lists(ALPHABET, max_size=40).map("".join), st.text(max_size=60)))
def test_any_text_is_a_formula_over_integers_or_a_formula_error(text):
    try:
        formula = Formula(text)
        value = formula(VALUES | {name: 1 for name in formula.names if name not in VALUES})
    except FormulaError:
        return
    assert isinstance(value, int)
    assert not formula.names & {"min", "max", "ceil_div"}


TOKEN_TEXT = (
    "M N _a1 0 7 00 08 1_0 2x 1.5 .5 ... + - * ** / // % < <= == != > >= <> = := -> << ! ~ & | ^ @ # ( ) , [ ] { } : ; "
    ". ' \" \\ \u00e9 \uff2d \u2160 \u0661 f' *M =M min( min(M, ceil_div(M, print( 9223372036854775809 "
    "9223372036854775808 and or not is in if else for lambda await yield None True __debug__ min max ceil_div"
)
TOKENS = st.sampled_from([*TOKEN_TEXT.split(), *"\n\t\f\r\0"])


@given(
    st.one_of(
        st.tuples(st.sampled_from(["", " "]), st.lists(TOKENS, max_size=12)).map(lambda t: t[0].join(t[1])),
        st.lists(ALPHABET, max_size=40).map("".join),
        st.text(max_size=30),
    )
)
@settings(max_examples=2000)
def test_what_is_no_formula_of_pythons_is_refused(text):
    """Nothing is taken that the whitelist of syntax-tree nodes refuses, and names are what Python takes for names."""
    try:
        formula = Formula(text)
    except FormulaError:
        return
    assert formula.names == names_in(text)


@given(st.recursive(LEAVES, compound, max_leaves=8), st.integers(0, 400), TOKENS, st.integers(0, 3))
@settings(max_examples=500)
def test_a_formula_that_was_changed_in_one_place_is_read_as_python_reads_it(expression, at, token, cut):
    at %= len(expression.text) + 1
    text = expression.text[:at] + token + expression.text[at + cut :]
    try:
        formula = Formula(text)
    except FormulaError:
        return
    assert formula.names == names_in(text)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(), lambda c: st.lists(c) | st.dictionaries(st.text(), c)
    )
)
def test_what_is_no_text_is_no_formula(value):
    with pytest.raises(FormulaError):
        Formula(value)


@given(st.recursive(LEAVES, compound, max_leaves=8), st.integers(-3, 130), st.integers(0, 9))
@settings(max_examples=500)
def test_formula_over_a_range_has_the_values_of_its_numbers(expression, least, count):
    assume(len(expression.text) <= MAX_LENGTH)
    formula = Formula(expression.text)
    values = [_value_of(formula, M) for M in range(least, least + count + 1)]
    try:
        found = formula(VALUES | {"M": Range(least, least + count)})
    except UndecidedError:
        reject()
    except FormulaError:
        assert set(values) == {None}
        return
    ends = (found.least, found.most) if isinstance(found, Range) else (found, found)
    assert all(value is not None and ends[0] <= value <= ends[1] for value in values)


def _value_of(formula: Formula, M: int) -> int | None:
    try:
        return formula(VALUES | {"M": M})
    except FormulaError:
        return None


# Manifests.


def places(node, path=()):
    """The path of every value in a document."""
    yield path
    for key, child in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        yield from places(child, (*path, key))


def put(document, path, value):
    """`document` with `value` at `path`."""
    if not path:
        return value
    changed = json.loads(json.dumps(document))
    node = changed
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    return changed


def at(document, path):
    """The value at `path`."""
    for key in path:
        document = document[key]
    return document


def like(value):
    """Values of the kind of `value`: most of what is of another kind is refused."""
    if isinstance(value, bool):
        return st.booleans()
    if isinstance(value, int):
        return st.integers(0, 2**31)
    if isinstance(value, str):
        return st.sampled_from([value, "", "1", "M", "M * K <= 9", "int32", "N", "gfx1201", "bfloat16"])
    return st.just(value)


PLACES_AND_VALUES = st.sampled_from(list(places(sample_pack.manifest()))).flatmap(
    lambda path: st.tuples(st.just(path), st.one_of(JSON, *[like(at(sample_pack.manifest(), path))] * 3))
)


@given(PLACES_AND_VALUES)
def test_any_value_at_any_place_is_read_as_it_is_or_refused(path_and_value):
    path, value = path_and_value
    document = put(sample_pack.manifest(), path, value)
    try:
        manifest = Manifest.parse(sample_pack.dump(document))
    except PackSchemaError:
        assert path == ("schema",)
        return
    except ManifestError:
        reject()
    written = json.loads(manifest.dump())
    read_again = json.loads(sample_pack.dump(document))
    assert {key: read_again[key] for key in written} == written
    assert Manifest.parse(manifest.dump()) == manifest


@given(st.binary(max_size=200))
def test_any_bytes_are_no_manifest(data):
    with pytest.raises(GristmillError):
        Manifest.parse(data)


# Most problems are such that an entry can take them: what is refused says nothing of what is selected.
SIZES = st.integers(1, 300) | st.integers(1, 300) | st.integers(1, 2**31 - 1)
PROBLEMS = st.builds(
    Problem,
    op=st.just("w4a16_gemm"),
    M=SIZES,
    N=SIZES,
    K=SIZES,
    group_size=st.sampled_from([32, 32, 64, 128, 8]),
    dtype=st.sampled_from(["float16", "float16", "float16", "bfloat16"]),
    has_zero_points=st.sampled_from([False, False, False, True]),
    has_bias=st.booleans(),
    alignment=st.sampled_from([16, 16, 16, 8, 2]),
)

GRIDS = st.sampled_from(["M", "0 - M", "M // (N - 1)", "M * N * K", "ceil_div(M, 64)", "1"])


@given(PROBLEMS, st.tuples(GRIDS, GRIDS, GRIDS), st.sampled_from(["0", "M - 7", "4 * K", "M * K", "lds_bytes + M"]))
def test_what_is_selected_can_be_launched(problem, grid, shared):
    entries = [sample_pack.entry(grid=list(grid), dynamic_shared_bytes=shared)]
    manifest = Manifest.parse(sample_pack.dump(sample_pack.manifest(entries=entries)))
    device = nominal_device("gfx1151")
    try:
        chosen = select(problem, device, manifest)
    except NoKernelError:
        reject()
    assert (problem.dtype, problem.has_zero_points, problem.alignment) == ("float16", False, 16)
    assert all(0 <= extent <= most for extent, most in zip(chosen.grid, (2**31 - 1, 65535, 65535), strict=True))
    assert 0 <= chosen.dynamic_shared_bytes <= device.lds_bytes_per_block


CONDITION_TEXT = """
    M <= 8; not M < 5; alignment % 16 == 0; alignment >= 4; K % 32 == 0; M * alignment < 200; N // M > 3; 3 <= M <= 40;
    M == 17; 4 > M; 1; M % 2; K // (M - 1) < 9; min(M, 8) * K < 600; max(0 - M, 2) == 2
"""
CONDITIONS = st.sampled_from([text.strip() for text in CONDITION_TEXT.split(";")])
ROW = st.fixed_dictionaries(
    {
        "grid": st.tuples(GRIDS, st.just("1"), st.just("1")).map(list),
        "dynamic_shared_bytes": st.sampled_from(["0", "512 * min(M, 8)", "M * K", "M - 7", "60000"]),
        "static_shared_bytes": st.sampled_from([0, 6000]),
        "conditions": st.lists(CONDITIONS, max_size=3),
        "rule": st.integers(0, 3),
    }
)


@given(st.lists(ROW, max_size=8), st.tuples(*[CONDITIONS] * 4), st.integers(1, 300), st.integers(1, 300), st.data())
@settings(max_examples=300)
def test_what_is_selected_was_reachable(rows, whens, N, K, data):
    entries, names = [], {rule: [] for rule in range(4)}
    for i, row in enumerate(rows):
        needs = {"dtype": "float16", "zero_points": False, "conditions": row.pop("conditions")}
        names[row.pop("rule")].append(f"entry{i}")
        entries.append(sample_pack.entry(name=f"entry{i}", needs=needs, **row))
    policy = [{"when": when, "entries": names[i], "origin": ""} for i, when in enumerate(whens)]
    manifest = Manifest.parse(sample_pack.dump(sample_pack.manifest(entries=entries, policy=policy)))
    device = nominal_device("gfx1151")
    reachable = reachable_entries(Problem("w4a16_gemm", 1, N, K, 32, "float16", False, False, 16), device, manifest)
    for M in (*range(1, 20), 39, 40, 41, *data.draw(st.lists(st.integers(1, 2**31 - 1), max_size=3)), 2**31 - 1):
        for alignment in (1, 2, 4, 8, 16):
            problem = Problem("w4a16_gemm", M, N, K, 32, "float16", False, False, alignment)
            try:
                chosen = select(problem, device, manifest)
            except NoKernelError:
                continue
            assert chosen.entry in reachable


# Packing.

NUMPY_DTYPE = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


@st.composite
def quantised(draw):
    """q, scales, zero points, bias, perm of any sizes, and the call's group size and dtype."""
    N, K = draw(st.integers(1, 9)), draw(st.integers(1, 70))
    group_size = draw(st.sampled_from([-1, 8, 16, 24, 32, 64, 128]))
    groups = 1 if group_size == -1 else -(-K // group_size)
    dtype = draw(st.sampled_from(["float16", "bfloat16"]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    reals = draw(arrays.arrays(np.float64, (N, groups), elements=st.floats(-6e4, 6e4)))
    return {
        "q": rng.integers(0, 16, (N, K)).astype(draw(st.sampled_from(["u1", "i1", "i8", "u8", ">i4"]))),
        "scales": reals,
        "zero_points": rng.uniform(-20, 20, (N, groups)) if draw(st.booleans()) else None,
        "bias": rng.standard_normal(N) if draw(st.booleans()) else None,
        "perm": rng.permutation(K) if draw(st.booleans()) else None,
        "group_size": group_size,
        "dtype": dtype,
    }


@given(quantised())
def test_packed_weight_means_what_was_packed(given_weight):
    weight = pack(**given_weight)
    N, K = given_weight["q"].shape
    size = K if given_weight["group_size"] == -1 else given_weight["group_size"]
    rounded = NUMPY_DTYPE[given_weight["dtype"]]
    perm = given_weight["perm"]
    found = dequantize(weight)
    for n in range(N):
        for k in range(K):
            scale = float(rounded(given_weight["scales"][n, k // size]))
            zero = 8.0
            if given_weight["zero_points"] is not None:
                zero = float(rounded(given_weight["zero_points"][n, k // size]))
            feature = k if perm is None else perm[k]
            assert found[n, feature] == (int(given_weight["q"][n, k]) - zero) * scale
    np.testing.assert_array_equal(unpack_nibbles(weight.qweight, K), given_weight["q"])


JUNK = st.one_of(
    arrays.arrays(
        st.sampled_from([np.dtype(t) for t in ("u1", "i8", "f2", "f4", "f8", "c8", "?", "U3", "O", "M8[s]")]),
        arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
    ),
    st.sampled_from([None, 3, "text", [], [[1, 2], [3]], object(), {"a": 1}, -1, 2.5]),
)


@given(
    st.sampled_from(["q", "scales", "zero_points", "bias", "perm", "group_size", "dtype"]),
    JUNK | st.integers() | st.floats() | st.text(max_size=5),
)
def test_whatever_is_packed_is_right_or_an_argument_error(name, junk):
    call = {
        "q": np.arange(16).reshape(4, 4),
        "scales": np.ones((4, 1), np.float16),
        "zero_points": None,
        "bias": None,
        "perm": None,
        "group_size": 8,
        "dtype": "float16",
    } | {name: junk}
    try:
        weight = pack(**call)
    except ArgumentError:
        return
    found = dequantize(weight)
    assert found.shape == (weight.N, weight.K)
    assert np.isfinite(found).all()
    assert type(weight.group_size) is int


# Checkpoints.


def float16_of(bits: int) -> float:
    return struct.unpack("<e", struct.pack("<H", bits))[0]


FINITE_BITS = st.integers(0, 0xFFFF).filter(lambda bits: bits & 0x7C00 != 0x7C00)


@given(FINITE_BITS, FINITE_BITS, st.sampled_from(["float16", "bfloat16"]), st.booleans())
def test_any_block_of_a_checkpoint_is_packed_within_its_bound(scale, minimum, dtype, has_minimum):
    """All sixteen values of a block, for any two float16 numbers."""
    info = LayerInfo("layer", 32, 1, 32, has_minimum, "Q4_1" if has_minimum else "Q4_0")
    q = np.arange(32, dtype=np.uint8)[None] % 16
    minimums = np.array([[float16_of(minimum)]]) if has_minimum else None
    weight = AffineWeight(info, q, np.array([[float16_of(scale)]]), minimums)
    offset = float16_of(minimum) if has_minimum else -8 * float16_of(scale)
    plain = np.array([[float16_of(scale) * (k % 16) + offset for k in range(32)]])
    np.testing.assert_array_equal(weight.dense(), plain)
    moved = np.abs(dequantize(weight.pack(dtype)) - plain)
    assert (moved <= weight.conversion_bound(dtype)).all()


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


@st.composite
def gguf_files(draw):
    """A file written from the specification, and what its layers hold: name -> list of rows of (scale, minimum, q)."""
    alignment = draw(st.sampled_from([8, 32, 64]))
    keys = string(b"general.alignment") + struct.pack("<II", 4, alignment)
    count = 1
    for index, text in enumerate(draw(st.lists(st.binary(max_size=9), max_size=3))):
        keys += string(b"key %d" % index) + struct.pack("<I", 8) + string(text)
        count += 1
    infos, data, layers = b"", b"", {}
    names = draw(st.lists(st.text(min_size=1, max_size=6), min_size=1, max_size=3, unique=True))
    for name in names:
        has_minimum, rows, blocks = draw(st.booleans()), draw(st.integers(1, 3)), draw(st.integers(1, 2))
        data += bytes(-len(data) % alignment)
        infos += string(name.encode()) + struct.pack("<IQQIQ", 2, 32 * blocks, rows, 3 if has_minimum else 2, len(data))
        layers[name] = []
        for _ in range(rows * blocks):
            scale, minimum = draw(FINITE_BITS), draw(FINITE_BITS)
            nibbles = draw(st.binary(min_size=16, max_size=16))
            data += struct.pack("<HH", scale, minimum) if has_minimum else struct.pack("<H", scale)
            data += nibbles
            q = [byte & 15 for byte in nibbles] + [byte >> 4 for byte in nibbles]
            offset = float16_of(minimum) if has_minimum else -8 * float16_of(scale)
            layers[name] += [float16_of(scale) * value + offset for value in q]
    head = b"GGUF" + struct.pack("<IQQ", 3, len(names), count) + keys + infos
    return head + bytes(-len(head) % alignment) + data, layers


@given(gguf_files())
def test_gguf_layers_are_what_the_specification_says(tmp_path_factory, written):
    content, layers = written
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    path.write_bytes(content)
    checkpoint = GgufCheckpoint(path)
    assert list(checkpoint.layers) == list(layers)
    for name, values in layers.items():
        assert checkpoint.load(name).dense().ravel().tolist() == values


@given(gguf_files(), st.data())
def test_gguf_file_cut_anywhere_is_refused(tmp_path_factory, written, data):
    content, _ = written
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    path.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    with pytest.raises(CheckpointError):
        GgufCheckpoint(path)
