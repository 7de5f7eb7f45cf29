import json
import sys

import fake_driver
import gguf_files
import numpy as np
import pytest
from gristmill import packs
from gristmill.cli import main
from gristmill.verified import Record, dump_records
from sample_pack import entry, manifest, write_pack

WHY = ["why", "--arch", "gfx1151", "--M", "5", "--N", "64", "--K", "128", "--group-size", "64"]


@pytest.fixture(autouse=True)
def pack_on_the_path(tmp_path, monkeypatch):
    monkeypatch.setattr(packs, "NAMESPACE", "gristmill_packs_of_nobody")
    rows = [entry(), entry(name="gemm_bfloat16", needs={"dtype": "bfloat16", "zero_points": False, "conditions": []})]
    policy = [{"when": "1", "entries": [row["name"] for row in rows], "origin": "table for gfx1151, not measured"}]
    write_pack(tmp_path, manifest(entries=rows, policy=policy))
    monkeypatch.setenv("GRISTMILL_PACK_PATH", str(tmp_path))


@pytest.fixture
def model(tmp_path):
    rng = np.random.default_rng()
    tensors = {}
    for layer in range(3):
        q = rng.integers(0, 16, (48, 96))
        d = rng.uniform(0.01, 0.1, (48, 3)).astype(np.float16)
        tensors[f"blk.{layer}.attn_q.weight"] = (gguf_files.blocks_q4_0(q, d), "Q4_0")
    tensors["output.weight"] = (rng.integers(0, 255, (48, 68), dtype=np.uint8), "Q8_0")
    return str(gguf_files.write(tmp_path / "model.gguf", tensors))


def run_json(capsys, *argv):
    code = main([*argv, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_why_names_the_choice_and_every_rejected_entry(capsys):
    code, answer = run_json(capsys, *WHY)
    assert code == 0
    assert answer["entry"] == entry()["name"]
    assert answer["origin"] == "table for gfx1151, not measured"
    assert answer["rejected"] == {"gemm_bfloat16": "needs bfloat16, got float16"}
    assert answer["shared_bytes"] == 2 * 64 * 128
    assert main(WHY) == 0
    assert "not gemm_bfloat16: needs bfloat16, got float16" in capsys.readouterr().out


def test_why_takes_the_shared_memory_it_is_told(capsys):
    code, answer = run_json(capsys, *WHY, "--lds-bytes", "16383")
    assert code == 1
    assert answer["entry"] is None
    assert answer["rejected"][entry()["name"]] == "needs 16384 bytes of shared memory, the device has 16383"
    assert run_json(capsys, *WHY, "--lds-bytes", "16384")[0] == 0


def test_why_says_what_the_policy_made_of_an_entry_that_would_do(capsys, tmp_path):
    rows = [entry(name=name) for name in ("first", "second", "late", "unnamed")]
    policy = [
        {"when": "M > 100", "entries": ["late"], "origin": "rule for many rows"},
        {"when": "M > 200", "entries": ["late"], "origin": "rule for more"},
        {"when": "1", "entries": ["first", "second"], "origin": "table"},
    ]
    (tmp_path / "gfx1151" / "manifest.json").write_text(json.dumps(manifest(entries=rows, policy=policy)))
    code, answer = run_json(capsys, *WHY)
    assert (code, answer["entry"]) == (0, "first")
    assert answer["rejected"] == {
        "second": "would do; an earlier choice comes before it (table)",
        "late": "would do; its rules do not hold: M > 100 nor M > 200",
        "unnamed": "would do; no rule names it",
    }


@pytest.mark.parametrize(("arch", "pack", "lds_bytes"), [("sm80", "sm80", 166912), ("sm89", "sm80", 101376),
                                                         ("gfx1201", "gfx1201", 65536)])  # fmt: skip
def test_why_for_a_device_that_is_not_there(capsys, tmp_path, arch, pack, lds_bytes):
    """The nominal device of the arch judges the pack that serves it, by its own shared memory."""
    folder = fake_driver.usual_pack(tmp_path, pack)
    why = ["why", "--arch", arch, "--M", "3", "--N", "64", "--K", "128"]
    code, answer = run_json(capsys, *why)
    assert (code, answer["arch"], answer["lds_bytes"], answer["entry"]) == (0, arch, lds_bytes, "small_float16")
    entries = json.loads((folder / "manifest.json").read_text())["entries"]
    assert sorted([answer["entry"], *answer["rejected"]]) == sorted(row["name"] for row in entries)
    assert all(answer["rejected"].values())
    assert main(why) == 0
    text = capsys.readouterr().out
    assert "takes small_float16\n  by: test, small M" in text
    assert "not small_bfloat16_zp: needs bfloat16, got float16; needs zero points" in text


def test_why_takes_one_arch(capsys):
    with pytest.raises(SystemExit) as exit_:
        main([*WHY[:2], "sm90,gfx1151", *WHY[3:]])
    assert exit_.value.code == 2
    assert "invalid choice: 'sm90,gfx1151'" in capsys.readouterr().err


def test_why_without_a_pack_prints_the_pip_line(capsys):
    code, answer = run_json(capsys, *WHY[:2], "sm90", *WHY[3:])
    assert code == 1
    assert answer["error"]["class"] == "NoPackError"
    assert "pip install gristmill-sm90" in answer["error"]["message"]


def test_list_shows_entries_with_needs_and_resources(capsys):
    code, answer = run_json(capsys, "list", "--arch", "gfx1151")
    assert code == 0
    first = answer["entries"][0]
    assert (first["arch"], first["op"], first["name"]) == ("gfx1151", "w4a16_gemm", entry()["name"])
    assert first["needs"]["dtype"] == "float16"
    assert first["resources"]["registers"] == 64
    assert first["verified"] is None
    assert main(["list", "--resources"]) == 0
    text = capsys.readouterr().out
    assert "registers 64" in text
    assert "verified: no record of a run" in text


def test_list_says_on_what_an_entry_was_run(capsys, tmp_path):
    record = Record(entry()["object"], "emulated gfx1151", "emulation", 9, 0.5)
    (tmp_path / "gfx1151" / "verified.json").write_bytes(dump_records({entry()["name"]: record}))
    assert main(["list"]) == 0
    assert "verified: emulation on emulated gfx1151, 9 cases" in capsys.readouterr().out
    code, answer = run_json(capsys, "list")
    assert code == 0
    assert answer["entries"][0]["verified"]["worst_error_over_bound"] == 0.5


@pytest.mark.parametrize("wrong", [b"[", b"{}", b'{"entries": {"x": {"object": 1}}}', b'{"entries": 3}'])
def test_damaged_records_are_a_typed_error(capsys, tmp_path, wrong):
    (tmp_path / "gfx1151" / "verified.json").write_bytes(wrong)
    code, answer = run_json(capsys, "list")
    assert code == 1
    assert answer["error"]["class"] == "ManifestError"


def test_record_of_a_failed_run_is_no_record(capsys, tmp_path):
    record = Record(entry()["object"], "emulated gfx1151", "emulation", 9, 1.5)
    (tmp_path / "gfx1151" / "verified.json").write_bytes(dump_records({entry()["name"]: record}))
    assert run_json(capsys, "list")[0] == 1


@pytest.mark.parametrize("name", ["foreign", "sm86"])  # sm86 is served by sm80's pack and has none of its own
def test_folder_that_is_no_pack_is_named_and_passed_over(capsys, model, tmp_path, name):
    (tmp_path / name).mkdir()
    (tmp_path / name / "manifest.json").write_text("{}")
    for argv in (["list"], ["cover", model, "--m", "1", "--dtype", "bfloat16"]):
        assert main([*argv, "--json"]) == 0
        out, err = capsys.readouterr()
        assert '"arch": "gfx1151"' in out
        assert f"passed over: {name}" in err


def test_cover_proves_each_layer_and_says_what_it_left_out(capsys, model):
    code, answer = run_json(capsys, "cover", model, "--arch", "gfx1151", "--m", "1..100", "--dtype", "float16")
    # float16 resolves for aligned calls; nothing in this pack takes a misaligned one, and cover must say so.
    assert code == 1
    assert not answer["covered"]
    assert len(answer["layers"]) == 3
    assert answer["left_out"] == {"output.weight": "Q8_0"}
    aligned, misaligned = answer["archs"][0]["shapes"]
    assert aligned["layers"] == 3
    assert [(run["first_m"], run["last_m"], run["entry"]) for run in aligned["runs"]] == [(1, 100, entry()["name"])]
    assert [run["entry"] for run in misaligned["runs"]] == [None]


def test_cover_passes_where_all_is_covered(capsys, model):
    code, answer = run_json(capsys, "cover", model, "--arch", "gfx1151", "--m", "1..3", "--dtype", "bfloat16")
    assert code == 0
    assert answer["covered"]
    assert main(["cover", model, "--arch", "gfx1151", "--m", "7", "--dtype", "bfloat16"]) == 0
    assert "every layer is covered" in capsys.readouterr().out


@pytest.fixture
def mixture(tmp_path):
    """A model with one layer of two dimensions, and the experts of another in three."""
    q = np.random.default_rng().integers(0, 16, (48, 96))
    layer = gguf_files.blocks_q4_0(q, np.full((48, 3), 0.05, np.float16))
    tensors = {"blk.0.attn_q.weight": (layer, "Q4_0"), EXPERTS: (np.stack([layer, layer]), "Q4_0")}
    return str(gguf_files.write(tmp_path / "mixture.gguf", tensors))


EXPERTS = "blk.0.ffn_gate_exps.weight"
NOT_READ = {EXPERTS: "Q4_0 with 3 dimensions is not supported; with 2 it is"}


def test_cover_does_not_pass_over_experts(capsys, mixture):
    argv = ["cover", mixture, "--arch", "gfx1151", "--m", "1..3", "--dtype", "bfloat16"]
    code, answer = run_json(capsys, *argv)
    assert (code, answer["covered"], list(answer["layers"])) == (1, False, ["blk.0.attn_q.weight"])
    assert (answer["not_read"], answer["left_out"]) == (NOT_READ, {})
    assert main(argv) == 1
    text = capsys.readouterr().out
    assert f"4-bit, NOT READ: {EXPERTS}: Q4_0 with 3 dimensions" in text
    assert "1 layers, M 1..3: NOT every layer is covered, 1 4-bit tensors are not read" in text


def test_check_names_the_experts_that_it_does_not_run(capsys, mixture):
    argv = ["check", mixture, "--device", "cpu", "--m", "3"]
    code, answer = run_json(capsys, *argv)
    assert (code, answer["layers"], answer["not_read"]) == (0, 1, NOT_READ)
    assert main(argv) == 0
    assert f"4-bit, NOT READ: {EXPERTS}: Q4_0 with 3 dimensions" in capsys.readouterr().out


def test_check_without_layers_names_what_is_there(capsys, tmp_path):
    experts = np.zeros((2, 48, 54), np.uint8)
    path = gguf_files.write(tmp_path / "experts.gguf", {EXPERTS: (experts, "Q4_0")})
    code, answer = run_json(capsys, "check", str(path), "--device", "cpu")
    assert (code, answer["error"]["class"]) == (1, "ArgumentError")
    assert EXPERTS in answer["error"]["message"]


@pytest.mark.parametrize("seed", ["-1", "x"])
def test_wrong_seed_is_refused(capsys, model, seed):
    with pytest.raises(SystemExit) as exit_:
        main(["check", model, "--device", "cpu", f"--seed={seed}"])
    assert exit_.value.code == 2


def test_cover_of_a_damaged_file_is_a_typed_error(capsys, tmp_path):
    path = tmp_path / "cut.gguf"
    path.write_bytes(b"GGUF\3\0\0\0")
    code, answer = run_json(capsys, "cover", str(path), "--arch", "gfx1151")
    assert code == 1
    assert answer["error"]["class"] == "CheckpointError"


@pytest.mark.parametrize("argv", [["--help"], []])
def test_overview_lists_every_command(capsys, argv):
    assert main(argv) == 0
    text = capsys.readouterr().out
    for command in ("build", "check", "cover", "doctor", "list", "wheel", "why"):
        assert f"  {command} " in text
    assert "gristmill --version" in text


def test_unknown_command_is_refused(capsys):
    assert main(["grind"]) == 2
    assert "no command 'grind'" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["0..3", "5..3", "x", "1..", "-1..4"])
def test_wrong_range_is_refused(capsys, model, text):
    with pytest.raises(SystemExit) as exit_:
        main(["cover", model, f"--m={text}"])
    assert exit_.value.code == 2


def test_dispatch_commands_import_neither_triton_nor_aot(monkeypatch, capsys):
    for name in [name for name in sys.modules if name.split(".")[0] == "triton" or name.startswith("gristmill.aot")]:
        monkeypatch.delitem(sys.modules, name)
    main(WHY)
    assert not [name for name in sys.modules if name.split(".")[0] == "triton" or name.startswith("gristmill.aot")]


def test_driver_whose_package_is_missing_names_the_extra(monkeypatch):
    from gristmill import drivers
    from gristmill.errors import NoDriverError

    monkeypatch.setitem(sys.modules, "gristmill.aot.emulator.driver", None)
    monkeypatch.delitem(drivers._drivers, "emulated", raising=False)
    with pytest.raises(
        NoDriverError, match=r"driver 'emulated' needs is missing .*pip install 'gristmill\[emulator\]'"
    ):
        drivers.get_driver("emulated")


def test_doctor_does_not_count_emulated_devices(capsys):
    code, answer = run_json(capsys, "doctor")
    emulated = next(row for row in answer["drivers"] if row["driver"] == "emulated")
    assert emulated["problem"] is None
    assert [device["arch"] for device in emulated["devices"]] == ["gfx1151", "gfx1201"]
    hardware = [row for row in answer["drivers"] if row["driver"] in ("cuda", "hip")]
    assert answer["can_run"] == any(device["pack"] for row in hardware for device in row["devices"])
    assert code == (0 if answer["can_run"] else 1)
