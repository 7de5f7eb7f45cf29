"""The benchmark's table, summary and plot, from made-up times; timing itself needs a GPU."""

import importlib.metadata
import json
import types
from dataclasses import asdict

import fake_driver
import pytest
import stub_driver
from gristmill.aot import benchmark, cold_start, peers
from gristmill.aot.benchmark import OUR_TILES, Cell, _add_peer, _only, _tiles_only
from gristmill.aot.commands import bench
from gristmill.aot.errors import BenchmarkError
from gristmill.aot.peers import Peer, PeerError, PeerMissingError
from gristmill.formula import Formula
from gristmill.manifest import Manifest, Needs, Rule
from sample_pack import dump, manifest


def cell(M, us, **peers_us):
    return Cell(4096, 6144, M, "float16", us, us + 1, "entry", 3.0, 4000.0, 93.0, peers_us)


def test_the_summary_is_a_geometric_mean_over_the_best_peer():
    found = bench.summary([cell(1, 4.0, a=8.0, b=16.0), cell(1, 8.0, a=4.0), cell(8, 5.0, a=10.0), cell(16, 5.0)])
    assert found == {
        "M=1 over best peer": 1.0,
        "M=8 over best peer": 0.5,
        "slower than a peer": ["4096x6144 M=1"],
    }


def test_our_own_tiles_are_no_peer():
    tiles = {OUR_TILES: 3.0}
    assert bench.summary([cell(1, 4.0, **tiles, a=8.0)]) == {"M=1 over best peer": 0.5, "slower than a peer": []}
    assert bench.summary([cell(1, 4.0, **tiles)]) == {"slower than a peer": []}


@pytest.mark.parametrize(
    ("error", "is_missing", "said"),
    [
        (PeerMissingError("pip install it"), True, "Humming: pip install it"),
        (PeerError("a part of it is not installed"), False, "Humming, K=4096 N=6144: a part of it is not installed"),
        (ValueError("its own fault"), False, "Humming, K=4096 N=6144: ValueError: its own fault"),
    ],
)
def test_only_a_peer_that_is_not_there_is_not_asked_again(error, is_missing, said):
    def make(*_):
        raise error

    lines, missing = [], set()
    _add_peer(None, Peer("Humming", 64, make), [cell(1, 4.0)], 1, "float16", lines.append, missing)
    assert lines == [said]
    assert missing == ({"Humming"} if is_missing else set())


def test_conditions_name_the_driver_and_the_peers(monkeypatch, tmp_path):
    torch = types.SimpleNamespace(
        __version__="2",
        version=types.SimpleNamespace(cuda="13.0"),
        cuda=types.SimpleNamespace(
            get_device_properties=lambda _: types.SimpleNamespace(name="GPU", multi_processor_count=1, L2_cache_size=1)
        ),
    )
    monkeypatch.setattr(benchmark, "copy_gbps", lambda torch: 1.0)
    monkeypatch.setattr(benchmark, "DRIVER_VERSION", tmp_path / "version")
    monkeypatch.setattr(peers, "PACKAGES", {"numpy": "numpy", "no_such_module": "no-such-package"})
    assert benchmark.conditions(torch)["driver"] == "unknown"
    (tmp_path / "version").write_text("580.159.03\n")
    found = benchmark.conditions(torch)
    assert (found["driver"], found["numpy"]) == ("580.159.03", importlib.metadata.version("numpy"))
    assert "no-such-package" not in found


def test_a_line_has_time_rate_and_the_ratio_to_each_peer():
    text = bench.line(cell(4, 6.0, Humming=9.0))
    assert text.startswith("4096x6144 M=4")
    for part in ("6.00 us", "apart 7.00 us", "4000 GB/s", "93 % of copy", "2.00 of floor", "Humming 1.50x"):
        assert part in text


def test_the_page_has_a_row_per_problem_and_a_column_per_peer():
    text = bench.markdown([cell(1, 4.0, a=8.0, b=16.0), cell(8, 5.0, b=4.0)], {"device": "a GPU"})
    head, first, second = text.splitlines()[2], *text.splitlines()[4:]
    assert head.split(" | ")[-3:] == ["a", "b", "over best |"]
    assert first == "| 4096x6144 | 1 | 3.0 | 4.0 | 5.0 | 4000 | 93 | 8.0 | 16.0 | 0.50 |"
    assert second.endswith("| 93 |  | 4.0 | 1.25 |")


def test_the_plot_has_both_forms_and_the_same_bytes_again(tmp_path):
    pytest.importorskip("matplotlib")
    cells = [cell(1, 4.0, a=8.0), cell(8, 5.0, a=9.0)]
    facts = {"weights": "float16, group size 128", "device": "a GPU"}
    bench._plot(cells, facts, tmp_path)
    first = (tmp_path / "bench.svg").read_bytes()
    assert (tmp_path / "bench.png").stat().st_size > 1000
    bench._plot(cells, facts, tmp_path)
    assert (tmp_path / "bench.svg").read_bytes() == first


@pytest.mark.parametrize("text", ["4096", "x12", "4096x", "0x8", "axb"])
def test_a_shape_is_k_times_n(text):
    assert bench._shape("4096x28672") == (4096, 28672)
    with pytest.raises(Exception, match="is not KxN"):
        bench._shape(text)


def test_policies_of_the_tiles_alone_and_of_one_entry():
    pack = Manifest.parse(dump(manifest()))
    name = next(iter(pack.entries))
    (rule,) = _only(pack, name)
    assert rule.entries == (name,)
    kept = {entry for rule in _tiles_only(pack).policy for entry in rule.entries}
    assert all(pack.entries[entry].source.endswith(".py") for entry in kept)


def test_the_peer_of_the_cold_start_is_the_tile_that_we_would_take():
    pytest.importorskip("triton")
    from gristmill.aot.jit_peer import choose

    weight = fake_driver.random_weight(576, 576, 32, zero_points=True)
    assert [choose(M, weight, "sm90", 132).constexprs["BLOCK_M"] for M in (1, 40, 600)] == [16, 64, 128]
    assert choose(1, fake_driver.random_weight(64, 256, 128), "sm80", 108).zero_points is False


def rows():
    return [
        cold_start.Row("import gristmill", "imports", {"imports": 1.0}),
        cold_start.Row("ours", "with_torch", {"imports": 10.0, "CUDA": 300.0, "manifest": 10.0}, {"worst": 0.25}),
        cold_start.Row("Triton JIT, empty cache", "with_jit", {"imports": 200.0, "launch and copies": 1400.0}),
    ]


def test_a_cold_start_is_all_but_the_start_of_cuda():
    assert [row.ms for row in rows()] == [1.0, 20.0, 1600.0]
    assert bench.cold_ratios(rows()) == {"Triton JIT, empty cache over ours": 80.0}
    assert bench.cold_ratios(rows()[::2]) == {}
    text = bench.cold_line(rows()[1])
    for part in ("ours", "20.0 ms", "imports 10.0, CUDA 300.0, manifest 10.0", "worst 0.25"):
        assert part in text


@pytest.fixture
def stub_gpu(tmp_path, monkeypatch):
    """A stub driver with a pack of one kernel, for the processes that a test starts."""
    library = stub_driver.build(stub_driver.TESTS / "stub_cuda/stub_cuda.c", tmp_path / "lib" / "libcuda.so.1")
    code = stub_driver.code_of(["symbol_floor"])
    floor = fake_driver.entry("floor", code, needs=Needs("float16", False, ()))
    fake_driver.write_pack(tmp_path / "packs", "sm90", [(floor, code)], (Rule(Formula("1"), ("floor",), "test"),))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library.parent))
    monkeypatch.setenv("GRISTMILL_PACK_PATH", str(tmp_path / "packs"))
    monkeypatch.setattr(cold_start, "LAYERS", 1)
    monkeypatch.setattr(cold_start, "K", 256)
    return tmp_path


def test_programs_of_the_cold_start(stub_gpu):
    cold_start.write_problem(stub_gpu)
    found = cold_start._run("without_torch", stub_gpu, stub_gpu / "cache")
    assert list(found["phases"]) == ["imports", "CUDA", "manifest", "weight and modules", "launch and copies"]
    assert found["worst"] > 1  # the stub computes nothing, and that is seen
    with pytest.raises(BenchmarkError, match=r"^ours: the result is off by .* of its bound$"):
        cold_start._row("ours", "without_torch", stub_gpu, 1)
    row = cold_start._row("preload", "preload_model", stub_gpu, 2)
    assert row.facts == {"weights": 7, "kernels": 1}
    assert cold_start._row("import", "imports", stub_gpu, 1).ms < 1000
    with pytest.raises(BenchmarkError, match=r"^no_such_program: KeyError: 'no_such_program'$"):
        cold_start._run("no_such_program", stub_gpu, stub_gpu / "cache")


def test_without_a_gpu_the_command_says_what_it_needs(monkeypatch):
    torch = pytest.importorskip("torch")
    from gristmill.cli import main

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", "--json"]) != 0


def test_cells_become_json():
    assert json.loads(json.dumps(asdict(cell(1, 2.0, a=3.0))))["peers_us"] == {"a": 3.0}
