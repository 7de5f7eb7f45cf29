"""Memory, scalar instructions, branches, barriers and schedules, on assembled kernels."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from assembled import ARCHS, Source, assemble, execute
from gristmill.aot.emulator import BarrierError, DeviceMemory, UnimplementedInstruction, launch

LANE = np.arange(32, dtype=np.uint32)
X = (LANE * np.uint32(0x01010101) + np.uint32(0x80)).astype(np.uint32)
Y = (~X).astype(np.uint32)

# LDS address of the lane in v2, spaced by 16 bytes.
AT_16 = "v_lshlrev_b32 v2, 4, v0"


@pytest.fixture(params=ARCHS)
def arch(request) -> str:
    return request.param


def lds(name: str, body: str, outputs: int = 1, **more) -> Source:
    return Source(name, f"{AT_16}\n{body}", inputs=2, outputs=outputs, lds_bytes=1024, **more)


LDS = [
    lds("b32", """ds_store_b32 v2, v10 offset:4
                  WAIT
                  ds_load_b32 v30, v2 offset:4
                  WAIT"""),
    lds("b64_in_parts", """v_mov_b32 v4, v10
                           v_mov_b32 v5, v11
                           ds_store_b64 v2, v[4:5]
                           WAIT
                           ds_load_2addr_b32 v[30:31], v2 offset0:1 offset1:0
                           WAIT""", outputs=2),
    lds("b128", """v_mov_b32 v4, v10
                   v_mov_b32 v5, v11
                   v_mov_b32 v6, v10
                   v_mov_b32 v7, v11
                   ds_store_b128 v2, v[4:7]
                   WAIT
                   ds_load_b128 v[30:33], v2
                   WAIT""", outputs=4),
    lds("two_addresses", """ds_store_2addr_b32 v2, v10, v11 offset0:3 offset1:1
                            WAIT
                            ds_load_b32 v30, v2 offset:12
                            ds_load_b32 v31, v2 offset:4
                            WAIT""", outputs=2),
    lds("bytes", """ds_store_b32 v2, v10
                    WAIT
                    ds_load_u8 v30, v2 offset:1
                    ds_load_i8 v31, v2 offset:2
                    WAIT""", outputs=2),
    lds("halves", """ds_store_b32 v2, v10
                     v_mov_b32 v30, v11
                     v_mov_b32 v31, v11
                     WAIT
                     ds_load_u16_d16 v30, v2 offset:2
                     ds_load_u16_d16_hi v31, v2
                     ds_load_i16 v32, v2 offset:2
                     WAIT""", outputs=3),
    lds("store_high_half", """ds_store_b32 v2, v11
                              ds_store_b16_d16_hi v2, v10
                              WAIT
                              ds_load_b32 v30, v2
                              WAIT"""),
    lds("swizzle", """ds_swizzle_b32 v30, v10 offset:0x041f
                      WAIT"""),
    lds("bpermute", """v_sub_nc_u32 v3, 31, v0
                       v_lshlrev_b32 v3, 2, v3
                       ds_bpermute_b32 v30, v3, v10
                       WAIT"""),
    lds("add_atomic", """v_mov_b32 v3, 0
                         v_mov_b32 v4, 0
                         ds_store_b32 v3, v4
                         WAIT
                         v_mov_b32 v5, 1
                         ds_add_u32 v3, v5
                         WAIT
                         ds_load_b32 v30, v3
                         WAIT"""),
]  # fmt: skip
SIGNED_BYTE = (X >> 16 & 0xFF).astype(np.uint8).view(np.int8).astype(np.int32).view(np.uint32)
LDS_WANT = {
    "b32": [X],
    "b64_in_parts": [Y, X],
    "b128": [X, Y, X, Y],
    "two_addresses": [X, Y],
    "bytes": [X >> 8 & 0xFF, SIGNED_BYTE],
    "halves": [
        Y & 0xFFFF0000 | X >> 16,
        Y & 0xFFFF | X << 16,
        (X >> 16).astype(np.uint16).view(np.int16).astype(np.int32).view(np.uint32),
    ],
    "store_high_half": [Y & 0xFFFF0000 | X >> 16],
    "swizzle": [X[LANE ^ 1]],
    "bpermute": [X[31 - LANE]],
    "add_atomic": [np.full(32, 32, np.uint32)],
}


@pytest.mark.parametrize("source", LDS, ids=lambda s: s.name)
def test_lds(arch, source):
    got = execute(arch, source, X, Y, among=tuple(LDS)).outputs
    np.testing.assert_array_equal(got, np.array(LDS_WANT[source.name], np.uint32))


GLOBAL = [
    Source("bytes", """global_load_u8 v30, v1, s[4:5] offset:3
                       global_load_i8 v31, v1, s[4:5]
                       WAIT""", outputs=2),
    Source("halves", """v_mov_b32 v30, v11
                        v_mov_b32 v31, v11
                        global_load_d16_b16 v30, v1, s[4:5] offset:2
                        global_load_d16_hi_b16 v31, v1, s[4:5]
                        global_load_u16 v32, v1, s[4:5] offset:2
                        WAIT""", outputs=3),
    Source("pointer", """v_add_co_u32 v2, vcc_lo, s4, v1
                         v_add_co_ci_u32_e64 v3, null, s5, 0, vcc_lo
                         global_load_b32 v30, v[2:3], off
                         WAIT"""),
    Source("wide", """v_lshlrev_b32 v2, 1, v1
                      global_load_b64 v[30:31], v2, s[4:5]
                      WAIT""", outputs=2),
    Source("store_parts", """v_mov_b32 v30, 0
                             v_lshlrev_b32 v2, 2, v0
                             global_store_b32 v2, v30, s[6:7] offset:128
                             global_store_b8 v2, v10, s[6:7] offset:130
                             global_store_d16_hi_b16 v2, v10, s[6:7] offset:128
                             WAIT
                             global_load_b32 v31, v2, s[6:7] offset:128
                             WAIT""", outputs=2),
    Source("negative_offset", """v_add_nc_u32 v2, 64, v1
                                 global_load_b32 v30, v2, s[4:5] offset:-64
                                 WAIT"""),
    Source("add_atomic", """v_mov_b32 v2, 0
                            v_mov_b32 v30, 0
                            global_store_b32 v2, v30, s[6:7] offset:128
                            v_mov_b32 v3, 3
                            global_atomic_add_u32 v2, v3, s[6:7] offset:128
                            WAIT
                            global_load_b32 v31, v2, s[6:7] offset:128
                            WAIT
                            v_mov_b32 v30, v31
                            v_cmp_eq_u32 vcc_lo, 0, v0
                            v_cndmask_b32 v31, v0, v31, vcc_lo""", outputs=2),
]  # fmt: skip


def _signed_bytes(x: np.ndarray) -> np.ndarray:
    return x.astype(np.uint8).view(np.int8).astype(np.int32).view(np.uint32)


PAIR = np.stack([X, Y]).reshape(-1)
GLOBAL_WANT = {
    "bytes": [X >> 24, _signed_bytes(X)],
    "halves": [Y & 0xFFFF0000 | X >> 16, Y & 0xFFFF | X << 16, X >> 16],
    "pointer": [X],
    "wide": [PAIR[0::2], PAIR[1::2]],
    "store_parts": [np.zeros(32), (X & 0xFF) << 16 & 0xFF0000 | X >> 16],
    "negative_offset": [X],
    "add_atomic": [np.full(32, 96), np.where(LANE == 0, 96, LANE)],
}


@pytest.mark.parametrize("source", GLOBAL, ids=lambda s: s.name)
def test_global(arch, source):
    got = execute(arch, source, X, Y, among=tuple(GLOBAL)).outputs
    np.testing.assert_array_equal(got, np.array(GLOBAL_WANT[source.name]).astype(np.uint32))


def test_scratch_keeps_a_value_per_lane(arch):
    source = Source(
        "spill",
        """scratch_store_b32 off, v10, off offset:4
           scratch_store_b64 off, v[10:11], off offset:8
           v_mov_b32 v10, 0
           WAIT
           scratch_load_b32 v30, off, off offset:4
           scratch_load_b32 v31, off, off offset:12
           WAIT""",
        outputs=2,
        scratch_bytes=16,
    )
    np.testing.assert_array_equal(execute(arch, source, X, Y).outputs, [X, Y])


def test_raw_buffer_reads_zero_outside(arch):
    """Lanes 0 to 15 lie inside the 64 bytes of the buffer; the others read 0 and store nothing."""
    zero = "null" if arch.startswith("gfx12") else "0"
    source = Source(
        "buffer",
        f"""s_mov_b64 s[20:21], s[4:5]
            s_mov_b32 s22, 64
            s_mov_b32 s23, 0x31004000
            buffer_load_b32 v30, v1, s[20:23], {zero} offen
            s_mov_b64 s[20:21], s[6:7]
            v_mov_b32 v2, 7
            buffer_store_b32 v2, v1, s[20:23], {zero} offen offset:128
            WAIT""",
    )
    got = execute(arch, source, X, Y).outputs[0]
    np.testing.assert_array_equal(got, np.where(LANE < 16, X, 0))


def test_matrix_instruction_needs_all_lanes(arch):
    registers = "v[40:47], v[48:55]" if arch.startswith("gfx11") else "v[40:43], v[44:47]"
    setup = "\n".join(f"v_mov_b32 v{n}, 0" for n in range(30, 64))
    body = f"{setup}\n{{}}v_wmma_f32_16x16x16_f16 v[30:37], {registers}, v[56:63]"
    assert (execute(arch, Source("whole", body.format("")), X).outputs == 0).all()
    with pytest.raises(UnimplementedInstruction, match="lanes switched off"):
        execute(arch, Source("part", body.format("s_mov_b32 exec_lo, 0xffff\n")), X)


# Scalar instructions: the result is written to s30, SCC to s31.
SCALAR = {
    "add_overflows": ("s_mov_b32 s20, 0x7fffffff", "ADD_I32 s30, s20, 1", 0x80000000, 1),
    "add_carries": ("s_mov_b32 s20, -1", "ADD_U32 s30, s20, 2", 1, 1),
    "sub_borrows": ("s_mov_b32 s20, 1", "SUB_U32 s30, s20, 2", 0xFFFFFFFF, 1),
    "mul": ("s_mov_b32 s20, 0x10001", "s_mul_i32 s30, s20, s20", 0x20001, 0),
    "mul_hi": ("s_mov_b32 s20, -1", "s_mul_hi_u32 s30, s20, s20", 0xFFFFFFFE, 0),
    "and_zero": ("s_mov_b32 s20, 0xf0", "s_and_b32 s30, s20, 15", 0, 0),
    "and_not": ("s_mov_b32 s20, 0xff", "s_and_not1_b32 s30, s20, 15", 0xF0, 1),
    "bfe_signed": ("s_mov_b32 s20, 0x80", "s_bfe_i32 s30, s20, 0x40004", 0xFFFFFFF8, 1),
    "bfe": ("s_mov_b32 s20, 0xabcd", "s_bfe_u32 s30, s20, 0x80004", 0xBC, 1),
    "shift_left_add": ("s_mov_b32 s20, 0x60000000", "s_lshl2_add_u32 s30, s20, 5", 0x80000005, 1),
    "ashr": ("s_mov_b32 s20, 0x80000000", "s_ashr_i32 s30, s20, 4", 0xF8000000, 1),
    "min": ("s_mov_b32 s20, -3", "s_min_i32 s30, s20, 4", 0xFFFFFFFD, 1),
    "max_second": ("s_mov_b32 s20, -3", "s_max_i32 s30, s20, 4", 4, 0),
    "abs": ("s_mov_b32 s20, -3", "s_abs_i32 s30, s20", 3, 1),
    "ctz": ("s_mov_b32 s20, 0x100", "s_ctz_i32_b32 s30, s20", 8, 0),
    "bcnt": ("s_mov_b32 s20, 0x1101", "s_bcnt1_i32_b32 s30, s20", 3, 1),
    "select": ("s_cmp_eq_u32 s0, s0", "s_cselect_b32 s30, 5, 6", 5, 1),
    "compare": ("s_mov_b32 s20, -1", "s_movk_i32 s30, -2\ns_cmp_gt_i32 s20, s30", 0xFFFFFFFE, 1),
    "compare_unsigned": ("s_mov_b32 s20, -1", "s_movk_i32 s30, 5\ns_cmp_lt_u32 s20, s30", 5, 0),
    "shift_64": ("s_mov_b64 s[20:21], 3", "s_lshl_b64 s[30:31], s[20:21], 31\ns_mov_b32 s30, s31", 1, 1),
    "pack": ("s_mov_b32 s20, 0x12345678", "s_pack_lh_b32_b16 s30, s20, s20", 0x12345678, 0),
    "add_float": ("s_mov_b32 s20, 0x3fc00000", "s_add_f32 s30, s20, 1.0", 0x40200000, 0),
    "convert": ("s_mov_b32 s20, 7", "s_cvt_f32_u32 s30, s20", 0x40E00000, 0),
}
RENAMED = {"ADD_I32": "add_{}i32", "ADD_U32": "add_{}u32", "SUB_U32": "sub_{}u32"}


def _scalar_source(name: str, arch: str) -> Source:
    setup, body, _, _ = SCALAR[name]
    for word, form in RENAMED.items():
        body = body.replace(word, "s_" + form.format("co_" if arch.startswith("gfx12") else ""))
    text = f"s_cmp_lg_u32 s0, s0\n{setup}\n{body}\ns_cselect_b32 s31, 1, 0\n"
    text += "v_mov_b32 v30, s30\nv_mov_b32 v31, s31"
    return Source(name, text, outputs=2)


@pytest.mark.parametrize("name", SCALAR)
def test_scalar(arch, name):
    _, _, value, scc = SCALAR[name]
    sources = tuple(_scalar_source(n, arch) for n in SCALAR)
    got = execute(arch, _scalar_source(name, arch), X, Y, among=sources).outputs
    assert [hex(v) for v in got[:, 0]] == [hex(value), hex(scc)]
    assert (got == got[:, :1]).all()


LOOP = Source(
    "loop",
    """v_mov_b32 v30, 0
       s_mov_b32 s20, 5
    .Lagain:
       v_add_nc_u32 v30, v30, v10
       s_add_COi32 s20, s20, -1
       s_cmp_lg_u32 s20, 0
       s_cbranch_scc1 .Lagain""",
)


def test_loop_counts_its_instructions(arch):
    co = "co_" if arch.startswith("gfx12") else ""
    source = Source("loop", LOOP.body.replace("CO", co))
    outcome = execute(arch, source, X, Y)
    np.testing.assert_array_equal(outcome.outputs[0], X * np.uint32(5))
    assert outcome.report.mnemonics["v_add_nc_u32"] == 5
    assert outcome.report.instructions["branch"] == 5
    assert outcome.report.bytes_read == 2 * 128
    assert outcome.report.bytes_written == 128


def test_lanes_part_and_meet(arch):
    """if (lane < 10) y = x + 1; else y = x * 2, with the branches that compilers write."""
    source = Source(
        "diverge",
        """v_cmp_gt_u32 vcc_lo, 10, v0
           s_and_saveexec_b32 s20, vcc_lo
           s_xor_b32 s20, exec_lo, s20
           s_cbranch_execz .Lelse
           v_add_nc_u32 v30, 1, v10
        .Lelse:
           s_and_not1_saveexec_b32 s20, s20
           s_cbranch_execz .Ljoin
           v_lshlrev_b32 v30, 1, v10
        .Ljoin:
           s_or_b32 exec_lo, exec_lo, s20""",
    )
    np.testing.assert_array_equal(execute(arch, source, X).outputs[0], np.where(LANE < 10, X + 1, X << 1))


def test_waves_part_and_meet(arch):
    """Every wave goes round a loop as often as its number says, then all meet at the stores."""
    source = Source(
        "uneven",
        """v_readfirstlane_b32 s20, v0
           s_lshr_b32 s20, s20, 5
           v_mov_b32 v30, 0
           s_cmp_eq_u32 s20, 0
           s_cbranch_scc1 .Ldone
        .Lmore:
           v_add_nc_u32 v30, v30, v10
           s_add_COi32 s20, s20, -1
           s_cmp_lg_u32 s20, 0
           s_cbranch_scc1 .Lmore
        .Ldone:
           s_nop 0""".replace("CO", "co_" if arch.startswith("gfx12") else ""),
        threads=128,
    )
    x = np.arange(128, dtype=np.uint32)
    outcome = execute(arch, source, x)
    np.testing.assert_array_equal(outcome.outputs[0], x * (x // 32))
    assert outcome.report.mnemonics["v_add_nc_u32"] == 0 + 1 + 2 + 3


def test_skipped_code_is_not_counted(arch):
    """A wave without active lanes jumps over the masked load, in the report too, although its group runs the
    code."""
    source = Source(
        "masked",
        """v_mov_b32 v30, 0
           v_cmp_gt_u32 vcc_lo, 32, v0
           s_and_saveexec_b32 s20, vcc_lo
           s_cbranch_execz .Lskip
           v_mov_b32 v30, v10
        .Lskip:
           s_or_b32 exec_lo, exec_lo, s20""",
        threads=96,
    )
    x = np.arange(96, dtype=np.uint32) + 1
    outcome = execute(arch, source, x)
    np.testing.assert_array_equal(outcome.outputs[0], np.where(x <= 32, x, 0))
    assert outcome.report.mnemonics["v_mov_b32"] == 3 + 1


EXCHANGE = """v_lshlrev_b32 v2, 2, v0
              ds_store_b32 v2, v10
              WAIT
              {barrier}
              v_xor_b32 v3, 0x60, v0
              v_lshlrev_b32 v3, 2, v3
              ds_load_b32 v30, v3
              WAIT"""


@pytest.mark.parametrize("schedule", ["lockstep", "forward", "reverse", "random"])
def test_barrier_orders_lds(arch, schedule):
    source = Source("exchange", EXCHANGE.format(barrier="BARRIER"), threads=128, lds_bytes=512)
    x = np.arange(128, dtype=np.uint32) * 3
    got = execute(arch, source, x, schedule=schedule).outputs[0]
    np.testing.assert_array_equal(got, x[np.arange(128) ^ 0x60])


def test_missing_barrier_shows_in_serial_schedules(arch):
    """Waves exchange through global memory; without the barrier some of them read what was there before."""
    source = Source(
        "race",
        """v_mov_b32 v30, 0
           global_store_b32 v1, v30, s[6:7] offset:512
           WAIT
           BARRIER
           global_store_b32 v1, v10, s[6:7] offset:512
           WAIT
           v_xor_b32 v3, 0x180, v1
           global_load_b32 v30, v3, s[6:7] offset:512
           WAIT
           v_mov_b32 v31, v10""",
        outputs=2,
        threads=128,
    )
    x = np.arange(128, dtype=np.uint32) * 3 + 1
    right = x[np.arange(128) ^ 0x60]
    results = {
        schedule: execute(arch, source, x, schedule=schedule).outputs[0]
        for schedule in ("lockstep", "forward", "reverse")
    }
    np.testing.assert_array_equal(results["lockstep"], right)  # the race hides
    assert (results["forward"] != right).any()
    assert (results["reverse"] != right).any()
    assert (results["forward"] != results["reverse"]).any()


def test_waves_may_wait_at_different_barrier_instructions(arch):
    source = Source(
        "two_places",
        """v_readfirstlane_b32 s20, v0
           v_mov_b32 v30, v10
           s_cmp_eq_u32 s20, 0
           s_cbranch_scc1 .Lfirst
           BARRIER
           s_branch .Lend
        .Lfirst:
           BARRIER
        .Lend:
           s_nop 0""",
        threads=64,
    )
    x = np.arange(64, dtype=np.uint32)
    np.testing.assert_array_equal(execute(arch, source, x).outputs[0], x)


def test_barrier_that_a_wave_never_reaches(arch):
    source = Source(
        "left_out",
        """v_readfirstlane_b32 s20, v0
           v_mov_b32 v30, v10
           s_cmp_eq_u32 s20, 0
           s_cbranch_scc1 .Lend
           BARRIER
        .Lend:
           s_nop 0""",
        threads=64,
    )
    with pytest.raises(BarrierError, match=r"wave 0 of the block ended without reaching this barrier") as caught:
        execute(arch, source, np.zeros(64, np.uint32))
    assert caught.value.wave == 1


def test_wait_without_a_signal():
    source = Source("no_signal", "v_mov_b32 v30, v10\ns_barrier_wait -1", threads=64)
    with pytest.raises(BarrierError, match="never signal"):
        execute("gfx1201", source, np.zeros(64, np.uint32))


def test_blocks_know_their_place(arch):
    """out[block] = block number, over a grid with three axes, more blocks than one batch holds."""
    block = "ttmp9" if arch.startswith("gfx12") else "s2"
    source = Source(
        "place",
        f"""s_load_b128 s[4:7], s[0:1], 0x0
            WAIT
            v_lshl_add_u32 v2, {block}, 5, v0
            v_lshlrev_b32 v2, 2, v2
            v_mov_b32 v3, {block}
            global_store_b32 v2, v3, s[6:7]""",
        framed=False,
    )
    memory = DeviceMemory()
    out = memory.allocate(4 * 32 * 150, "out")
    report = launch(
        assemble(arch, (source,)).kernel("place"),
        memory,
        (150, 1, 1),
        (32, 1, 1),
        kernarg=struct.pack("<QQ", out, out),
    )
    got = np.frombuffer(memory.read(out, 4 * 32 * 150), np.uint32).reshape(150, 32)
    np.testing.assert_array_equal(got, np.repeat(np.arange(150), 32).reshape(150, 32))
    assert (report.blocks, report.waves) == (150, 150)


@pytest.mark.parametrize(("denorm", "expected"), [(3, 0x00400000), (0, 0)])
def test_denormals_follow_the_descriptor(arch, denorm, expected):
    source = Source("denormal", "v_mul_f32 v30, 0.5, v10", denorm_f32=denorm)
    got = execute(arch, source, np.full(32, 0x00800000, np.uint32)).outputs
    assert (got == expected).all()


def test_mode_can_change_on_the_way(arch):
    source = Source(
        "mode",
        """s_denorm_mode 0
           v_mul_f32 v30, 0.5, v10
           s_denorm_mode 15
           v_mul_f32 v31, 0.5, v10
           s_round_mode 3
           v_mul_f32 v32, v11, v11""",
        outputs=3,
    )
    x = np.full(32, 0x00800000, np.uint32)
    y = np.full(32, np.float32(1 + 2**-12 + 2**-13).view(np.uint32))
    got = execute(arch, source, x, y).outputs[:, 0]
    exact = (1 + 2**-12 + 2**-13) ** 2
    below = np.float32(exact)
    below = below if float(below) <= exact else np.nextafter(below, np.float32(0))
    assert [hex(v) for v in got] == ["0x0", "0x400000", hex(int(np.float32(below).view(np.uint32)))]
