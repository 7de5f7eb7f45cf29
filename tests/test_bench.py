"""The benchmark's table, summary and plot, from made-up times; timing itself needs a GPU."""

import json
from dataclasses import asdict

import fake_driver
import pytest
from gristmill.aot.benchmark import Cell, _only, _tiles_only
from gristmill.aot.commands import bench
from gristmill.manifest import Manifest
from sample_pack import dump, manifest


def cell(M, us, **peers_us):
    return Cell(4096, 6144, M, "float16", us, "entry", 3.0, 4000.0, 93.0, peers_us)


def test_the_summary_is_a_geometric_mean_over_the_best_peer():
    found = bench.summary([cell(1, 4.0, a=8.0, b=16.0), cell(1, 8.0, a=4.0), cell(8, 5.0, a=10.0), cell(16, 5.0)])
    assert found == {
        "M=1 over best peer": 1.0,
        "M=8 over best peer": 0.5,
        "slower than a peer": ["4096x6144 M=1"],
    }


def test_a_line_has_time_rate_and_the_ratio_to_each_peer():
    text = bench.line(cell(4, 6.0, Humming=9.0))
    assert text.startswith("4096x6144 M=4")
    for part in ("6.00 us", "4000 GB/s", "93 % of copy", "2.00 of floor", "Humming 1.50x"):
        assert part in text


def test_the_plot_has_both_forms_and_the_same_bytes_again(tmp_path):
    pytest.importorskip("matplotlib")
    cells = [cell(1, 4.0, a=8.0), cell(8, 5.0, a=9.0)]
    facts = {"group_size": 128, "device": "a GPU"}
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
    assert [choose(M, weight, "sm90").constexprs["BLOCK_M"] for M in (1, 40, 600)] == [16, 64, 128]
    assert choose(1, fake_driver.random_weight(64, 256, 128), "sm80").zero_points is False


def test_without_a_gpu_the_command_says_what_it_needs(monkeypatch):
    torch = pytest.importorskip("torch")
    from gristmill.cli import main

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", "--json"]) != 0


def test_cells_become_json():
    assert json.loads(json.dumps(asdict(cell(1, 2.0, a=3.0))))["peers_us"] == {"a": 3.0}
