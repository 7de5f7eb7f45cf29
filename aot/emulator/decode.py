"""Machine code to instructions, for RDNA3/3.5 (gfx11) and RDNA4 (gfx12).

Field layouts and opcode names come from tinygrad's tables, which are generated from AMD's machine-readable
ISA. The choice of format is made here: tinygrad's own chooser leaves out buffer instructions and DPP8.
"""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass, field
from typing import Any

from .errors import UndecodableInstruction

# Source operand codes that stand for something other than a register or an inline constant.
DPP8, DPP8_FI, DPP16, LITERAL = 233, 234, 250, 255

# Tried in order: the specific encodings before those whose few fixed bits would swallow them.
_FORMATS = {
    "rdna3": [
        "VOPD",
        "VOP3P",
        "VOP3SD",
        "VOP3_SDST",
        "VOP3",
        "DS",
        "GLOBAL",
        "SCRATCH",
        "FLAT",
        "MUBUF",
        "SMEM",
        "SOP1",
        "SOPC",
        "SOPP",
        "SOPK",
        "SOPK_LIT",
        "SOP2",
        "SOP2_LIT",
        "VOPC",
        "VOP1_SDST",
        "VOP1",
        "VOP1_LIT",
        "VOP2",
        "VOP2_LIT",
    ],
    "rdna4": [
        "VOPD",
        "VOP3P",
        "VOP3SD",
        "VOP3_SDST",
        "VOP3",
        "DS",
        "VGLOBAL",
        "VSCRATCH",
        "VFLAT",
        "VBUFFER",
        "SMEM",
        "SOP1",
        "SOPC",
        "SOPP",
        "SOPK",
        "SOPK_LIT",
        "SOP2",
        "SOP2_LIT",
        "VOPC",
        "VOP1_SDST",
        "VOP1",
        "VOP1_LIT",
        "VOP2",
        "VOP2_LIT",
    ],
}
# One name per format over both generations.
_FORMAT_NAMES = {
    "VGLOBAL": "GLOBAL",
    "VSCRATCH": "SCRATCH",
    "VFLAT": "FLAT",
    "MUBUF": "BUFFER",
    "VBUFFER": "BUFFER",
}


def generation(arch: str) -> str:
    """ "rdna3" or "rdna4" for an architecture name such as gfx1151."""
    if arch.startswith("gfx11"):
        return "rdna3"
    if arch.startswith("gfx12"):
        return "rdna4"
    raise ValueError(f"{arch} is neither RDNA3/3.5 (gfx11...) nor RDNA4 (gfx12...)")


@dataclass(frozen=True)
class Instruction:
    """One decoded instruction. `fields` are the raw bit fields; register numbers are 0-127 scalar, 256-511
    vector."""

    address: int
    raw: bytes
    name: str  # mnemonic without _e32/_e64, e.g. "v_add_f32"
    format: str  # "VOP3", "DS", "GLOBAL", ...
    variant: str  # "", "LIT", "DPP16", "DPP8"
    generation: str
    fields: dict[str, int] = field(hash=False, compare=False)
    operands: dict[str, tuple[str, int]] = field(hash=False, compare=False)  # field -> (format name, bits)
    second: str = ""  # VOPD: mnemonic of the Y half

    @property
    def size(self) -> int:
        return len(self.raw)

    @property
    def end(self) -> int:
        return self.address + len(self.raw)

    def __getitem__(self, name: str) -> int:
        return self.fields[name]

    def get(self, name: str, default: int = 0) -> int:
        return self.fields.get(name, default)

    @property
    def literal(self) -> int | None:
        return self.fields.get("literal")

    @property
    def target(self) -> int:
        """Where a branch with a 16-bit word offset goes."""
        offset = self.fields["simm16"]
        return self.end + 4 * (offset - 0x10000 if offset & 0x8000 else offset)

    def __str__(self) -> str:
        from .assembly import text

        return text(self)


def decode(code: bytes, offset: int, address: int, arch_generation: str) -> Instruction:
    """Decode the instruction at `offset` of `code`, which is loaded at `address`."""
    window = code[offset : offset + 12]
    if len(window) < 4:
        raise UndecodableInstruction(f"code ends in the middle of an instruction at {address:#x}")
    instruction = _decode_bytes(bytes(window), arch_generation)
    if instruction is None:
        error = UndecodableInstruction(f"no instruction of {arch_generation} has these bytes")
        error.locate("", address, window.hex(" ", 4))
        raise error
    fields = dict(instruction.__dict__)
    fields["address"] = address
    return Instruction(**fields)


@functools.lru_cache(maxsize=65536)
def _decode_bytes(window: bytes, arch_generation: str) -> Instruction | None:
    for layout in _layouts(arch_generation):
        if layout.matches(window):
            return _build(layout, window, arch_generation)
    return None


class _Layout:
    """One tinygrad format class, reduced to what decoding needs."""

    def __init__(self, name: str, cls: Any):
        self.name, self.cls = name, cls
        fixed = [f for _, f in cls._fields if type(f).__name__ == "FixedBitField"]
        self.mask = functools.reduce(lambda m, f: m | (f.mask << f.lo), fixed, 0)
        self.value = functools.reduce(lambda v, f: v | (f.default << f.lo), fixed, 0)
        self.base_bytes = cls._base_size
        self.bit_fields = [(n, f) for n, f in cls._fields if type(f).__name__ != "FixedBitField"]
        self.op_field: Any = dict(self.bit_fields).get("op")
        self.allowed: set[int] | None = None
        if self.op_field is not None:
            members = self.op_field.allowed if self.op_field.allowed is not None else list(self.op_field._enum)
            self.allowed = {m.value for m in members}

    def matches(self, window: bytes) -> bool:
        word = int.from_bytes(window[:4], "little")
        if (word & self.mask) != self.value:
            return False
        return self.allowed is None or ((word >> self.op_field.lo) & self.op_field.mask) in self.allowed


@functools.cache
def _module(arch_generation: str) -> Any:
    return importlib.import_module(f"tinygrad.runtime.autogen.amd.{arch_generation}.ins")


@functools.cache
def _operands(arch_generation: str) -> Any:
    return importlib.import_module(f"tinygrad.runtime.autogen.amd.{arch_generation}.operands").OPERANDS


@functools.cache
def _layouts(arch_generation: str) -> list[_Layout]:
    module = _module(arch_generation)
    return [_Layout(name, getattr(module, name)) for name in _FORMATS[arch_generation] if hasattr(module, name)]


@functools.cache
def _variant_layout(arch_generation: str, name: str) -> _Layout | None:
    cls = getattr(_module(arch_generation), name, None)
    return None if cls is None else _Layout(name, cls)


def _build(layout: _Layout, window: bytes, arch_generation: str) -> Instruction | None:
    variant = "LIT" if layout.name.endswith("_LIT") else ""
    fields = _fields(layout, window)
    if fields is None:
        return None
    if not variant and (variant := _variant(layout.name, fields)):
        # VOP3_SDST and VOP1_SDST differ from VOP3 and VOP1 in the kind of register only, not in bits.
        base = layout.name.removesuffix("_SDST")
        extended = _variant_layout(arch_generation, f"{base}_{variant.removesuffix('_FI')}")
        if extended is None:
            return None
        wide = _fields(extended, window)
        if wide is None:
            return None
        fields = {**wide, **({"op": fields["op"]} if "op" in fields else {})}
        size = extended.base_bytes
    else:
        size = layout.base_bytes
    if len(window) < size:
        return None
    name, second = _names(layout, fields)
    base = layout.name.removesuffix("_LIT").removesuffix("_SDST")
    return Instruction(
        address=0,
        raw=window[:size],
        name=name,
        format=_FORMAT_NAMES.get(base, base),
        variant="DPP8" if variant.startswith("DPP8") else variant,
        generation=arch_generation,
        fields={**fields, **({"fi": int(variant == "DPP8_FI")} if variant.startswith("DPP8") else {})},
        operands=_operand_types(layout, fields, arch_generation),
        second=second,
    )


def _variant(name: str, fields: dict[str, int]) -> str:
    sources = [fields[f] for f in ("src0", "ssrc0", "ssrc1", "src1", "src2", "srcx0", "srcy0") if f in fields]
    if name.startswith("VO") and sources:
        if sources[0] == DPP16:
            return "DPP16"
        if sources[0] == DPP8:
            return "DPP8"
        if sources[0] == DPP8_FI:
            return "DPP8_FI"
    if LITERAL in sources or any(_takes_literal(fields, half) for half in ("opx", "opy")):
        return "LIT"
    return ""


# V_DUAL_FMAAK_F32 and V_DUAL_FMAMK_F32 carry a constant whatever their sources are.
_DUAL_WITH_CONSTANT = (1, 2)


def _takes_literal(fields: dict[str, int], half: str) -> bool:
    return fields.get(half, 0) in _DUAL_WITH_CONSTANT


def _fields(layout: _Layout, window: bytes) -> dict[str, int] | None:
    raw = int.from_bytes(window[: layout.base_bytes], "little")
    values: dict[str, int] = {}
    for name, bits in layout.bit_fields:
        value = (raw >> bits.lo) & bits.mask
        kind = type(bits).__name__
        if kind == "VGPRField":
            value += 256
        elif kind == "SBaseField":
            value *= 2
        elif kind == "SRsrcField":
            value *= 4
        elif kind == "VDSTYField":
            # The Y destination has the other parity than X: its lowest bit is not stored.
            value = 256 + ((value << 1) | ((values["vdstx"] & 1) ^ 1))
        values[name] = value
    if "opx" in values and not (values["opx"] in _dual_ops(layout) and values["opy"] in _dual_ops(layout)):
        return None
    return values


def _dual_ops(layout: _Layout) -> dict[int, str]:
    return {m.value: m.name for m in dict(layout.bit_fields)["opx"]._enum}


def _names(layout: _Layout, fields: dict[str, int]) -> tuple[str, str]:
    if "opx" in fields:
        names = _dual_ops(layout)
        return names[fields["opx"]].lower(), names[fields["opy"]].lower()
    name = layout.op_field._enum(fields["op"]).name.lower()
    return name.removesuffix("_e32").removesuffix("_e64"), ""


def _operand_types(layout: _Layout, fields: dict[str, int], arch_generation: str) -> dict[str, tuple[str, int]]:
    if layout.op_field is None:
        return {}
    rows = _operands(arch_generation).get(layout.op_field._enum(fields["op"]), {})
    return {name: (row[0].name, row[1]) for name, row in rows.items()}


@functools.cache
def short_names(arch_generation: str) -> frozenset[str]:
    """Mnemonics that VOP1, VOP2 or VOPC has."""
    names = set()
    for layout in _layouts(arch_generation):
        if layout.name.split("_")[0] in ("VOP1", "VOP2", "VOPC"):
            assert layout.allowed is not None, f"{layout.name} has no op field"
            names |= {m.name.lower().removesuffix("_e32") for m in layout.op_field._enum if m.value in layout.allowed}
    return frozenset(names)
