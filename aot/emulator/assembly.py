"""Instructions as text, in the syntax of LLVM's assembler.

For messages, and for the check of the decoder: this text, assembled again by LLVM, must give back the same
bytes.
"""

from __future__ import annotations

from .decode import LITERAL, Instruction
from .waves import EXEC, NULL, SCC, VCC, VECTOR, scalar_name

_FLOATS = {240: "0.5", 241: "-0.5", 242: "1.0", 243: "-1.0", 244: "2.0", 245: "-2.0", 246: "4.0", 247: "-4.0"}
_SPECIAL = {248: "0.15915494", 235: "src_shared_base", 236: "src_shared_limit", 237: "src_private_base",
            238: "src_private_limit", 251: "src_vccz", 252: "src_execz", SCC: "src_scc"}  # fmt: skip
_SCOPES = ("SCOPE_CU", "SCOPE_SE", "SCOPE_DEV", "SCOPE_SYS")
_LOAD_HINTS = ("RT", "NT", "HT", "LU", "NT_RT", "RT_NT", "NT_HT", "RESERVED")
_STORE_HINTS = ("RT", "NT", "HT", "RT_WB", "NT_RT", "RT_NT", "NT_HT", "NT_WB")


def text(instruction: Instruction) -> str:
    """The instruction as one line."""
    writer = _WRITERS.get(instruction.format)
    return instruction.name if writer is None else writer(instruction)


# -- operands --------------------------------------------------------------------------------------------


def _registers(instruction: Instruction, field: str) -> int:
    """How many registers the operand has; masks are one register in wave32."""
    for name in (field, f"v{field}", field.removeprefix("v")):
        if name in instruction.operands:
            kind, bits = instruction.operands[name]
            return 1 if kind == "FMT_NUM_M64" else max(1, bits // 32)
    return 1


def _bits(instruction: Instruction, field: str) -> int:
    for name in (field, f"v{field}", field.removeprefix("v")):
        if name in instruction.operands:
            return instruction.operands[name][1]
    return 32


def register(code: int, count: int = 1) -> str:
    """v5, v[5:8], s3, vcc_lo, vcc, ..."""
    if code >= VECTOR:
        first = code - VECTOR
        return f"v{first}" if count == 1 else f"v[{first}:{first + count - 1}]"
    if code in (VCC, EXEC) and count == 2:
        return "vcc" if code == VCC else "exec"
    if code in (NULL, 125) or count == 1 or code in (VCC, EXEC):
        return scalar_name(code)
    if code >= 108:
        return f"ttmp[{code - 108}:{code - 109 + count}]"
    return f"s[{code}:{code + count - 1}]"


def _operand(instruction: Instruction, field: str, *, count: int | None = None) -> str:
    return _value(instruction, instruction[field], _registers(instruction, field) if count is None else count)


def _value(instruction: Instruction, code: int, count: int = 1) -> str:
    if code == LITERAL:
        return f"{instruction.literal:#x}"
    if 128 <= code <= 192:
        return str(code - 128)
    if 193 <= code <= 208:
        return str(192 - code)
    if code in _FLOATS:
        return _FLOATS[code]
    if code in _SPECIAL:
        return _SPECIAL[code]
    return register(code, count)


def _signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value


def _join(name: str, operands: list[str], modifiers: list[str] | tuple = ()) -> str:
    line = f"{name} {', '.join(operands)}" if operands else name
    return " ".join([line, *modifiers])


# -- scalar ----------------------------------------------------------------------------------------------


def _sop(instruction: Instruction) -> str:
    name, operands = instruction.name, []
    if "sdst" in instruction.fields and not name.startswith(("s_barrier_", "s_setpc", "s_rfe", "s_sleep_var")):
        operands.append(_operand(instruction, "sdst"))
    operands += [
        _operand(instruction, f) for f in ("ssrc0", "ssrc1") if f in instruction.fields and name not in ("s_getpc_b64",)
    ]
    if name in ("s_fmamk_f32", "s_fmaak_f32"):
        operands.insert(2 if name == "s_fmamk_f32" else 3, f"{instruction.literal:#x}")
    return _join(name, operands)


def _sopk(instruction: Instruction) -> str:
    name, k = instruction.name, instruction["simm16"]
    if name == "s_setreg_imm32_b32":
        return _join(name, [f"{k:#x}", f"{instruction['literal']:#x}"])
    if name == "s_setreg_b32":
        return _join(name, [f"{k:#x}", _operand(instruction, "sdst")])
    if name == "s_version":
        return _join(name, [f"{k:#x}"])
    return _join(name, [_operand(instruction, "sdst"), f"{k:#x}"])


_BARE = {
    "s_endpgm",
    "s_barrier",
    "s_code_end",
    "s_icache_inv",
    "s_wakeup",
    "s_wait_idle",
    "s_endpgm_saved",
    "s_ttracedata",
}


def _sopp(instruction: Instruction) -> str:
    name, k = instruction.name, instruction["simm16"]
    if name in _BARE and k == 0:
        return name
    if name.startswith(("s_branch", "s_cbranch", "s_barrier")):
        return _join(name, [str(_signed(k, 16))])
    return _join(name, [f"{k:#x}"])


def _smem(instruction: Instruction) -> str:
    name = instruction.name
    if name in ("s_dcache_inv", "s_gl1_inv"):
        return name
    bits = 24 if "ioffset" in instruction.fields else 21
    offset = _signed(instruction.get("ioffset", instruction.get("offset")), bits)
    operands = [_operand(instruction, "sdata"), register(instruction["sbase"], 4 if "buffer" in name else 2)]
    modifiers = _cache(instruction, "LOAD")
    if instruction["soffset"] == NULL:
        operands.append(f"{offset:#x}")
    else:
        operands.append(register(instruction["soffset"]))
        modifiers = ([f"offset:{offset:#x}"] if offset else []) + modifiers
    return _join(name, operands, modifiers)


# -- vector ----------------------------------------------------------------------------------------------

_HALF_BY_SUFFIX = ["VOP1", "VOP2", "VOPC"]


def _is_half(instruction: Instruction, field: str) -> bool:
    """A 16-bit vector operand, written v5.l or v5.h."""
    return _bits(instruction, field) == 16 and instruction.name not in _NOT_TRUE16


# 16-bit in the table, but assembled with op_sel.
_NOT_TRUE16 = {"v_fma_mixlo_f16", "v_fma_mixhi_f16"}


def _half(code: int, high: bool) -> str:
    return f"v{code - VECTOR}.{'h' if high else 'l'}"


def _vector(instruction: Instruction, code: int, field: str, position: int) -> str:
    """A source or destination of VOP1, VOP2, VOPC or VOP3 with its half."""
    if code >= VECTOR and _is_half(instruction, field):
        if instruction.format in _HALF_BY_SUFFIX:
            return _half(VECTOR + (code - VECTOR & 0x7F), bool(code - VECTOR & 0x80))
        return _half(code, bool(instruction.get("opsel") >> position & 1))
    return _value(instruction, code, _registers(instruction, field))


def _modified(value: str, negate: int, absolute: int) -> str:
    value = f"|{value}|" if absolute else value
    if negate and not value[0].isalpha() and value[0] != "|":
        return f"neg({value})"  # "-0" would be the constant
    return f"-{value}" if negate else value


def _dpp(instruction: Instruction) -> list[str]:
    if instruction.variant == "DPP8":
        lanes = ",".join(str(instruction[f"lane_sel_{i}"]) for i in range(8))
        return [f"dpp8:[{lanes}]", *(["fi:1"] if instruction["fi"] else [])]
    control, amount = instruction["dpp"], instruction["dpp"] & 15
    if control < 0x100:
        move = "quad_perm:[" + ",".join(str(control >> 2 * i & 3) for i in range(4)) + "]"
    else:
        names = {0x100: "row_shl", 0x110: "row_shr", 0x120: "row_ror", 0x150: "row_share", 0x160: "row_xmask"}
        fixed = {0x140: "row_mirror", 0x141: "row_half_mirror"}
        move = fixed.get(control) or f"{names.get(control & ~15, 'dpp_ctrl')}:{amount}"
    modifiers = [move, f"row_mask:{instruction['row_mask']:#x}", f"bank_mask:{instruction['bank_mask']:#x}"]
    return modifiers + ["bound_ctrl:1"] * instruction["bc"] + ["fi:1"] * instruction["fi"]


def _vop(instruction: Instruction) -> str:
    name, form = instruction.name, instruction.format
    dpp = instruction.variant.startswith("DPP")
    suffix = ("_e64_dpp" if form == "VOP3" else "_dpp") if dpp else _suffix(instruction)
    negate, absolute = instruction.get("neg"), instruction.get("abs")
    if instruction.variant == "DPP16" and form != "VOP3":
        negate = instruction["src0_neg"] | instruction["src1_neg"] << 1
        absolute = instruction["src0_abs"] | instruction["src1_abs"] << 1
    operands = []
    if form == "VOPC":
        operands += [] if name.startswith("v_cmpx") else ["vcc_lo"]
    elif name.startswith("v_cmpx"):
        operands.append("exec_lo") if form != "VOP3" else None
    elif name.startswith(("v_cmp_", "v_readlane", "v_readfirstlane")):
        operands.append(register(instruction["vdst"] & 0xFF))
    elif name not in ("v_nop", "v_pipeflush"):
        operands.append(_vector(instruction, instruction["vdst"], "vdst", 3))
    carries = name in ("v_add_co_ci_u32", "v_sub_co_ci_u32", "v_subrev_co_ci_u32")
    if carries:
        operands.append("vcc_lo")
    for position, field in enumerate(_source_fields(instruction)):
        value = _vector(instruction, instruction[field], field, position)
        operands.append(_modified(value, negate >> position & 1, absolute >> position & 1))
    if carries or (name == "v_cndmask_b32" and form == "VOP2"):
        operands.append("vcc_lo")
    if name.startswith("v_fmamk"):
        operands.insert(2, f"{instruction.literal:#x}")
    elif name.startswith("v_fmaak"):
        operands.append(f"{instruction.literal:#x}")
    modifiers = _op_sel(instruction) if form == "VOP3" else []
    modifiers += ["clamp"] * instruction.get("clmp")
    modifiers += ["", "mul:2", "mul:4", "div:2"][instruction.get("omod") : instruction.get("omod") + 1]
    modifiers = [m for m in modifiers if m] + (_dpp(instruction) if dpp else [])
    return _join(name + suffix, operands, modifiers)


def _suffix(instruction: Instruction) -> str:
    name = instruction.name
    if name.startswith(("v_fmamk", "v_fmaak", "v_readfirstlane", "v_swap", "v_nop")):
        return "_e32" if name.startswith(("v_readfirstlane", "v_nop")) and instruction.format == "VOP1" else ""
    if instruction.format in ("VOP1", "VOP2", "VOPC"):
        return "_e32"
    return "_e64" if _has_short_form(instruction) else ""


def _has_short_form(instruction: Instruction) -> bool:
    """Whether the mnemonic also exists as VOP1, VOP2 or VOPC, so that VOP3 must be asked for."""
    from .decode import short_names

    return instruction.name in short_names(instruction.generation)


def _source_fields(instruction: Instruction) -> list[str]:
    names = {n.removeprefix("v") for n in instruction.operands if "src" in n}
    order = (("vsrc0", "src0"), ("vsrc1", "src1"), ("src2",))
    fields = []
    for options in order:
        for field in options:
            if field in instruction.fields and field.removeprefix("v") in names:
                fields.append(field)
                break
    return fields


def _op_sel(instruction: Instruction) -> list[str]:
    """op_sel where it is not already in the register names: halves of registers that are 32 bits to the
    assembler."""
    bits = instruction.get("opsel")
    if not bits:
        return []
    name = instruction.name
    if name.startswith(("v_permlane16_b32", "v_permlanex16_b32")):
        return [f"op_sel:[{bits & 1},{bits >> 1 & 1}]"]
    fields = _source_fields(instruction)
    visible = [bits >> i & 1 for i in range(len(fields))] + [bits >> 3 & 1]
    hidden = [
        bit and not _is_half(instruction, f) for bit, f in zip(visible, [*fields, "vdst"], strict=True)
    ]  # fmt: skip
    return [f"op_sel:[{','.join(map(str, visible))}]"] if any(hidden) else []


def _vop3sd(instruction: Instruction) -> str:
    operands = [_operand(instruction, "vdst"), register(instruction["sdst"])]
    for position, field in enumerate(_source_fields(instruction)):
        operands.append(_modified(_operand(instruction, field), instruction["neg"] >> position & 1, 0))
    if instruction.name.endswith("_co_ci_u32") and len(operands) == 4:
        operands.append(register(instruction["src2"]))
    suffix = "_e64" if instruction.name.endswith("_co_ci_u32") else ""
    return _join(instruction.name + suffix, operands, ["clamp"] * instruction["clmp"])


def _vop3p(instruction: Instruction) -> str:
    fields = _source_fields(instruction)
    count = len(fields)
    name = instruction.name
    mix = name.startswith("v_fma_mix")
    neg, neg_hi = instruction["neg"], instruction["neg_hi"]
    operands = [register(instruction["vdst"], _registers(instruction, "vdst"))]
    for position, field in enumerate(fields):
        value = _operand(instruction, field)
        if mix:
            value = _modified(value, neg >> position & 1, neg_hi >> position & 1)
        operands.append(value)
    op_sel, op_sel_hi = instruction["opsel"], instruction["opsel_hi"] | instruction["opsel_hi2"] << 2

    def listed(bits: int) -> str:
        return "[" + ",".join(str(bits >> i & 1) for i in range(count)) + "]"

    modifiers, every = [], (1 << count) - 1
    if op_sel & every:
        modifiers.append(f"op_sel:{listed(op_sel)}")
    default = 0 if mix else every
    if op_sel_hi & every != default and not name.startswith("v_wmma"):
        modifiers.append(f"op_sel_hi:{listed(op_sel_hi)}")
    if not mix and neg:
        modifiers.append(f"neg_lo:{listed(neg)}")
    if not mix and neg_hi:
        modifiers.append(f"neg_hi:{listed(neg_hi)}")
    return _join(name, operands, modifiers + ["clamp"] * instruction["clmp"])


def _vopd(instruction: Instruction) -> str:
    halves = []
    for half, name in (("x", instruction.name), ("y", instruction.second)):
        operands = [register(instruction[f"vdst{half}"]), _value(instruction, instruction[f"src{half}0"])]
        if name != "v_dual_mov_b32":
            operands.append(register(instruction[f"vsrc{half}1"]))
        if name == "v_dual_fmamk_f32":
            operands.insert(2, f"{instruction.literal:#x}")
        elif name == "v_dual_fmaak_f32":
            operands.append(f"{instruction.literal:#x}")
        halves.append(_join(name, operands))
    return " :: ".join(halves)


# -- memory ----------------------------------------------------------------------------------------------


def _cache(instruction: Instruction, kind: str) -> list[str]:
    """Cache policy bits."""
    if instruction.generation == "rdna3":
        return [bit for bit in ("glc", "slc", "dlc") if instruction.get(bit)]
    modifiers = []
    if hint := instruction.get("th"):
        if kind == "ATOMIC":
            modifiers.append("th:TH_ATOMIC_RETURN" if hint == 1 else f"th:{hint}")
        else:
            modifiers.append(f"th:TH_{kind}_{(_LOAD_HINTS if kind == 'LOAD' else _STORE_HINTS)[hint]}")
    if scope := instruction.get("scope"):
        modifiers.append(f"scope:{_SCOPES[scope]}")
    return modifiers


def _global(instruction: Instruction) -> str:
    name, fields = instruction.name, instruction.fields
    kind = "ATOMIC" if "atomic" in name else "STORE" if "store" in name else "LOAD"
    if not instruction.operands or name in ("global_inv", "global_wb", "global_wbinv"):
        return _join(name, [], _cache(instruction, kind))
    address = instruction["vaddr" if "vaddr" in fields else "addr"]
    flat11 = instruction.format == "FLAT" and instruction.generation == "rdna3"
    by_scalar = instruction["saddr"] != NULL and not flat11
    data = "data" if "data" in fields else "vsrc"
    parts = []
    if instruction.format == "SCRATCH":
        where = [register(address) if instruction["sve"] else "off"]
    else:
        where = [register(address, 1 if by_scalar else 2)]
    scalar = [] if instruction.format == "FLAT" and not by_scalar else [
        register(instruction["saddr"], 1 if instruction.format == "SCRATCH" else 2) if by_scalar else "off"
    ]  # fmt: skip
    if kind == "LOAD":
        parts = [_operand(instruction, "vdst"), *where]
    elif kind == "STORE":
        parts = [*where, _operand(instruction, data)]
    else:
        returns = instruction.get("glc") or instruction.get("th") & 1
        parts = [*([_operand(instruction, "vdst")] if returns else []), *where, _operand(instruction, data)]
    bits = 24 if "ioffset" in fields else 13
    offset = _signed(fields.get("ioffset", fields.get("offset", 0)), bits)
    return _join(name, parts + scalar, ([f"offset:{offset}"] if offset else []) + _cache(instruction, kind))


def _buffer(instruction: Instruction) -> str:
    name, fields = instruction.name, instruction.fields
    if name in ("buffer_gl0_inv", "buffer_gl1_inv"):
        return name
    kind = "STORE" if "store" in name else "LOAD"
    resource = fields.get("srsrc", fields.get("rsrc", 0)) & 0x7F
    operands = [
        _operand(instruction, "vdata"),
        register(fields["vaddr"]) if instruction["offen"] or instruction["idxen"] else "off",
        register(resource, 4),
        _value(instruction, fields["soffset"]),
    ]
    offset = fields.get("ioffset", fields.get("offset", 0))
    modifiers = ["idxen"] * instruction["idxen"] + ["offen"] * instruction["offen"]
    return _join(name, operands, modifiers + ([f"offset:{offset}"] if offset else []) + _cache(instruction, kind))


def _ds(instruction: Instruction) -> str:
    name = instruction.name
    operands = [
        _operand(instruction, field) for field in ("vdst", "addr", "data0", "data1") if field in instruction.operands
    ]
    if "2addr" in name:
        offsets = [f"offset{i}:{instruction[f'offset{i}']}" for i in range(2) if instruction[f"offset{i}"]]
    else:
        offset = instruction["offset0"] | instruction["offset1"] << 8
        offsets = [f"offset:{offset}"] if offset else []
    return _join(name, operands, offsets)


_WRITERS = {
    "SOP1": _sop, "SOP2": _sop, "SOPC": _sop, "SOPK": _sopk, "SOPP": _sopp, "SMEM": _smem,
    "VOP1": _vop, "VOP2": _vop, "VOPC": _vop, "VOP3": _vop, "VOP3SD": _vop3sd, "VOP3P": _vop3p, "VOPD": _vopd,
    "GLOBAL": _global, "FLAT": _global, "SCRATCH": _global, "BUFFER": _buffer, "DS": _ds,
}  # fmt: skip
