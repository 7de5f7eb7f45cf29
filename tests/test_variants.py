"""The lists of variants and the policies, for every arch: names, and that every accepted problem resolves."""

from __future__ import annotations

import itertools
import re

import pytest
from gristmill.device import NOMINAL_DEVICES, PACKS_FOR_ARCH
from gristmill.kernels import w4a16_gemm_variants
from gristmill.kernels.w4a16_gemm_variants import ARCHES, policy, variants
from gristmill.manifest import ARGUMENT_NAMES, Manifest
from gristmill.problem import Problem, resolve_group_size
from gristmill.select import select
from manifest_of_rows import manifest_of_rows

# Shapes at and around the edges of tiles, real layers, and the limits of 32-bit offsets.
SIZES_M = (1, 16, 33, 65, 300, 2**17)
SIZES_N = (1, 8, 136, 4096, 151936)
SIZES_K = (5, 72, 128, 576, 2112, 4096)
GROUP_SIZES = (8, 24, 32, 48, 64, 128, 256, -1)
ALIGNMENTS = (2, 8, 16)
MOST_VARIANTS = {"gfx1151": 100, "gfx1201": 100, "sm80": 60, "sm90": 60}


@pytest.fixture(scope="module", params=ARCHES)
def arch(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def manifest(arch: str) -> Manifest:
    return manifest_of_rows(arch, [w4a16_gemm_variants.__name__])


def problems():
    sizes = itertools.product(SIZES_M, SIZES_N, SIZES_K, GROUP_SIZES, ALIGNMENTS)
    for M, N, K, group_size, alignment in sizes:
        yield M, N, K, resolve_group_size(group_size, K), alignment


def test_names_are_unique(arch: str) -> None:
    names = [row.name for row in variants(arch)]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-z0-9_]+", name) for name in names)


def test_number_of_variants_is_bounded(arch: str) -> None:
    assert len(variants(arch)) <= MOST_VARIANTS[arch]


def test_rules_name_variants_and_every_variant_is_named(arch: str) -> None:
    assert {name for row in policy(arch) for name in row.variants} == {row.name for row in variants(arch)}


def test_arguments_are_known_to_the_manifest(arch: str) -> None:
    for row in variants(arch):
        assert set(row.signature) <= set(ARGUMENT_NAMES)
        assert ("zero_points" in row.signature) is row.zero_points
        assert set(row.divisibility) <= set(row.signature)


def test_every_rule_says_where_it_comes_from(arch: str) -> None:
    assert all(row.origin for row in policy(arch))


def test_last_rule_holds_for_everything(arch: str, manifest: Manifest) -> None:
    assert all(manifest.policy[-1].when({"M": M}) for M in (1, 2**31 - 1))


@pytest.mark.parametrize(("dtype", "zero_points"), [("float16", False), ("bfloat16", True)])
def test_every_problem_resolves(manifest: Manifest, arch: str, dtype: str, zero_points: bool) -> None:
    rows = {row.name: row for row in variants(arch)}
    devices = [NOMINAL_DEVICES[name] for name, packs in PACKS_FOR_ARCH.items() if arch in packs]
    for device, (M, N, K, group_size, alignment) in itertools.product(devices, problems()):
        problem = Problem("w4a16_gemm", M, N, K, group_size, dtype, zero_points, False, alignment)
        chosen = select(problem, device, manifest)
        row = rows[chosen.entry.name]
        scales = row.constexprs["SCALES"] if row.constexprs["SCALE_WEIGHTS"] else 1
        width = row.constexprs["BLOCK_K"] // scales
        assert group_size % width == 0 or group_size >= K, (problem, row.name)
        assert not row.divisibility or alignment % 16 == 0, (problem, row.name)


def test_floor_is_only_for_odd_groups(manifest: Manifest) -> None:
    device = NOMINAL_DEVICES[manifest.arch]
    for M, N, K, group_size, alignment in problems():
        problem = Problem("w4a16_gemm", M, N, K, group_size, "float16", False, False, alignment)
        if group_size % 32 == 0 or group_size >= K:
            assert not select(problem, device, manifest).is_floor, problem
