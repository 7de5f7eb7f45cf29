"""Certificates of coverage: what they hold, that they are the same each time, and that packs are held to them."""

import hashlib
import json

import fake_driver
import gguf_files
import numpy as np
import pytest
from gristmill import DeviceArray, linear, packs, strict, to_device
from gristmill.certificate import differences, question_of
from gristmill.cli import main
from gristmill.cover import contiguous_alignment
from gristmill.errors import CertificateError
from gristmill.manifest import Manifest
from gristmill.prepared import prepare
from gristmill.problem import MAX_ALIGNMENT
from gristmill.verified import Record, dump_records


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A pack for sm90 that covers all, its small kernels verified."""
    monkeypatch.setattr(packs, "NAMESPACE", "gristmill_packs_of_nobody")
    monkeypatch.setenv("GRISTMILL_PACK_PATH", str(tmp_path / "packs"))
    folder = fake_driver.usual_pack(tmp_path / "packs", "sm90")
    verify(folder, "small")
    return folder


def verify(folder, *kinds):
    manifest = Manifest.parse((folder / "manifest.json").read_bytes())
    records = {
        name: Record(entry.object, "NVIDIA H200", "silicon", 9, 0.5)
        for name, entry in manifest.entries.items()
        if name.startswith(kinds)
    }
    (folder / "verified.json").write_bytes(dump_records(records))


@pytest.fixture
def model(tmp_path):
    rng = np.random.default_rng(0)
    tensors = {}
    for layer in range(2):
        q = rng.integers(0, 16, (48, 96))
        d = rng.uniform(0.01, 0.1, (48, 3)).astype(np.float16)
        tensors[f"blk.{layer}.attn_q.weight"] = (gguf_files.blocks_q4_0(q, d), "Q4_0")
    return str(gguf_files.write(tmp_path / "model.gguf", tensors))


def run_json(capsys, *argv):
    code = main([*map(str, argv), "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.fixture
def certified(folder, model, tmp_path, capsys):
    """A certificate in a file."""
    path = tmp_path / "certificate.json"
    code, answer = run_json(capsys, "cover", model, "--arch", "sm90", "--m", "1..40", "--output", path)
    assert code == 0
    assert json.loads(path.read_bytes()) == answer
    return path


def test_what_it_holds(certified, folder):
    certificate = json.loads(certified.read_bytes())
    manifest = (folder / "manifest.json").read_bytes()
    (arch,) = certificate["archs"]
    assert (certificate["model"], certificate["m"], certificate["dtypes"]) == (
        "model.gguf",
        [1, 40],
        ["float16", "bfloat16"],
    )
    assert list(certificate["layers"]) == ["blk.0.attn_q.weight", "blk.1.attn_q.weight"]
    assert (arch["arch"], arch["pack"], arch["pack_version"]) == ("sm90", "sm90", "0.1.0")
    assert arch["manifest_sha256"] == hashlib.sha256(manifest).hexdigest()
    assert sorted(arch["entries"]) == sorted(
        f"{kind}_{dtype}" for kind in ("small", "tiled", "floor") for dtype in ("float16", "bfloat16")
    )
    small, floor = arch["entries"]["small_float16"], arch["entries"]["floor_float16"]
    assert small["object_sha256"] == floor["object_sha256"] == hashlib.sha256(b"object float16 False").hexdigest()
    assert (small["verified"]["on"], small["verified"]["how"]) == ("NVIDIA H200", "silicon")
    assert floor["verified"] is None
    assert certificate["covered"]
    assert not certificate["verified"]
    spans = [(run["first_m"], run["last_m"], run["entry"]) for run in arch["shapes"][0]["runs"]]
    assert spans == [(1, 4, "small_float16"), (5, 40, "tiled_float16")]


def test_all_verified(folder, model, capsys):
    verify(folder, "small", "tiled", "floor")
    code, answer = run_json(capsys, "cover", model)
    assert code == 0
    assert answer["verified"]


def test_the_same_bytes_each_time(certified, model, tmp_path, capsys):
    again = tmp_path / "again.json"
    assert main(["cover", model, "--arch", "sm90", "--m", "1..40", "--output", str(again)]) == 0
    text = capsys.readouterr().out
    assert again.read_bytes() == certified.read_bytes()
    assert "sm90 small_float16: verified, silicon on NVIDIA H200" in text
    assert "sm90 floor_float16: no record of a run" in text
    assert "every layer is covered, not every entry has a record of verification" in text


def test_packs_that_hold_to_it(certified, model, tmp_path, capsys):
    (tmp_path / "model.gguf").unlink()  # it is not needed
    code, answer = run_json(capsys, "cover", "--against", certified)
    assert (code, answer["holds"], answer["differences"]) == (0, True, [])
    assert main(["cover", "--against", str(certified)]) == 0
    assert "holds for the packs found here" in capsys.readouterr().out


def test_packs_that_do_not(certified, folder, capsys):
    verify(folder, "tiled")
    code, answer = run_json(capsys, "cover", "--against", certified)
    assert (code, answer["holds"]) == (1, False)
    assert any(line.startswith("archs[0].entries.small_float16.verified: ") for line in answer["differences"])
    verify(folder, "small")
    path = folder / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b"M <= 4", b"M <= 3"))
    code, answer = run_json(capsys, "cover", "--against", certified)
    assert code == 1
    assert any("manifest_sha256: certified" in line for line in answer["differences"])
    assert main(["cover", "--against", str(certified)]) == 1
    assert "does NOT hold for the packs found here" in capsys.readouterr().out


def test_damaged_or_missing_packs(certified, folder, capsys):
    next(folder.glob("objects/*")).write_bytes(b"")
    assert run_json(capsys, "cover", "--against", certified)[1]["error"]["class"] == "DamagedPackError"
    folder.rename(folder.parent / "sm80")
    assert run_json(capsys, "cover", "--against", certified)[1]["error"]["class"] == "NoPackError"


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text[:-40], lambda text: "[]", lambda text: text.replace('"certificate": 1', '"certificate": 2'),
        lambda text: text.replace('"arch": "sm90"', '"arch": "sm91"'),
        lambda text: text.replace('"K": 96', '"K": "96"'),
        lambda text: text.replace('"K": 96', '"K": 0'), lambda text: text.replace('"K": 96', '"Q": 96'),
        lambda text: text.replace('"has_zero_points": false', '"has_zero_points": []'),
        lambda text: text.replace('"has_zero_points": false', '"has_zero_points": 0'),
        lambda text: text.replace('"format": "Q4_0"', '"format": 4'),
        lambda text: text.replace('"format": "Q4_0"', '"formats": "Q4_0"'),
        lambda text: text.replace("float16", "float17"), lambda text: text.replace("40\n ]", "0\n ]"),
    ],
)  # fmt: skip
def test_what_is_no_certificate(certified, capsys, change):
    text = certified.read_text()
    changed = change(text)
    assert changed != text
    certified.write_text(changed)
    with pytest.raises(CertificateError, match="not a certificate"):
        question_of(certified)
    assert run_json(capsys, "cover", "--against", certified)[0] == 1


def test_no_such_file(tmp_path):
    with pytest.raises(CertificateError, match="No such file"):
        question_of(tmp_path / "none.json")


def test_a_model_or_a_certificate(certified, model, capsys):
    for argv in (["cover"], ["cover", model, "--against", certified]):
        code, answer = run_json(capsys, *argv)
        assert (code, answer["error"]["class"]) == (1, "ArgumentError")


def test_certificate_that_cannot_be_written_is_refused_at_once(folder, model, tmp_path, capsys):
    for path in (tmp_path, tmp_path / "nowhere" / "certificate.json"):
        code, answer = run_json(capsys, "cover", model, "--output", path)
        assert (code, answer["error"]["class"]) == (1, "ArgumentError")
        assert answer["error"]["message"].startswith(f"--output {path} cannot be written")


def test_strict_mode_takes_the_certificate_from_standard_output(certified, model, tmp_path, capsys):
    argv = ["cover", model, "--arch", "sm90", "--m", "1..40"]
    with strict.enforced():
        _, answer = run_json(capsys, *argv, "--output", tmp_path / "other.json")
        assert answer["error"]["class"] == "StrictModeError"
        assert "--output, which writes a file; redirect the output of --json instead" in answer["error"]["message"]
        assert main([*argv, "--json"]) == 0
    certified.write_text(capsys.readouterr().out)
    assert run_json(capsys, "cover", "--against", certified)[1]["holds"]


def test_no_packs_at_all(model, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(packs, "NAMESPACE", "gristmill_packs_of_nobody")
    monkeypatch.setenv("GRISTMILL_PACK_PATH", str(tmp_path))
    code, answer = run_json(capsys, "cover", model)
    assert (code, answer["error"]["class"]) == (1, "NoPackError")


def test_differences():
    assert differences({"a": [1, {"b": 2}]}, {"a": [1, {"b": 2}]}) == []
    assert differences({"a": [1, {"b": 2}]}, {"a": [1, {"b": 3}], "c": 4}) == [
        "a[1].b: certified 2, now 3",
        "c: certified null, now 4",
    ]
    assert differences([1], [1, 2], "m") == ["m: certified [1], now [1, 2]"]


def test_holds_for_layers_that_are_not_in_alphabetical_order(folder, tmp_path, capsys):
    rng = np.random.default_rng(0)
    d = rng.uniform(0.01, 0.1, (48, 3)).astype(np.float16)
    wide = rng.uniform(0.01, 0.1, (48, 6)).astype(np.float16)
    tensors = {
        "blk.0.attn_q.weight": (gguf_files.blocks_q4_0(rng.integers(0, 16, (48, 96)), d), "Q4_0"),
        "blk.0.attn_k.weight": (gguf_files.blocks_q4_0(rng.integers(0, 16, (48, 192)), wide), "Q4_0"),
    }
    model, path = gguf_files.write(tmp_path / "model.gguf", tensors), tmp_path / "certificate.json"
    assert run_json(capsys, "cover", model, "--arch", "sm90", "--m", "1..8", "--output", path)[0] == 0
    code, answer = run_json(capsys, "cover", "--against", path)
    assert answer["differences"] == []
    assert code == 0


@pytest.mark.parametrize(("N", "K"), [(64, 96), (61, 96), (62, 96), (64, 90), (61, 91)])
@pytest.mark.parametrize("M", [1, 2, 5])
def test_contiguous_calls_have_the_alignment_that_is_certified(fake_device, M, N, K):
    """A single row has no stride that could break the alignment: odd sizes matter from M = 2 on."""
    weight = to_device(fake_driver.random_weight(N, K, 32), "fake:0")
    x = DeviceArray.from_numpy(fake_driver.random_x(M, K), "fake:0")
    linear(x, weight)
    (key,) = prepare(weight).choices
    low_bits = key & 15 | MAX_ALIGNMENT
    assert contiguous_alignment(M, K, N) == low_bits & -low_bits


def test_a_single_row_of_odd_size_is_certified_at_both_alignments(folder, tmp_path, capsys):
    q = np.random.default_rng(0).integers(0, 16, (49, 96))
    blocks = gguf_files.blocks_q4_0(q, np.full((49, 3), 0.05, np.float16))
    model = gguf_files.write(tmp_path / "odd.gguf", {"blk.0.attn_q.weight": (blocks, "Q4_0")})
    code, answer = run_json(capsys, "cover", model, "--arch", "sm90", "--m", "1..40", "--dtype", "float16")
    assert code == 0
    spans = {
        shape["alignment"]: (shape["runs"][0]["first_m"], shape["runs"][-1]["last_m"])
        for shape in answer["archs"][0]["shapes"]
    }
    assert spans == {16: (1, 1), 2: (1, 40)}
