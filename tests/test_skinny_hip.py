"""The HIP decode kernels, executed in the emulator, and what their code objects say."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from gristmill.aot.code_object import read_facts
from gristmill.aot.compile_hip import compile_variant
from gristmill.aot.errors import CompileError
from gristmill.aot.targets import find_target
from gristmill.arrays import numpy_dtype
from gristmill.csrc import w4a16_skinny_hip_variants as rows
from gristmill.csrc.w4a16_skinny_hip_counts import COUNTS, PARTS, Counts, weight_bytes
from gristmill.formula import Formula
from gristmill.packed_weight import dequantize, pack
from hip_kernels import Case, accepts, compiled, counts, random_weight, run, sweep_cases, variant

ARCHS = rows.ARCHES
DOT, DOT_Z, WMMA = "w4a16_skinny_fp16_m2", "w4a16_skinny_bf16_z_m4", "w4a16_skinny_fp16_wmma_m16"
every_arch = pytest.mark.parametrize("arch", ARCHS)

# One of each kind of code; `python tests/hip_kernels.py` takes all rows and more cases.
SOME = (
    "w4a16_skinny_fp16_m1",
    "w4a16_skinny_bf16_z_m3",
    "w4a16_skinny_fp16_z_m8",
    "w4a16_skinny_bf16_m2_any_group",
    "w4a16_skinny_fp16_z_m8_any_group",
    "w4a16_skinny_bf16_wmma_m16",
    "w4a16_skinny_fp16_z_wmma_m32",
)


@every_arch
@pytest.mark.parametrize("name", SOME)
def test_result_is_within_its_bound_at_every_edge(arch, name):
    for case in sweep_cases(variant(arch, name))[::2]:
        assert run(arch, name, case).worst <= 1, case


# --- The faults of the kernel that this one succeeds --------------------------------------------------------


@every_arch
@pytest.mark.parametrize("lds_bytes", [8192, 20000, 65536])
def test_activations_past_lds_are_walked_in_bands(arch, lds_bytes):
    """24 KiB of activations in 8 KiB of LDS and more; the emulator faults on a read past what was given."""
    case = Case(4, 9, 2100, 64, lds_bytes=lds_bytes)
    given = Formula(variant(arch, DOT_Z).dynamic_shared_bytes)(case.names)
    assert given <= lds_bytes
    result = run(arch, DOT_Z, case)
    assert result.worst <= 1
    assert (result.out == run(arch, DOT_Z, replace(case, lds_bytes=65536)).out).all()


def test_lds_plan_never_exceeds_the_device():
    for arch in ARCHS:
        for row in rows.variants(arch):
            plan = Formula(row.dynamic_shared_bytes)
            for K in (32, 1024, 1025, 14336, 131072):
                for lds_bytes in (1, 2048, 16383, 65536, 163840):
                    case = Case(1, 16, K, lds_bytes=lds_bytes)
                    if accepts(row, case):
                        assert plan(case.names) <= lds_bytes
                        assert plan(case.names) > 0 or "TOKEN_TILES" in row.defines


@every_arch
@pytest.mark.parametrize("name", [DOT, WMMA])
@pytest.mark.parametrize("group_size", [32, 64, 128, 256, -1])
def test_every_group_has_its_own_scale(arch, name, group_size):
    """Scales that differ by powers of two from group to group: a neighbour's scale gives another result."""
    case = Case(2, 5, 512, group_size, bias=False)
    groups = case.names["num_groups"]
    scales = np.broadcast_to(2.0 ** (np.arange(groups) % 7 - 3), (5, groups))
    q = np.random.default_rng(1).integers(0, 16, (5, 512))
    weight = pack(q, scales, group_size=group_size, dtype="float16")
    assert run(arch, name, case, weight=weight).worst <= 1


def test_group_sizes_that_a_kernel_has_no_code_for_are_refused():
    for group_size in (8, 16, 24, 48, 96, 160):
        case = Case(1, 16, 960, group_size)
        takers = [row.name for row in rows.variants("gfx1151") if accepts(row, case)]
        assert takers
        assert all("any_group" in name for name in takers)


@every_arch
@pytest.mark.parametrize(("name", "M"), [(DOT, 1), (DOT, 2), (WMMA, 11)])
def test_bias_is_by_output_column(arch, name, M):
    """x is zero, so the output is the bias; N fits no tile, and bias ends with its memory."""
    case = Case(M, 37, 64)
    x = np.zeros((M, 64), np.float16)
    weight = random_weight(variant(arch, name), case)
    result = run(arch, name, case, weight=weight, x=x)
    assert (result.out == weight.bias[None, :]).all()


# --- Edges --------------------------------------------------------------------------------------------------


@every_arch
@pytest.mark.parametrize("N", [1, 2, 3, 15, 17, 33, 71])
def test_n_need_not_fit_the_rows_of_a_wave(arch, N):
    assert run(arch, DOT_Z, Case(3, N, 96, 32)).worst <= 1
    assert run(arch, WMMA, Case(9, N, 96, 32)).worst <= 1


@every_arch
@pytest.mark.parametrize("K", [32, 33, 40, 63, 72, 100, 1016, 1025, 1064])
def test_k_may_end_anywhere(arch, K):
    """The last word's padding holds noise, the row ends with its memory, x goes on with NaN."""
    assert run(arch, DOT_Z, Case(4, 3, K, 32)).worst <= 1
    if K % 8 == 0:
        assert run(arch, WMMA, Case(10, 3, K, 32)).worst <= 1


@every_arch
def test_x_may_have_any_stride_and_alignment(arch):
    for padding, offset in ((0, 0), (1, 0), (3, 5), (8, 1)):
        assert run(arch, DOT_Z, Case(3, 5, 264, 64, x_padding=padding, x_offset=offset)).worst <= 1
    for padding, offset in ((0, 0), (2, 0), (8, 2)):
        case = Case(12, 5, 264, 64, x_padding=padding, x_offset=offset)
        assert run(arch, "w4a16_skinny_fp16_wmma_m16", replace(case, x_padding=8, x_offset=8)).worst <= 1


@every_arch
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_large_activation_at_a_zero_weight_drowns_nothing(arch, dtype):
    """q = z where an activation is 2^14 times the rest: a sum that cancels afterwards would show."""
    for name, M in ((f"w4a16_skinny_{dtype}_m2", 2), (f"w4a16_skinny_{dtype}_wmma_m16", 9)):
        row, case = variant(arch, name), Case(M, 6, 256, 128, bias=False)
        q = np.random.default_rng(3).integers(0, 16, (6, 256))
        q[:, 77] = 8
        weight = pack(q, np.full((6, 2), 0.01), group_size=128, dtype=row.dtype)
        x = np.random.default_rng(4).standard_normal((M, 256))
        x[:, 77] = 2.0**14
        assert run(arch, name, case, weight=weight, x=x.astype(numpy_dtype(row.dtype))).worst <= 1


@every_arch
def test_zero_points_may_be_any_number(arch):
    for name in ("w4a16_skinny_fp16_z_m2", "w4a16_skinny_bf16_z_m2", "w4a16_skinny_bf16_z_wmma_m16"):
        row, case = variant(arch, name), Case(2, 8, 128, 32, bias=False)
        zero_points = np.resize([0.0, -3.5, 7.996, 8.0, 15.0, 31.25, 1e-3, -1e-5], (8, 4))
        q = np.random.default_rng(5).integers(0, 16, (8, 128))
        weight = pack(q, np.full((8, 4), 0.125), zero_points, group_size=32, dtype=row.dtype)
        assert run(arch, name, case, weight=weight).worst <= 1


@every_arch
def test_overflow_gives_infinity(arch):
    for name, M in ((DOT, 2), (WMMA, 9)):
        weight = pack(np.full((4, 64), 15), np.full((4, 1), 1000.0), group_size=-1, dtype="float16")
        x = np.full((M, 64), 100, np.float16)
        out = run(arch, name, Case(M, 4, 64, -1, bias=False), weight=weight, x=x).out
        assert np.isposinf(out.astype(np.float32)).all()
        assert np.isfinite(dequantize(weight)).all()


@every_arch
@pytest.mark.parametrize("name", [DOT_Z, WMMA])
def test_order_of_waves_does_not_change_a_bit(arch, name):
    case = Case(4, 21, 1100, 32, lds_bytes=8192) if name == DOT_Z else Case(13, 21, 1104, 32)
    first = run(arch, name, case).out
    for schedule in ("forward", "reverse", "random"):
        assert (run(arch, name, replace(case, schedule=schedule)).out == first).all()


def test_number_of_blocks_does_not_change_a_bit():
    outs = [run("gfx1201", DOT, Case(2, 77, 1100, 64, multiprocessor_count=n)).out for n in (1, 3, 7)]
    assert (outs[0] == outs[1]).all()
    assert (outs[0] == outs[2]).all()


# --- Code objects -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [DOT, WMMA])
def test_a_macro_that_a_row_lacks_fails_the_compilation(name):
    row = variant("gfx1151", name)
    for macro in row.defines:
        others = {other: value for other, value in row.defines.items() if other != macro}
        with pytest.raises(CompileError, match=macro):
            compile_variant(replace(row, defines=others), find_target("gfx1151"))


REGISTERS_PER_SIMD = 1536  # of a lane, wave32, on both archs


@every_arch
@pytest.mark.parametrize("name", SOME)
def test_registers_fit_the_planned_occupancy_and_nothing_spills(arch, name):
    built = compiled(arch, name)
    facts = read_facts(built.code, "hsaco", built.symbol)
    assert facts.resources["spills"] == 0
    assert facts.resources["scalar_spills"] == 0
    granules = -(-facts.resources["registers"] // 24) * 24
    assert granules * variant(arch, name).defines["WAVES_PER_SIMD"] <= REGISTERS_PER_SIMD
    assert facts.resources["code_bytes"] <= 32768, "the instruction cache of a multiprocessor"
    assert "scratch_" not in built.assembly


@every_arch
@pytest.mark.parametrize("name", SOME)
def test_weights_are_read_once_by_wide_loads(arch, name):
    """By non-temporal loads of 128 bits; 64 in the WMMA kernel of gfx12, where a lane needs half a chunk."""
    mark = {"gfx1151": r"slc dlc", "gfx1201": r"th:TH_LOAD_NT"}[arch]
    width = "b64" if arch == "gfx1201" and "wmma" in name else "b128"
    loads = re.findall(rf"global_load_(\w+) .*{mark}", compiled(arch, name).assembly)
    defines = variant(arch, name).defines
    per_slot = defines.get("ROWS") or defines["COLUMNS"]
    assert set(loads) == {width}
    assert len(loads) == 2 * per_slot * defines["DEPTH"], "the ring is filled once and goes round once"


@every_arch
@pytest.mark.parametrize("name", SOME)
def test_ring_of_loads_stays_full(arch, name):
    """No wait beside a product leaves fewer loads in flight than the other slots hold."""
    defines = variant(arch, name).defines
    per_slot = defines.get("ROWS") or defines["COLUMNS"]
    waits = _waits_in_ring(compiled(arch, name).assembly)
    assert waits
    assert min(waits) >= (defines["DEPTH"] - 1) * 2 * per_slot


def test_lanes_are_summed_before_any_is_switched_off():
    """LLVM 19 moved permlanex16 behind the branch of the store; the emulator would fault on it too."""
    for arch in ARCHS:
        lines = compiled(arch, DOT).assembly.splitlines()
        exchanges = [i for i, line in enumerate(lines) if "v_permlanex16_b32" in line]
        assert exchanges
        for at in exchanges:
            before = [line for line in lines[:at] if "saveexec" in line or line.startswith(".LBB")]
            assert before[-1].startswith(".LBB"), "a lane mask was narrowed in the block of the exchange"


@pytest.mark.parametrize(("arch", "name"), [("gfx1151", "w4a16_skinny_bf16_m4"), ("gfx1201", WMMA)])
def test_counts_are_those_of_the_kernels(arch, name):
    kept = COUNTS[arch][name]
    found = Counts(*counts(arch, name))
    assert found.valu == pytest.approx(kept.valu, rel=0.03)
    assert (found.wmma, found.lds, found.global_memory) == (kept.wmma, kept.lds, kept.global_memory)


def test_every_row_has_counts():
    for arch in ARCHS:
        assert list(COUNTS[arch]) == [row.name for row in rows.variants(arch)]


@every_arch
def test_memory_binds_up_to_eight_tokens_by_count(arch):
    part = PARTS[arch]
    for row in rows.variants(arch):
        if "TOKENS" in row.defines:
            found = COUNTS[arch][row.name]
            read = weight_bytes(128, row.zero_points)
            limit = 0.6 if row.defines["TOKENS"] <= 4 else 1
            assert part.issue_over_memory(found, read) < limit, row.name
            assert part.lds_over_memory(found, read) < limit, row.name


def _waits_in_ring(assembly: str) -> list[int]:
    """Loads left in flight by each wait in the blocks of the main loop that hold products."""
    lines = assembly.splitlines()
    labels = {line.split(":")[0]: i for i, line in enumerate(lines) if line.startswith(".LBB")}
    product = re.compile(r"\bv_(dual_)?(dot2|wmma)")
    loops = []
    for end, line in enumerate(lines):
        target = re.search(r"s_c?branch\w* (\.LBB\w+)", line)
        start = labels.get(target[1], end) if target else end
        if start < end:
            loops.append((sum(bool(product.search(x)) for x in lines[start:end]), start - end, start, end))
    _, _, start, end = max(loops)
    waits: list[int] = []
    for block in re.split(r"^(?:\.LBB.*|; %bb.*|\s+s_c?branch.*)$", "\n".join(lines[start:end]), flags=re.MULTILINE):
        if product.search(block):
            for vmcnt, loadcnt in re.findall(r"vmcnt\((\d+)\)|s_wait_loadcnt (0x[0-9a-f]+)", block):
                waits.append(int(vmcnt or loadcnt, 0))
            waits += [int(both, 0) >> 8 for both in re.findall(r"s_wait_loadcnt_dscnt (0x[0-9a-f]+)", block)]
    return waits
