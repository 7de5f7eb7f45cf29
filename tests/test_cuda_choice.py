"""Which CUDA kernel a problem gets: no compiler, no device."""

from __future__ import annotations

import re

import pytest
from gristmill.aot.sources import ROW_MODULES
from gristmill.csrc.w4a16_cuda_rows import ALL_GROUPS
from gristmill.device import nominal_device
from gristmill.formula import Formula
from gristmill.manifest import Manifest
from gristmill.problem import Problem, resolve_group_size
from gristmill.select import select
from manifest_of_rows import manifest_of_rows


@pytest.fixture(scope="module", params=["sm80", "sm90"])
def manifest(request) -> Manifest:
    return manifest_of_rows(request.param, ROW_MODULES)


def chosen(manifest: Manifest, M: int, N: int, K: int, group_size: int, zero_points: bool = False) -> str:
    group_size = resolve_group_size(group_size, K)
    problem = Problem("w4a16_gemm", M, N, K, group_size, "float16", zero_points, False, 16)
    return select(problem, nominal_device(manifest.arch), manifest).entry.name


@pytest.mark.parametrize("K", [32, 64, 96, 128, 352, 4096, 1 << 20])
def test_a_problem_below_the_limit_is_for_one_specialisation(K):
    for group_size in range(32, 641, 32):
        values = {"group_size": resolve_group_size(group_size, K), "K": K}
        assert sum(Formula(groups.condition)(values) for groups in ALL_GROUPS) == (K < 1 << 20)


@pytest.mark.parametrize(
    ("group_size", "tag"),
    [(128, "g128"), (384, "g128"), (-1, "g128"), (64, "g64"), (32, "g32"), (96, "g32"), (192, "g64")],
)
@pytest.mark.parametrize("zero_points", [False, True])
def test_the_group_size_chooses_the_specialisation(manifest, group_size, tag, zero_points):
    for M in (1, 8) if manifest.arch == "sm80" else (1, 8, 16, 32, 64):
        name = chosen(manifest, M, 4096, 2688, group_size, zero_points)
        assert re.fullmatch(rf"w4a16_(skinny|wgmma)_fp16_(z_)?{tag}_m\d+_.*", name), (M, name)


@pytest.mark.parametrize("group_size", [-1, 128, 64, 32])
def test_no_rule_takes_what_the_tiles_are_faster_for(manifest, group_size):
    assert chosen(manifest, 64, 28672, 8192, group_size).startswith("w4a16_gemm")
    assert chosen(manifest, 65, 4096, 4096, group_size).startswith("w4a16_gemm")


@pytest.mark.parametrize("group_size", [-1, 64, 32])
def test_a_k_whose_count_would_overflow_goes_to_the_tiles(manifest, group_size):
    assert chosen(manifest, 16, 1, 2**31 - 32, group_size).startswith("w4a16_gemm")


@pytest.mark.parametrize("multiprocessors", [1, 3, 16, 78, 132])
def test_every_device_has_work_for_a_grid(manifest, multiprocessors):
    """A few multiprocessors hold no cluster of four, and so no grid of such."""
    device = nominal_device(manifest.arch)._replace(multiprocessor_count=multiprocessors)
    for M in (1, 4, 8, 16, 32, 64):
        for N in (1, 640, 2816, 6144, 28672):
            for K in (32, 2112, 4096, 14336):
                for zero_points in (False, True):
                    group_size = resolve_group_size(128, K)
                    problem = Problem("w4a16_gemm", M, N, K, group_size, "float16", zero_points, False, 16)
                    assert min(select(problem, device, manifest).grid) > 0, problem
