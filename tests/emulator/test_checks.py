"""Every fault that the emulator looks for, provoked by a kernel that commits it."""

from __future__ import annotations

import re
import struct

import numpy as np
import pytest
from assembled import ARCHS, Source, assemble, execute
from gristmill.aot.emulator import (
    AlignmentError,
    DeviceMemory,
    EmulatorError,
    InactiveLaneRead,
    LaunchError,
    LdsAccessError,
    MemoryAccessError,
    ReadOnlyWriteError,
    RegisterError,
    RunawayError,
    ScratchAccessError,
    UndecodableInstruction,
    UnimplementedInstruction,
    UninitialisedRead,
    launch,
)

X = np.arange(32, dtype=np.uint32)


@pytest.fixture(params=ARCHS)
def arch(request) -> str:
    return request.param


def fault(arch: str, body: str, kind: type[EmulatorError], match: str, **more) -> EmulatorError:
    source = Source("faulty", body, **more)
    with pytest.raises(kind, match=match) as caught:
        execute(arch, source, X, X)
    error = caught.value
    assert error.kernel == "faulty"
    assert error.pc is not None
    assert str(error).startswith(f"faulty+{error.pc:#x}: {error.instruction}")
    return error


# -- global memory ---------------------------------------------------------------------------------------


def test_load_past_the_end(arch):
    error = fault(
        arch,
        "global_load_b32 v30, v1, s[4:5] offset:132",
        MemoryAccessError,
        "load of 4 bytes .* 'inputs' has 256 bytes and this is at byte 256",
        inputs=2,
    )
    assert error.lane == 31
    assert error.instruction == "global_load_b32 v30, v1, s[4:5] offset:132"


def test_wide_load_that_only_ends_outside(arch):
    error = fault(
        arch,
        "v_lshlrev_b32 v2, 3, v0\nglobal_load_b128 v[30:33], v2, s[4:5]",
        MemoryAccessError,
        "load of 16 bytes",
    )
    assert error.lane == 31


def test_load_through_null(arch):
    fault(
        arch,
        "v_mov_b32 v2, 0\nv_mov_b32 v3, 0\nglobal_load_b32 v30, v[2:3], off",
        MemoryAccessError,
        "at 0x0 is outside",
    )


def test_load_from_freed_memory(arch):
    source = Source("kernel", "")
    memory = DeviceMemory()
    x, out = memory.allocate(256, "x"), memory.allocate(256, "out")
    memory.free(x)
    with pytest.raises(MemoryAccessError, match="outside every allocation"):
        launch(
            assemble(arch, (source,)).kernel("kernel"),
            memory,
            (1, 1, 1),
            (32, 1, 1),
            kernarg=struct.pack("<QQ", x, out),
        )


def test_inactive_lane_may_hold_any_address(arch):
    body = """v_mov_b32 v30, 0
              v_cmp_gt_u32 vcc_lo, 8, v0
              v_lshlrev_b32 v2, 20, v0
              v_cndmask_b32 v2, v2, v1, vcc_lo
              s_and_saveexec_b32 s20, vcc_lo
              global_load_b32 v30, v2, s[4:5]
              WAIT
              s_or_b32 exec_lo, exec_lo, s20"""
    np.testing.assert_array_equal(execute(arch, Source("masked", body), X + 5).outputs[0], np.where(X < 8, X + 5, 0))


def test_store_to_read_only_memory(arch):
    error = fault(
        arch,
        "v_mov_b32 v30, 0\nglobal_store_b32 v1, v30, s[4:5]",
        ReadOnlyWriteError,
        "'inputs', which is read-only",
    )
    assert error.lane == 0


def test_misaligned_global_access(arch):
    error = fault(
        arch,
        "v_or_b32 v2, 2, v1\nglobal_load_b32 v30, v2, s[4:5]",
        AlignmentError,
        "not a multiple of 4",
        inputs=2,
    )
    assert error.lane == 0


def test_misaligned_host_array_is_misaligned_for_the_kernel(arch):
    source = Source("copy", "v_mov_b32 v30, v10", inputs=1)
    memory = DeviceMemory()
    x = memory.map(np.zeros(132, np.uint8)[2:130], "x")
    out = memory.allocate(128, "out")
    with pytest.raises(AlignmentError):
        launch(
            assemble(arch, (source,)).kernel("copy"),
            memory,
            (1, 1, 1),
            (32, 1, 1),
            kernarg=struct.pack("<QQ", x, out),
        )


# -- LDS and scratch -------------------------------------------------------------------------------------


def test_lds_past_the_end(arch):
    error = fault(
        arch,
        "v_mov_b32 v30, 0\nds_store_b32 v1, v10 offset:4",
        LdsAccessError,
        "4 bytes at LDS byte 128, the block has 128",
        lds_bytes=128,
    )
    assert error.lane == 31


def test_dynamic_lds_counts(arch):
    source = Source("dynamic", "ds_store_b32 v1, v10\nWAIT\nds_load_b32 v30, v1\nWAIT", lds_bytes=64)
    np.testing.assert_array_equal(execute(arch, source, X, dynamic_shared_bytes=64).outputs[0], X)
    with pytest.raises(LdsAccessError, match="the block has 124"):
        execute(arch, source, X, dynamic_shared_bytes=60)


def test_misaligned_lds_access(arch):
    fault(arch, "v_or_b32 v2, 1, v1\nds_store_b32 v2, v10", AlignmentError, "LDS byte 1 is not", lds_bytes=256)


def test_lds_read_before_written(arch):
    error = fault(arch, "ds_load_b32 v30, v1\nWAIT", UninitialisedRead, "stored v30 was never written", lds_bytes=128)
    assert "global_store_b32" in error.instruction


def test_lds_byte_not_written(arch):
    error = fault(
        arch,
        "ds_store_b16 v1, v10\nds_store_b8 v1, v10 offset:3\nWAIT\nds_load_b32 v30, v1\nWAIT",
        UninitialisedRead,
        r"undefined bits 0x00ff0000",
        lds_bytes=128,
    )
    assert error.lane == 0


def test_lds_of_the_block_before_is_not_initialised(arch):
    """Blocks of one batch share an array; what one wrote is not there for the next."""
    source = Source(
        "leftover",
        """v_mov_b32 v30, v10
           ds_load_b32 v2, v1
           WAIT
           v_cmp_eq_u32 vcc_lo, 0, v2
           s_cbranch_vccz .Lend
           ds_store_b32 v1, v10
        .Lend:
           s_nop 0""",
        lds_bytes=128,
    )
    with pytest.raises(UninitialisedRead, match="branch condition vcc_lo"):
        execute(arch, source, X)


def test_scratch_past_the_end(arch):
    fault(
        arch, "v_mov_b32 v30, 0\nscratch_store_b32 off, v30, off offset:16", ScratchAccessError,
        "byte 16 of 16",
        scratch_bytes=16,
    )  # fmt: skip


def test_scratch_read_before_written(arch):
    fault(
        arch,
        "scratch_load_b32 v30, off, off offset:4\nWAIT",
        UninitialisedRead,
        "stored v30",
        scratch_bytes=16,
    )


# -- uninitialised registers -----------------------------------------------------------------------------


def test_stored_register_never_written(arch):
    error = fault(arch, "s_nop 0", UninitialisedRead, "stored v30 was never written")
    assert (error.block, error.wave, error.lane) == (0, 0, 0)


def test_undefined_value_flows_through_arithmetic(arch):
    fault(
        arch,
        "v_add_nc_u32 v30, v10, v5\nv_mul_f32 v30, v30, v10",
        UninitialisedRead,
        "stored v30 was never written",
    )


def test_undefined_in_one_lane_only(arch):
    body = """v_cmp_ne_u32 vcc_lo, 17, v0
              s_and_saveexec_b32 s20, vcc_lo
              v_mov_b32 v30, 1
              s_or_b32 exec_lo, exec_lo, s20"""
    assert fault(arch, body, UninitialisedRead, "stored v30").lane == 17


def test_undefined_half(arch):
    fault(arch, "v_mov_b16 v30.l, v10.l", UninitialisedRead, "undefined bits 0xffff0000")


@pytest.mark.parametrize(
    "body",
    [
        "v_and_b32 v30, 0xffff, v5\nv_mov_b16 v30.l, v10.l",
        "v_mov_b16 v5.h, v10.l\nv_lshrrev_b32 v30, 16, v5",
        "v_mov_b16 v5.l, v10.l\nv_and_b32 v30, 0xff, v5",
        "v_mov_b16 v5.l, v10.l\nv_perm_b32 v30, v5, v5, 0xc0c0504",
        "v_mov_b16 v5.l, v10.l\nv_bfe_u32 v30, v5, 4, 8",
        "v_mov_b16 v5.l, v10.l\nv_cvt_f32_f16 v30, v5.l",
        "v_mov_b16 v5.l, v10.l\nv_mov_b32 v6, v5\nv_mov_b16 v6.h, v10.h\nv_mov_b32 v30, v6",
        "v_cndmask_b32_e64 v30, v5, v10, exec_lo",
        "v_mov_b16 v5.l, v10.l\nv_fma_mix_f32 v30, v5, v10, v10 op_sel_hi:[1,0,0]",
        "v_mov_b32 v2, v10\nv_mad_CO_u64_u32 v[30:31], null, v10, v10, v[2:3]",
        "s_and_b32 s20, s30, 0\nv_mov_b32 v30, s20",
    ],
)
def test_what_is_defined_is_not_flagged(arch, body):
    """Registers are assembled from halves; the part that was never written does not matter until it is
    used."""
    body = body.replace("mad_CO_", "mad_co_" if arch.startswith("gfx12") else "mad_")
    execute(arch, Source("fine", body), X, X)


def test_undefined_address(arch):
    fault(arch, "v_mov_b32 v30, 0\nglobal_load_b32 v30, v5, s[4:5]", UninitialisedRead, "address register v5")


def test_undefined_scalar_address(arch):
    fault(arch, "v_mov_b32 v30, 0\ns_load_b32 s20, s[40:41], 0x0", UninitialisedRead, "address register s40")


def test_undefined_lds_address(arch):
    fault(
        arch,
        "v_mov_b32 v30, 0\nds_store_b32 v5, v30",
        UninitialisedRead,
        "address register v5",
        lds_bytes=128,
    )


def test_undefined_branch(arch):
    fault(arch, "v_mov_b32 v30, 0\ns_cmp_eq_u32 s40, 0\ns_cbranch_scc1 0", UninitialisedRead, "branch depends")


def test_undefined_exec(arch):
    fault(arch, "v_mov_b32 v30, 0\ns_and_saveexec_b32 s20, s40", UninitialisedRead, "exec mask depends")


def test_undefined_comparison_into_exec(arch):
    fault(arch, "v_mov_b32 v30, 0\nv_cmpx_gt_u32 v5, v10", UninitialisedRead, "exec mask depends")


# -- lanes that are off ----------------------------------------------------------------------------------

HALF_OFF = """v_mov_b32 v30, v10
              v_cmp_gt_u32 vcc_lo, 16, v0
              s_and_saveexec_b32 s20, vcc_lo
              {move}
              s_or_b32 exec_lo, exec_lo, s20"""


@pytest.mark.parametrize(
    "move",
    [
        "v_permlanex16_b32 v30, v10, s4, s4",
        "v_permlanex16_b32 v30, v10, s4, s4 op_sel:[1,0]",
        "v_mov_b32 v2, 64\nds_bpermute_b32 v30, v2, v10",
        "ds_swizzle_b32 v30, v10 offset:0x401f",
    ],
)
def test_lane_that_is_off_is_read(arch, move):
    error = fault(arch, HALF_OFF.format(move=move), InactiveLaneRead, r"switched off \(exec 0x0000ffff\)")
    assert error.lane == 0


def test_dpp_reads_a_lane_that_is_off(arch):
    body = HALF_OFF.replace("16, v0", "1, v0").format(
        move="v_mov_b32_dpp v30, v10 row_xmask:1 row_mask:0xf bank_mask:0xf"
    )
    assert fault(arch, body, InactiveLaneRead, "DPP reads").lane == 0


def test_lanes_of_the_same_row_are_on(arch):
    body = HALF_OFF.format(move="v_mov_b32_dpp v30, v10 row_xmask:1 row_mask:0xf bank_mask:0xf")
    got = execute(arch, Source("fine", body), X).outputs[0]
    np.testing.assert_array_equal(got, np.where(X < 16, X ^ 1, X))


def test_dpp_control_of_gfx9(arch):
    row_bcast_15 = "v_mov_b32 v30, 0\n.long 0x7e3c02fa, 0xff01420a"  # v_mov_b32_dpp v30, v10: LLVM refuses to write it
    fault(arch, row_bcast_15, UnimplementedInstruction, "dpp_ctrl 0x142 is no lane move")


# -- launch and code -------------------------------------------------------------------------------------


def test_register_beyond_the_allocation(arch):
    fault(arch, "v_mov_b32 v30, 0\nv_mov_b32 v200, 0", RegisterError, "v200 is beyond the 96 VGPRs")


def test_unimplemented_instruction_is_named(arch):
    error = fault(arch, "v_mov_b32 v30, 0\nv_cubeid_f32 v30, v10, v10, v10", UnimplementedInstruction, "no semantics")
    assert error.instruction == "v_cubeid_f32 v30, v10, v10, v10"


def test_unimplemented_instruction_only_matters_when_reached(arch):
    body = "v_mov_b32 v30, v10\ns_branch .Lover\nv_cubeid_f32 v30, v10, v10, v10\n.Lover:\ns_nop 0"
    np.testing.assert_array_equal(execute(arch, Source("over", body), X).outputs[0], X)


def test_bytes_that_are_no_instruction(arch):
    fault_text = re.escape("no instruction of")
    with pytest.raises(UndecodableInstruction, match=fault_text):
        execute(arch, Source("garbage", "v_mov_b32 v30, 0\n.long 0xffffffff"), X)


def test_conversions_that_clamp_are_not_emulated(arch):
    with pytest.raises(LaunchError, match="conversions to float16 that clamp"):
        execute(arch, Source("clamps", "v_cvt_f16_f32 v30.l, v10", fp16_overflow=1), X)


def test_endless_loop(arch):
    source = Source("forever", "v_mov_b32 v30, 0\n.Lagain:\ns_branch .Lagain")
    with pytest.raises(RunawayError):
        execute(arch, source, X, budget=10_000)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"grid": (0, 1, 1)}, "three positive numbers"),
        ({"block": (2048, 1, 1)}, "block of 2048 threads"),
        ({"kernarg": b"12345678"}, "8 bytes of arguments, the kernel takes 16"),
        ({"dynamic_shared_bytes": 65537}, "at most 65536"),
        ({"schedule": "sideways"}, "unknown schedule"),
    ],
)
def test_launch_that_does_not_fit(arch, options, match):
    kernel = assemble(arch, (Source("kernel", "v_mov_b32 v30, 0"),)).kernel("kernel")
    usual = {"grid": (1, 1, 1), "block": (32, 1, 1), "kernarg": bytes(16)}
    with pytest.raises(LaunchError, match=match):
        launch(kernel, DeviceMemory(), **{**usual, **options})


def test_temporary_allocations_are_freed_after_a_fault(arch):
    source = Source("faulty", "s_nop 0")
    memory = DeviceMemory()
    x = memory.allocate(256, "x")
    with pytest.raises(UninitialisedRead):
        launch(
            assemble(arch, (source,)).kernel("faulty"),
            memory,
            (1, 1, 1),
            (32, 1, 1),
            kernarg=struct.pack("<QQ", x, x),
        )
    assert [a.name for a in memory.allocations()] == ["x"]
