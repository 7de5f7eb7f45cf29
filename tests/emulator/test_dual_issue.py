"""The rewriting of dual instructions that gfx11 gets wrong: which are taken apart, with the same results."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import real_kernels
from assembled import INPUT, Source, assemble, execute
from gristmill.aot import compile_hip, compile_triton, dual_issue, sources
from gristmill.aot.amdgpu_code_object import CodeObject
from gristmill.aot.dual_issue import SETTLED_AFTER, SINGLE, avoid_faults, split_hazardous_pairs
from gristmill.aot.emulator.hazards import vopd_interlock_hazards
from gristmill.aot.errors import CompileError
from gristmill.aot.targets import find_target
from gristmill.aot.verify import VerificationError, run_code
from gristmill.csrc import w4a16_skinny_hip_variants
from gristmill.kernels import w4a16_gemm_variants

GFX1151, GFX1201 = find_target("gfx1151"), find_target("gfx1201")

# A hazardous pair -> its single instructions, in order.
SPLIT = [
    # Each operation as the half that it can be, beside one that shares a parity with it.
    ("v_dual_fmac_f32 v30, v10, v11 :: v_dual_mov_b32 v31, v12",
     "v_fmac_f32_e32 v30, v10, v11", "v_mov_b32_e32 v31, v12"),
    ("v_dual_fmaak_f32 v30, v10, v11, 0x40490fdb :: v_dual_mov_b32 v31, v12",
     "v_fmaak_f32 v30, v10, v11, 0x40490fdb", "v_mov_b32_e32 v31, v12"),
    ("v_dual_fmamk_f32 v30, v10, 0x40490fdb, v11 :: v_dual_add_f32 v31, s20, v13",
     "v_fmamk_f32 v30, v10, 0x40490fdb, v11", "v_add_f32_e32 v31, s20, v13"),
    ("v_dual_mul_f32 v30, v10, v11 :: v_dual_add_f32 v31, v12, v10",
     "v_mul_f32_e32 v30, v10, v11", "v_add_f32_e32 v31, v12, v10"),
    ("v_dual_sub_f32 v30, v10, v11 :: v_dual_subrev_f32 v31, v12, v10",
     "v_sub_f32_e32 v30, v10, v11", "v_subrev_f32_e32 v31, v12, v10"),
    ("v_dual_mul_dx9_zero_f32 v30, v10, v11 :: v_dual_mov_b32 v31, v12",
     "v_mul_dx9_zero_f32_e32 v30, v10, v11", "v_mov_b32_e32 v31, v12"),
    ("v_dual_cndmask_b32 v30, v10, v11 :: v_dual_cndmask_b32 v31, v12, v10",
     "v_cndmask_b32_e32 v30, v10, v11, vcc_lo", "v_cndmask_b32_e32 v31, v12, v10, vcc_lo"),
    ("v_dual_max_f32 v30, v10, v11 :: v_dual_min_f32 v31, v12, v10",
     "v_max_f32_e32 v30, v10, v11", "v_min_f32_e32 v31, v12, v10"),
    ("v_dual_dot2acc_f32_f16 v30, v10, v11 :: v_dual_mov_b32 v31, v12",
     "v_dot2acc_f32_f16_e32 v30, v10, v11", "v_mov_b32_e32 v31, v12"),
    ("v_dual_mov_b32 v30, v10 :: v_dual_add_nc_u32 v31, v12, v11",
     "v_mov_b32_e32 v30, v10", "v_add_nc_u32_e32 v31, v12, v11"),
    ("v_dual_mov_b32 v30, v10 :: v_dual_lshlrev_b32 v31, v12, v11",
     "v_mov_b32_e32 v30, v10", "v_lshlrev_b32_e32 v31, v12, v11"),
    ("v_dual_mov_b32 v30, v10 :: v_dual_and_b32 v31, v12, v11",
     "v_mov_b32_e32 v30, v10", "v_and_b32_e32 v31, v12, v11"),
    # Sources that are no vector register: the other position decides.
    ("v_dual_mul_f32 v30, 0x40490fdb, v10 :: v_dual_add_f32 v31, 0x40490fdb, v12",
     "v_mul_f32_e32 v30, 0x40490fdb, v10", "v_add_f32_e32 v31, 0x40490fdb, v12"),
    ("v_dual_mul_f32 v30, s20, v11 :: v_dual_add_nc_u32 v31, -16, v13",
     "v_mul_f32_e32 v30, s20, v11", "v_add_nc_u32_e32 v31, -16, v13"),
    ("v_dual_max_f32 v30, -0.5, v11 :: v_dual_min_f32 v31, vcc_lo, v13",
     "v_max_f32_e32 v30, -0.5, v11", "v_min_f32_e32 v31, vcc_lo, v13"),
    # Order: a half that reads what the other writes goes first; else the order of the pair.
    ("v_dual_mov_b32 v30, v12 :: v_dual_add_f32 v31, v30, v11",
     "v_add_f32_e32 v31, v30, v11", "v_mov_b32_e32 v30, v12"),
    ("v_dual_mov_b32 v30, v12 :: v_dual_fmac_f32 v31, v10, v30",
     "v_fmac_f32_e32 v31, v10, v30", "v_mov_b32_e32 v30, v12"),
    ("v_dual_add_f32 v30, v11, v31 :: v_dual_sub_f32 v31, v13, v10",
     "v_add_f32_e32 v30, v11, v31", "v_sub_f32_e32 v31, v13, v10"),
    ("v_dual_fmac_f32 v30, v11, v10 :: v_dual_fmac_f32 v31, v13, v12",
     "v_fmac_f32_e32 v30, v11, v10", "v_fmac_f32_e32 v31, v13, v12"),
]  # fmt: skip
PAIRS = pytest.mark.parametrize(("pair", "first", "second"), SPLIT, ids=[row[0] for row in SPLIT])

UNTOUCHED = [
    "\tv_dual_add_f32 v2, v4, v5 :: v_dual_mul_f32 v3, v7, v8",  # other parities
    "\tv_dual_add_f32 v2, s20, v5 :: v_dual_mul_f32 v3, v6, v8",  # position 0 of X is scalar
    "\tv_dual_mov_b32 v2, v4 :: v_dual_add_f32 v3, v7, v8",  # a move has no position 1
    "\tv_dual_mov_b32 v2, 0 :: v_dual_mov_b32 v3, 0",
    "\tv_dual_fmamk_f32 v2, v4, 0x40490fdb, v6 :: v_dual_mul_f32 v3, v5, v7",
    "\tv_dual_dot2acc_f32_bf16 v2, v4, v5 :: v_dual_mov_b32 v3, v7",
    "\tv_add_f32_e32 v2, v4, v6",
    "; v_dual_mov_b32 v2, v4 :: v_dual_mov_b32 v3, v6",
    '\t.ascii "a::b"',
    "",
]

# Whatever a half may read besides its sources, and registers that both halves may overwrite.
SETUP = "s_mov_b32 s20, 0x3fc00000\ns_mov_b32 vcc_lo, 0x0f0f3355\nv_mov_b32 v30, v13\nv_mov_b32 v31, v11\n"


def test_the_cases_have_every_operation():
    written = " ".join(" ".join(row) for row in SPLIT).split()
    assert set(SINGLE) | set(SINGLE.values()) == {word for word in written if word.startswith("v_")}


@PAIRS
def test_hazardous_pair_becomes_two_instructions(pair, first, second):
    before = f"kernel:\n\ts_nop 0\n\t{pair} ; note\n\ts_endpgm\n"
    after = f"kernel:\n\ts_nop 0\n\t{first} ; note\n\t{second}\n\ts_endpgm\n"
    assert split_hazardous_pairs(before, "kernel") == after
    assert split_hazardous_pairs(after, "kernel") == after


@pytest.mark.parametrize("line", UNTOUCHED)
def test_every_other_line_stays(line):
    assert split_hazardous_pairs(line, "kernel") == line


def _kernels(index: int) -> tuple[Source, Source]:
    pair, first, second = SPLIT[index]
    return (
        Source(f"pair{index}", f"{SETUP}{pair}", inputs=4, outputs=2),
        Source(f"split{index}", f"{SETUP}{first}\n{second}", inputs=4, outputs=2),
    )


ALL_KERNELS = tuple(source for index in range(len(SPLIT)) for source in _kernels(index))


def test_assembled_pairs_have_the_hazard_and_the_rewritten_have_none():
    found = vopd_interlock_hazards(assemble("gfx1151", ALL_KERNELS).code_object)
    assert {name: [str(i) for i in instructions] for name, instructions in found.items()} == {
        f"pair{index}": [pair] for index, (pair, _, _) in enumerate(SPLIT)
    }


@pytest.mark.parametrize("index", range(len(SPLIT)), ids=[row[0] for row in SPLIT])
def test_results_are_those_of_the_pair(index):
    rng = np.random.default_rng(INPUT + index)
    inputs = [rng.normal(size=32).astype(np.float32).view(np.uint32) for _ in range(4)]
    before, after = (execute("gfx1151", s, *inputs, among=ALL_KERNELS).outputs for s in _kernels(index))
    np.testing.assert_array_equal(after, before)
    assert (before[0] != inputs[3]).any()
    assert (before[1] != inputs[1]).any()


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ("v_dual_add_f32 v30, v31, v11 :: v_dual_add_f32 v31, v30, v13", "reads what the other writes"),
        ("v_dual_fmac_f32 v30, v31, v11 :: v_dual_mul_f32 v31, v30, v13", "reads what the other writes"),
        ("v_dual_dot2acc_f32_bf16 v2, v4, v5 :: v_dual_mov_b32 v3, v6", "no single .* v_dual_dot2acc"),
        ("v_dual_new_f32 v2, v4, v5 :: v_dual_mov_b32 v3, v6", "no single .* v_dual_new_f32"),
        ("v_dual_mov_b32 v2, v[4:4] :: v_dual_mov_b32 v3, v6", "cannot read"),
        ("v_dual_mov_b32 v2, v4, v5 :: v_dual_mov_b32 v3, v6", "v_dual_mov_b32 has 2 sources, not 1"),
        ("v_dual_mov_b32 s2, v4 :: v_dual_mov_b32 v3, v6", "'s2' is no vector register"),
        ("v_dual_mov_b32 v2, symbol :: v_dual_mov_b32 v3, v6", "cannot read the operand 'symbol'"),
        ("v_mov_b32 v2, v4 :: v_dual_mov_b32 v3, v6", "cannot read this dual instruction"),
    ],
)  # fmt: skip
def test_what_cannot_be_taken_apart_is_named(pair, message):
    with pytest.raises(CompileError, match=message) as error:
        split_hazardous_pairs(f"\ts_nop 0\n\t{pair}", "w4a16")
    assert str(error.value).startswith(f"w4a16: assembly line 2: {pair}: ")


@pytest.mark.parametrize(
    "writer",
    [
        "v_add_f32_dpp v4, v5, v5 row_xmask:1",
        "v_mov_b32_dpp v4, v5 quad_perm:[1,0,3,2]",
        "v_permlanex16_b32 v4, v5, s0, s1",
    ],
)
def test_pair_that_reads_a_cross_lane_result_soon_is_taken_apart(writer):
    reader = "\tv_dual_add_f32 v2, v4, v5 :: v_dual_mov_b32 v3, v7"
    halves = "\tv_add_f32_e32 v2, v4, v5\n\tv_mov_b32_e32 v3, v7"

    def after(count: int) -> str:
        text = [f"\t{writer}", ".Llabel:", "; comment", *["\ts_nop 0"] * count, reader]
        return split_hazardous_pairs("\n".join(text), "kernel")

    assert after(0).endswith(halves)
    assert after(SETTLED_AFTER - 1).endswith(halves)
    assert after(SETTLED_AFTER).endswith(reader)


def test_accumulated_cross_lane_result_counts_as_read():
    text = "\tv_add_f32_dpp v4, v5, v5 row_xmask:1\n\tv_dual_fmac_f32 v4, v6, v7 :: v_dual_mov_b32 v3, s2"
    assert "v_fmac_f32_e32" in split_hazardous_pairs(text, "kernel")


def test_gfx12_is_left_alone():
    text = f"\t{SPLIT[0][0]}"
    assert avoid_faults(text, "gfx1201", "kernel") == text
    assert avoid_faults(text, "gfx1151", "kernel") != text


# -- what the build makes of real kernels ----------------------------------------------------------------

TRITON_ROW, HIP_ROW = (
    next(row for row in rows.variants("gfx1151") if row.name == name)
    for rows, name in (
        (w4a16_gemm_variants, "w4a16_gemm_bf16_32x32x32_w4_s2"),
        (w4a16_skinny_hip_variants, "w4a16_skinny_fp16_m1"),
    )
)
ROWS = pytest.mark.parametrize(
    ("compile_variant", "row"),
    [(compile_triton.compile_variant, TRITON_ROW), (compile_hip.compile_variant, HIP_ROW)],
    ids=["triton", "hip"],
)


@ROWS
def test_built_object_has_no_hazard_and_the_same_bytes_again(compile_variant, row, monkeypatch):
    digests = set()
    for _ in range(2):
        built = compile_variant(row, GFX1151)
        assert vopd_interlock_hazards(CodeObject.parse(built.code)) == {}
        digests.add(hashlib.sha256(built.code).hexdigest())
    assert len(digests) == 1
    assert split_hazardous_pairs(built.assembly, row.name) == built.assembly
    monkeypatch.setattr(dual_issue, "avoid_faults", lambda assembly, arch, what: assembly)
    plain = compile_variant(row, GFX1151)
    assert vopd_interlock_hazards(CodeObject.parse(plain.code)), "take a row whose kernel has the hazard"
    assert avoid_faults(plain.assembly, "gfx1151", row.name) == built.assembly


def test_verification_refuses_an_object_made_without_the_rewriting(monkeypatch):
    monkeypatch.setattr(dual_issue, "avoid_faults", lambda assembly, arch, what: assembly)
    built = real_kernels.build("gfx1151", TRITON_ROW)
    words = rf"{TRITON_ROW.name}: .* dual instructions of w4a16_gemm wrong, the first at 0x[0-9a-f]+: v_dual_"
    with pytest.raises(VerificationError, match=words):
        run_code("gfx1151", built.entry, built.code)


def test_keys_in_the_build_cache_follow_the_rewriting(tmp_path, monkeypatch):
    before = sources.object_key(TRITON_ROW, GFX1151), sources.object_key(HIP_ROW, GFX1151)
    changed = tmp_path / "dual_issue.py"
    changed.write_text("# another way\n")
    monkeypatch.setattr(dual_issue, "__file__", str(changed))
    after = sources.object_key(TRITON_ROW, GFX1151), sources.object_key(HIP_ROW, GFX1151)
    assert before[0] != after[0]
    assert before[1] != after[1]


def test_objects_of_gfx1201_are_not_rewritten(monkeypatch):
    built = compile_hip.compile_variant(HIP_ROW, GFX1201)

    def never(assembly: str, what: str) -> str:
        raise AssertionError(what)

    monkeypatch.setattr(dual_issue, "split_hazardous_pairs", never)
    assert compile_hip.compile_variant(HIP_ROW, GFX1201) == built
