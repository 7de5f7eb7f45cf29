"""Which HIP decode kernel a problem gets, and why not the others: no compiler, no device."""

from __future__ import annotations

import pytest
from gristmill.csrc import w4a16_skinny_hip_variants as rows
from gristmill.device import nominal_device
from gristmill.kernels import w4a16_gemm_variants
from gristmill.manifest import Manifest
from gristmill.problem import Problem, resolve_group_size
from gristmill.select import Selection, select, verdicts
from manifest_of_rows import manifest_of_rows

TILES = "w4a16_gemm"  # how the names of the tile kernels begin


@pytest.fixture(scope="module", params=rows.ARCHES)
def manifest(request) -> Manifest:
    """The arch's rows, and behind them those of the tile kernels, which take all that is left."""
    return manifest_of_rows(request.param, [rows.__name__, w4a16_gemm_variants.__name__])


def choose(
    manifest: Manifest, M: int, *, K=4096, N=4096, G=128, zero_points=False, lds=65536, alignment=16
) -> Selection:
    device = nominal_device(manifest.arch)._replace(lds_bytes_per_block=lds)
    return select(problem(M, K, N, G, zero_points, alignment), device, manifest)


def problem(M, K, N, G, zero_points, alignment) -> Problem:
    group_size = resolve_group_size(G, K)
    return Problem("w4a16_gemm", M, N, K, group_size, "float16", zero_points, False, alignment)


@pytest.mark.parametrize(
    ("M", "suffix"),
    [(1, "m1"), (2, "m2"), (3, "m3"), (4, "m4"), (5, "m6"), (6, "m6"), (7, "m8"), (8, "m8"),
     (9, "wmma_m16"), (16, "wmma_m16"), (17, "wmma_m32"), (32, "wmma_m32")],
)  # fmt: skip
def test_tokens_choose_the_kernel(manifest, M, suffix):
    for zero_points in (False, True):
        z = "_z" if zero_points else ""
        assert choose(manifest, M, zero_points=zero_points).entry.name == f"w4a16_skinny_fp16{z}_{suffix}"


def test_more_tokens_go_to_the_tile_kernels(manifest):
    assert choose(manifest, 33).entry.name.startswith(TILES)


@pytest.mark.parametrize("group_size", [32, 64, 128, 256, -1])
def test_common_group_sizes_take_the_fast_path(manifest, group_size):
    assert choose(manifest, 2, G=group_size).entry.name == "w4a16_skinny_fp16_m2"
    assert choose(manifest, 12, G=group_size).entry.name == "w4a16_skinny_fp16_wmma_m16"


@pytest.mark.parametrize(("M", "name"), [(1, "m2_any_group"), (2, "m2_any_group"), (5, "m8_any_group")])
def test_other_group_sizes_take_the_general_path(manifest, M, name):
    for group_size in (16, 48, 96):
        assert choose(manifest, M, K=4608, G=group_size).entry.name == f"w4a16_skinny_fp16_{name}"
    assert choose(manifest, 12, K=4608, G=48).entry.name.startswith(TILES)


def test_lds_plan_follows_the_device(manifest):
    """8 tokens of K=4096 are 64 KiB: they fit, one more step of K does not and is walked in bands."""
    assert choose(manifest, 8, K=4096).dynamic_shared_bytes == 65536
    assert choose(manifest, 8, K=4097).dynamic_shared_bytes == 65536
    assert choose(manifest, 8, K=4096, lds=40000).dynamic_shared_bytes == 32768
    assert choose(manifest, 1, K=576).dynamic_shared_bytes == 2048
    assert choose(manifest, 8, lds=8192).entry.name.startswith(TILES)


def test_one_block_a_multiprocessor_and_no_empty_ones(manifest):
    device = nominal_device(manifest.arch)
    assert choose(manifest, 1).grid == (device.multiprocessor_count, 1, 1)
    assert choose(manifest, 1, N=5).grid == (3, 1, 1)
    assert choose(manifest, 9, N=33).grid == (2, 1, 1)


def test_unaligned_activations_stay_on_the_dot_kernel_and_leave_the_wmma_kernel(manifest):
    assert choose(manifest, 3, alignment=2).entry.name == "w4a16_skinny_fp16_m3"
    assert choose(manifest, 9, alignment=2).entry.name.startswith(TILES)
    assert choose(manifest, 9, K=4100).entry.name.startswith(TILES)


def test_short_k_is_refused_with_the_rule(manifest):
    assert choose(manifest, 1, K=16, G=-1).entry.name.startswith(TILES)
    found = {
        verdict.entry: verdict.reasons
        for verdict in verdicts(problem(5, 16, 64, -1, False, 16), nominal_device(manifest.arch), manifest)
    }
    assert "needs K >= 32, got K=16" in found["w4a16_skinny_fp16_m6"]
    assert "needs M <= 4, got M=5" in found["w4a16_skinny_fp16_m4"]


def test_rules_say_that_nothing_was_measured(manifest):
    assert choose(manifest, 1).origin == "predicted from instruction counts, not measured"


def test_rows_are_few(manifest):
    assert len(rows.variants(manifest.arch)) <= 48
    assert rows.variants("sm90") == []
    assert rows.policy("sm90") == []
