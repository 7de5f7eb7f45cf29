"""The proof that kernels wait for their loads, on assembled fragments and on kernels as they ship."""

from __future__ import annotations

from dataclasses import replace

import pytest
from assembled import ARCHS, Source, assemble
from gristmill.aot import compile_hip, verify
from gristmill.aot.amdgpu_code_object import CodeObject
from gristmill.aot.emulator import waits
from gristmill.aot.emulator.errors import UndecodableInstruction, UnimplementedInstruction
from gristmill.aot.emulator.hazards import instructions_of
from gristmill.aot.emulator.waits import missing_waits
from gristmill.aot.targets import find_target
from gristmill.aot.verify import VerificationError, run_code
from gristmill.csrc import w4a16_skinny_hip_variants
from real_kernels import smallest

# "LOADS n", "LDS n" and "SCALARS n": wait until n of them are left.
WAITS = {
    "gfx1151": {"LOADS": "s_waitcnt vmcnt({})", "LDS": "s_waitcnt lgkmcnt({})", "SCALARS": "s_waitcnt lgkmcnt({})"},
    "gfx1201": {"LOADS": "s_wait_loadcnt {}", "LDS": "s_wait_dscnt {}", "SCALARS": "s_wait_kmcnt {}"},
}
LOAD = "global_load_b32 v{}, v1, s[4:5]"
TWO_LOADS = "global_load_b32 v10, v1, s[4:5]\n global_load_b64 v[12:13], v1, s[4:5]\n"


def missing(arch: str, body: str) -> list[tuple[str, str]]:
    """What is missing in a kernel with this body: text of the instruction, register."""
    lines = []
    for line in body.splitlines():
        word, _, count = line.strip().partition(" ")
        lines.append(WAITS[arch][word].format(count) if word in WAITS[arch] else line)
    module = assemble(arch, (Source("kernel", "\n".join(lines), framed=False, lds_bytes=1024),))
    found = missing_waits(module.code_object).get("kernel", [])
    return [(str(lack.instruction).replace("_e32", ""), lack.register) for lack in found]


ENOUGH = {
    "a wait for all": TWO_LOADS + "LOADS 0\n v_add_f32 v2, v10, v13",
    "loads come in order": TWO_LOADS + "LOADS 1\n v_add_f32 v2, v10, v10",
    "nothing is used": TWO_LOADS,
    "a load over a load": TWO_LOADS + "global_load_b32 v10, v1, s[4:5]\n LOADS 0\n v_mov_b32 v2, v10",
    "addresses are read at once": "global_load_b32 v10, v1, s[4:5]\n v_mov_b32 v1, 0",
    "stored data are read at once": "global_store_b32 v1, v10, s[4:5]\n v_mov_b32 v10, 0",
    "LDS reads come in order": "ds_load_b32 v10, v1\n ds_load_b32 v11, v1\n LDS 1\n v_mov_b32 v2, v10",
    "a permutation is no access to LDS": "ds_bpermute_b32 v10, v1, v2\n BARRIER\n LDS 0\n v_mov_b32 v2, v10",
    "LDS is quiet at the barrier": "ds_store_b32 v1, v2\n LDS 0\n BARRIER",
    "a scalar load": "s_load_b64 s[8:9], s[4:5], 0x0\n SCALARS 0\n s_add_u32 s8, s8, s9",
    "each round of a loop waits": (
        "s_mov_b32 s20, 4\n again:\n LOADS 0\n v_mov_b32 v2, v10\n global_load_b32 v10, v1, s[4:5]\n"
        "s_sub_u32 s20, s20, 1\n s_cmp_lg_u32 s20, 0\n s_cbranch_scc1 again"
    ),
}

TOO_FEW = {
    "no wait": (TWO_LOADS + "v_mov_b32 v2, v10", [("v_mov_b32 v2, v10", "v10")]),
    "the second load is still on its way": (
        TWO_LOADS + "LOADS 1\n v_mov_b32 v2, v10\n v_mov_b32 v3, v13",
        [("v_mov_b32 v3, v13", "v13")],
    ),
    "a wait that is one too few": (TWO_LOADS + "LOADS 2\n v_mov_b32 v2, v10", [("v_mov_b32 v2, v10", "v10")]),
    "a load writes over a later result": (
        TWO_LOADS + "v_mov_b32 v10, v3",
        [("v_mov_b32 v10, v3", "v10")],
    ),
    "an address is on its way": (
        "global_load_b32 v10, v1, s[4:5]\n global_load_b32 v10, v10, s[4:5]",
        [("global_load_b32 v10, v10, s[4:5]", "v10")],
    ),
    "scalar loads over each other": (
        "s_load_b32 s8, s[4:5], 0x0\n s_load_b32 s8, s[4:5], 0x4",
        [("s_load_b32 s8, s[4:5], 0x4", "s8")],
    ),
    "one queue overtakes another": (
        "global_load_b32 v10, v1, s[4:5]\n ds_load_b32 v10, v1",
        [("ds_load_b32 v10, v1", "v10")],
    ),
    "a stored register": (
        TWO_LOADS + "global_store_b64 v1, v[12:13], s[4:5]",
        [("global_store_b64 v1, v[12:13], s[4:5]", "v12"), ("global_store_b64 v1, v[12:13], s[4:5]", "v13")],
    ),
    "half a register": (
        "global_load_d16_b16 v10, v1, s[4:5]\n v_mov_b32 v2, v10",
        [("v_mov_b32 v2, v10", "v10")],
    ),
    "half a dual instruction": (
        TWO_LOADS + "v_dual_mov_b32 v2, v4 :: v_dual_mov_b32 v3, v13",
        [("v_dual_mov_b32 v2, v4 :: v_dual_mov_b32 v3, v13", "v13")],
    ),
    "a wait for LDS is none for memory": (TWO_LOADS + "LDS 0\n v_mov_b32 v2, v10", [("v_mov_b32 v2, v10", "v10")]),
    "scalar loads come in any order": (
        "s_load_b32 s8, s[4:5], 0x0\n s_load_b32 s9, s[4:5], 0x0\n SCALARS 1\n s_mov_b32 s10, s8",
        [("s_mov_b32 s10, s8", "s8")],
    ),
    "half a dual instruction reads vcc": (
        "s_load_b32 vcc_lo, s[4:5], 0x0\n v_dual_mov_b32 v2, v4 :: v_dual_cndmask_b32 v3, v5, v6",
        [("v_dual_mov_b32 v2, v4 :: v_dual_cndmask_b32 v3, v5, v6", "vcc_lo")],
    ),
    "a division reads vcc": (
        "s_load_b32 vcc_lo, s[4:5], 0x0\n v_div_fmas_f32 v2, v3, v4, v5",
        [("v_div_fmas_f32 v2, v3, v4, v5", "vcc_lo")],
    ),
    "registers of the trap handler": (
        "s_load_b32 ttmp3, s[4:5], 0x0\n s_mov_b32 s8, ttmp3",
        [("s_mov_b32 s8, ttmp3", "ttmp3")],
    ),
    "a branch reads vcc": (
        "s_load_b32 vcc_lo, s[4:5], 0x0\n s_cbranch_vccz out\n out:",
        [("s_cbranch_vccz 0", "vcc_lo")],
    ),
    "only one of two paths waits": (
        TWO_LOADS + "s_cbranch_scc1 out\n LOADS 0\n out:\n v_mov_b32 v2, v10",
        [("v_mov_b32 v2, v10", "v10")],
    ),
    "the second round of a loop": (
        "s_mov_b32 s20, 4\n again:\n v_mov_b32 v2, v10\n global_load_b32 v10, v1, s[4:5]\n"
        "s_sub_u32 s20, s20, 1\n s_cmp_lg_u32 s20, 0\n s_cbranch_scc1 again",
        [("v_mov_b32 v2, v10", "v10")],
    ),
}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("body", ENOUGH.values(), ids=ENOUGH.keys())
def test_enough_waits(arch, body):
    assert missing(arch, body) == []


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("body", "lacks"), TOO_FEW.values(), ids=TOO_FEW.keys())
def test_too_few_waits(arch, body, lacks):
    assert missing(arch, body) == lacks


@pytest.mark.parametrize(("arch", "at"), [("gfx1151", "s_barrier"), ("gfx1201", "s_barrier_signal -1")])
@pytest.mark.parametrize("access", ["ds_store_b32 v1, v2", "ds_load_b32 v10, v1"])
def test_access_to_lds_is_done_at_a_barrier(arch, at, access):
    assert missing(arch, f"{access}\n BARRIER") == [(at, "LDS")]


def test_gfx11_counts_lds_and_scalar_loads_together():
    """One left of the two may be the older one: scalar loads come in any order."""
    body = "ds_load_b32 v10, v1\n s_load_b32 s8, s[4:5], 0x0\n LDS {}\n v_mov_b32 v2, v10"
    assert missing("gfx1151", body.format(1)) == [("v_mov_b32 v2, v10", "v10")]
    assert missing("gfx1151", body.format(0)) == []


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    "body",
    [
        "s_setpc_b64 s[4:5]",
        "v_movrels_b32 v2, v3",
        "v_swaprel_b32 v2, v3",
        "s_sendmsg_rtn_b32 s8, sendmsg(MSG_RTN_GET_REALTIME)",
        "global_atomic_add_u32 v10, v1, s[4:5]",
        "flat_load_b32 v10, v[2:3]",
        "ds_add_u32 v1, v2",
    ],
)
def test_what_is_not_followed_is_refused(arch, body):
    with pytest.raises(UnimplementedInstruction, match="waits are not followed through this"):
        missing(arch, body)


def test_barriers_of_other_kinds_are_refused():
    with pytest.raises(UnimplementedInstruction, match="waits are not followed through this"):
        missing("gfx1201", "ds_store_b32 v1, v2\n s_barrier_signal_isfirst -1")


def test_hints_are_let_through():
    assert missing("gfx1151", "s_dcache_inv\n s_gl1_inv\n ds_nop\n BARRIER") == []
    assert missing("gfx1201", "s_prefetch_data s[4:5], 0x0, null, 0\n ds_nop\n BARRIER") == []


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("body", ["s_branch 1\n v_mov_b32 v2, 0x12345678", "s_branch 200"])
def test_jump_beside_the_instructions_is_refused(arch, body):
    with pytest.raises(UndecodableInstruction, match="no instruction of the kernel begins here"):
        missing(arch, body)


# -- kernels as they ship --------------------------------------------------------------------------------


def weakened(code: CodeObject, kernel: str):
    """The kernel with one wait a step weaker, for each wait: its instructions, and which one that is."""
    instructions = list(instructions_of(code, kernel))
    for index, instruction in enumerate(instructions):
        for shift in {shift for shift, _ in waits._COUNTERS.get(instruction.name, {}).values()}:
            if instruction["simm16"] >> shift & 63 < 63:
                fields = {**instruction.fields, "simm16": instruction["simm16"] + (1 << shift)}
                yield [*instructions[:index], replace(instruction, fields=fields), *instructions[index + 1 :]], index


@pytest.mark.parametrize("arch", ARCHS)
def test_every_weakened_wait_of_a_shipped_kernel_is_found(arch):
    """Save those that LLVM puts before a load over an older load, which comes in earlier anyway."""
    row = next(row for row in w4a16_skinny_hip_variants.variants(arch) if row.name == "w4a16_skinny_fp16_m1")
    code = CodeObject.parse(compile_hip.compile_variant(row, find_target(arch)).code)
    assert missing_waits(code) == {}
    found, needless = 0, []
    for instructions, index in weakened(code, row.symbol):
        if waits._missing(instructions[0].address, instructions):
            found += 1
        else:
            needless.append(instructions[index + 1].name)
    assert found > 30
    assert set(needless) <= {"global_load_u16"}
    assert len(needless) < found / 5


@pytest.mark.parametrize("arch", ARCHS)
def test_verification_refuses_what_the_emulator_cannot_see(arch, monkeypatch):
    """Without the wait before the first use of an argument every result in the emulator is right."""
    built = smallest(arch)
    code = CodeObject.parse(built.code)
    first = next(i for i in instructions_of(code, built.entry.symbol) if waits.SCALAR_LOADS in waits._effect(i).waits)
    place = built.code.index(code.text) + first.address - code.text_address
    nop = bytes.fromhex("000080bf")
    patched = built.code[:place] + nop + built.code[place + len(nop) :]
    with pytest.raises(VerificationError, match=rf"{built.entry.name}: {built.entry.symbol} .* does not wait for s\d+"):
        run_code(arch, built.entry, patched)
    monkeypatch.setattr(verify, "missing_waits", lambda code_object: {})
    assert run_code(arch, built.entry, patched).worst_error_over_bound <= 1
