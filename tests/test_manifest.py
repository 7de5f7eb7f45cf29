import json

import pytest
from gristmill.errors import ManifestError, PackSchemaError
from gristmill.manifest import Manifest
from sample_pack import dump, entry, manifest


def test_dump_is_the_inverse_of_parse():
    parsed = Manifest.parse(dump(manifest()))
    assert Manifest.parse(parsed.dump()) == parsed
    assert Manifest.parse(parsed.dump()).dump() == parsed.dump()
    assert json.loads(parsed.dump()) == manifest()


def test_newer_schema_is_refused_with_the_pip_line():
    with pytest.raises(PackSchemaError, match=r"schema 2 is newer than schema 1.*pip install --upgrade gristmill"):
        Manifest.parse(dump(manifest(schema=2)))


def test_older_schema_is_refused():
    with pytest.raises(PackSchemaError, match="schema 0 is older than schema 1"):
        Manifest.parse(dump(manifest(schema=0)))


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "not a JSON object"),
        ({}, "schema: must be an integer"),
        (manifest(schema=True), "schema: must be an integer"),
        (manifest(kind="ptx"), "kind: must be one of hsaco, cubin"),
        (manifest(arch="../gfx1151"), "arch must be letters"),
        (manifest(source_digest="short"), "source_digest must be a sha256"),
        (manifest(compilers={"triton": 3}), "compilers.*must be a str"),
        (manifest(entries=None), "entries must be a list"),
        (manifest(entries=[7]), r"entries\[0\]: must be an object"),
        (manifest(entries=[entry(), entry()]), "second entry of the name"),
        (manifest(entries=[entry(object="../../etc/passwd")]), "object must be a sha256"),
        (manifest(entries=[entry(object="/" + "0" * 63)]), "object must be a sha256"),
        (manifest(entries=[entry(op="w8a8_gemm")]), "op must be"),
        (manifest(entries=[entry(block=[32, 64, 1])]), "more than 1024 threads"),
        (manifest(entries=[entry(block=[0, 1, 1])]), "from 1 to 1024"),
        (manifest(entries=[entry(block=[32, 1])]), "must have 3 items"),
        (manifest(entries=[entry(grid=["M", "1", "lambda: 1"])]), "not part of the language"),
        (manifest(entries=[entry(grid=["M", "1", "password"])]), "names password"),
        (manifest(entries=[entry(arguments=[["x", "float32"]])]), "type must be one of"),
        (manifest(entries=[entry(arguments=[["secret", "pointer"]])]), "unknown argument 'secret'"),
        (manifest(entries=[entry(arguments=["x"])]), "an argument is"),
        (manifest(entries=[entry(roundings=0)]), "roundings: must be an integer from 1"),
        (manifest(entries=[entry(static_shared_bytes=-1)]), "static_shared_bytes"),
        (
            manifest(entries=[entry(needs={"dtype": "float32", "zero_points": False, "conditions": []})]),
            "dtype must be",
        ),
        (manifest(policy=[{"when": "1", "entries": ["nobody"], "origin": ""}]), "names an entry that is not there"),
        (manifest(policy=[{"when": "M >", "entries": [], "origin": ""}]), "formula"),
        (manifest(policy=[{"when": [], "entries": [], "origin": ""}]), "a formula is a string .*, got list"),
        (manifest(policy=[{"when": {"a": 1}, "entries": [], "origin": ""}]), "a formula is a string .*, got dict"),
        (manifest(policy=[{"when": "1" * 401, "entries": [], "origin": ""}]), "a formula .*, got 401 characters"),
        (manifest(arch=".."), "arch must be letters"),
        (manifest(version="\ud800"), r"version must be printable, got '\\ud800'"),
        (manifest(compilers={"\x1b[31m": "3"}), "compilers has a key that cannot be printed"),
        (manifest(policy=[{"when": "1", "entries": [], "origin": "\n"}]), "origin must be printable"),
        (manifest(entries=[entry(arguments=[["x", "int32"]])]), "argument 'x' cannot be of type 'int32'"),
        (manifest(entries=[entry(arguments=[["M", "pointer"]])]), "argument 'M' cannot be of type 'pointer'"),
        (manifest(entries=[entry(arguments=[["a", "null"]] * 65)]), "65 arguments, more than 64"),
    ],
)
def test_wrong_manifest_is_refused(document, message):
    with pytest.raises(ManifestError, match=message):
        Manifest.parse(dump(document))


@pytest.mark.parametrize("data", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"schema": 1e999}', b"null"])
def test_what_is_not_json_is_refused(data):
    with pytest.raises(ManifestError):
        Manifest.parse(data)


@pytest.mark.parametrize("depth", [100, 500, 900, 950, 980])
@pytest.mark.parametrize("field", ["schema", "arch", "entries", "compilers", "policy"])
def test_a_deep_value_is_refused_in_few_words(depth, field):
    """Python's own limit is met when the value is read, or when a message would show it."""
    deep = b"[" * depth + b"]" * depth
    data = dump(manifest(**{field: "HERE"})).replace(b'"HERE"', b"[" + deep + b"]")
    with pytest.raises(ManifestError) as caught:
        Manifest.parse(data)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    "changes", [{"name": "n" * 10**6}, {"op": "o" * 10**6}, {"arguments": [["n" * 10**6, "pointer"]]}]
)
def test_a_message_stays_short_whatever_it_quotes(changes):
    with pytest.raises(ManifestError) as caught:
        Manifest.parse(dump(manifest(entries=[entry(**changes)])))
    assert len(str(caught.value)) < 400


def test_cut_short_manifest_is_refused():
    data = dump(manifest())
    for length in range(0, len(data), 37):
        with pytest.raises(ManifestError):
            Manifest.parse(data[:length])


def test_an_entry_is_checked_when_it_is_looked_at():
    """The first result waits for what is read: that of another kind, or of another rule, is not."""
    wrong = entry(name="wrong", roundings=0)
    opened = Manifest.open(dump(manifest(entries=[entry(), wrong])))
    assert list(opened.entries) == list(opened.signatures) == [entry()["name"], "wrong"]
    assert len(opened.entries) == 2
    assert "wrong" in opened.entries
    assert opened.entries[entry()["name"]].roundings == 1
    for _ in range(2):
        with pytest.raises(ManifestError, match=r"entries\[1\] \(wrong\) roundings: must be an integer from 1"):
            opened.entries["wrong"]
    with pytest.raises(ManifestError, match="roundings"):
        opened.dump()


def test_an_opened_manifest_is_the_parsed_one():
    data = dump(manifest())
    assert Manifest.open(data) == Manifest.parse(data)


@pytest.mark.parametrize(
    "needs",
    [{"dtype": "float32", "zero_points": False}, {"dtype": "float16", "zero_points": 0}, {"zero_points": False}, 7],
)
def test_kinds_are_checked_at_once(needs):
    with pytest.raises(ManifestError, match=r"entries\[0\]"):
        Manifest.open(dump(manifest(entries=[entry(needs=needs)])))
