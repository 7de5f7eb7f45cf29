"""Reading code objects, and what the loader makes of them."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from assembled import ARCHS, Source, assemble, execute
from compiled import hip_kernel, triton_kernels
from gristmill.aot.amdgpu_code_object import CodeObject, CodeObjectError, KernelDescriptor
from gristmill.aot.emulator import Module


@pytest.mark.parametrize("arch", ARCHS)
def test_triton_object(arch):
    built = triton_kernels(arch, "fp16")[0]
    co = CodeObject.parse(built.code)
    assert co.arch == arch
    assert list(co.kernels) == [built.symbol]
    kernel = co.kernel(built.symbol)
    assert kernel.wavefront_size == 32
    assert kernel.descriptor.wave32
    assert [a.offset for a in kernel.args] == [0, 8, 16, 24, 32, 40, 48, 52, 56, 60, 64, 72]
    assert kernel.hidden_args == ()
    assert kernel.kernarg_bytes == 80
    assert kernel.max_threads == built.threads
    assert 0 < kernel.vgpr_count <= kernel.descriptor.vgprs
    assert kernel.descriptor.vgprs % 8 == 0
    assert (kernel.vgpr_spills, kernel.private_segment_bytes) == (0, 0)
    assert kernel.group_segment_bytes == 0  # Triton's shared memory is dynamic
    # Rounding to nearest, denormals kept.
    assert kernel.descriptor.float_mode == 0xF0
    assert kernel.descriptor.user_sgpr_layout() == [("kernarg_segment_ptr", 2)]
    assert co.text_address <= kernel.entry_address < co.text_address + len(co.text)
    assert kernel.entry_address + kernel.code_bytes <= co.text_address + len(co.text)


@pytest.mark.parametrize("arch", ARCHS)
def test_hip_object(arch):
    kernel = CodeObject.parse(hip_kernel(arch)).kernel("dot_reduce")
    assert [(a.offset, a.size, a.value_kind) for a in kernel.explicit_args] == [
        (0, 8, "global_buffer"), (8, 8, "global_buffer"), (16, 8, "global_buffer"), (24, 4, "by_value"),
    ]  # fmt: skip
    assert kernel.max_threads == 128


def test_descriptor_fields():
    raw = bytearray(64)
    struct.pack_into("<III", raw, 0, 1024, 16, 88)
    struct.pack_into("<q", raw, 16, -4096)
    rsrc1 = 11 | 0b1001 << 12 | 0b1100 << 16 | 1 << 21 | 1 << 26
    rsrc2 = 1 | 6 << 1 | 0b101 << 7 | 2 << 11
    struct.pack_into("<IIIHH", raw, 44, 0, rsrc1, rsrc2, 1 << 1 | 1 << 3 | 1 << 6 | 1 << 10, 0)
    d = KernelDescriptor.parse(bytes(raw))
    assert (d.group_segment_bytes, d.private_segment_bytes, d.kernarg_bytes, d.entry_offset) == (
        1024,
        16,
        88,
        -4096,
    )
    assert d.vgprs == 96
    assert d.float_mode == 0b1100_1001
    assert (d.dx10_clamp, d.ieee_mode, d.fp16_overflow) == (True, False, True)
    assert d.user_sgprs == 6
    assert d.workgroup_id_enabled == (True, False, True)
    assert d.workitem_id_axes == 3
    assert d.user_sgpr_layout() == [
        ("dispatch_ptr", 2),
        ("kernarg_segment_ptr", 2),
        ("private_segment_size", 1),
    ]


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (lambda code: b"not an ELF file at all", "not an ELF file"),
        (lambda code: code[:18] + b"\x3e\x00" + code[20:], "not AMDGPU"),
        (lambda code: code[:48] + b"\x01" + code[49:], "unknown AMDGPU machine"),
        (lambda code: code.replace(b"AMDGPU\0", b"NOBODY\0"), "no AMDGPU metadata"),
    ],
)
def test_what_is_no_code_object(damage, match):
    with pytest.raises(CodeObjectError, match=match):
        CodeObject.parse(damage(hip_kernel("gfx1151")))


def test_unknown_kernel():
    with pytest.raises(
        CodeObjectError, match=r"no kernel 'other' in this gfx1151 code object; it has \['dot_reduce'\]"
    ):
        Module(hip_kernel("gfx1151")).kernel("other")


def test_other_architectures_are_refused():
    code = bytearray(hip_kernel("gfx1151"))
    code[48] = 0x4C  # EF_AMDGPU_MACH of gfx942
    with pytest.raises(ValueError, match="gfx942 is neither RDNA3"):
        Module(bytes(code))


@pytest.mark.parametrize("arch", ARCHS)
def test_threads_of_three_axes_are_packed_into_v0(arch):
    source = Source("ids", "v_mov_b32 v30, v0", inputs=0)
    # The frame's byte offset is made from v0, which holds x alone as long as the block has one axis.
    assert execute(arch, source).outputs[0].tolist() == list(range(32))
    assert assemble(arch, (source,)).kernel("ids").info.descriptor.workitem_id_axes == 1


@pytest.mark.parametrize("arch", ARCHS)
def test_last_wave_of_a_block_may_be_part_empty(arch):
    source = Source("tail", "v_mov_b32 v30, v10\nv_add_nc_u32 v30, 1, v30", inputs=1, threads=40)
    x = np.arange(40, dtype=np.uint32)
    outcome = execute(arch, source, x)
    np.testing.assert_array_equal(outcome.outputs[0], x + 1)
    assert outcome.report.waves == 2


@pytest.mark.parametrize("arch", ARCHS)
def test_constants_beside_the_code_are_loaded(arch):
    """A kernel may read its own code object through the program counter."""
    source = Source(
        "pc",
        """s_getpc_b64 s[20:21]
        .Lhere:
           s_load_b32 s22, s[20:21], 0x0
           WAIT
           v_mov_b32 v30, s22""",
    )
    got = execute(arch, source, np.zeros(32, np.uint32)).outputs[0, 0]
    module = assemble(arch, (source,))
    text = module.code_object.text
    assert struct.pack("<I", got) in text
