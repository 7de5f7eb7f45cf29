"""Source operands, resolved when an instruction is compiled: what remains at run time is one list index or a
constant.

A source is read as bit patterns or integers of one of these kinds:

    b32 u32 f32  uint32       i32  int32
    b16 u16 f16 bf16  uint16  i16  int16
    b64 u64  uint64           i64  int64        f64  float64
    mask  bool [waves, 32], a scalar register read as one bit per lane

(f32, f16 and bf16 are bit patterns, as `float_formats` takes them)

in the shape [waves, 32], or one that broadcasts to it ([waves, 1] for a scalar register, () for a constant).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .decode import LITERAL, Instruction
from .errors import RegisterError, UnimplementedInstruction
from .float_formats import source_modifiers
from .waves import ALL_BITS, NULL, SCALARS, SCC, VECTOR, Waves, lanes_of

Reader = Callable[[Waves], np.ndarray]

_FLOATS = (0.5, -0.5, 1.0, -1.0, 2.0, -2.0, 4.0, -4.0)
_INVERSE_2PI = {"f32": 0x3E22F983, "f16": 0x3118, "bf16": 0x3E23, "f64": 0x3FC45F306DC9C882}
BITS = {
    **dict.fromkeys(("b32", "u32", "i32", "f32"), 32),
    **dict.fromkeys(("b16", "u16", "i16", "f16", "bf16"), 16),
    **dict.fromkeys(("b64", "u64", "i64", "f64"), 64),
    "mask": 1,
}
_TYPES = {"i32": np.int32, "i16": np.int16, "i64": np.int64, "f64": np.float64}
FLOAT_KINDS = ("f32", "f16", "bf16", "f64")


@dataclass(frozen=True)
class Source:
    """A resolved operand."""

    read: Reader
    kind: str
    registers: tuple[int, ...]  # whose shadows matter
    poison: Callable[[Waves], np.ndarray | None]  # undefined bits in the frame of the value; None when all defined

    @property
    def constant(self) -> bool:
        return not self.registers


def constant_bits(code: int, kind: str, literal: int | None) -> int | None:
    """Bits of an inline or literal constant read as `kind`; None if `code` names a register."""
    width = BITS[kind]
    if code == LITERAL:
        if literal is None:
            raise UnimplementedInstruction("operand asks for a literal that the encoding does not carry")
        if width == 16:
            return literal & 0xFFFF
        if kind == "f64":
            return literal << 32
        if kind == "i64" and literal & 0x80000000:
            return literal | 0xFFFFFFFF00000000
        return literal
    if 128 <= code <= 208:
        value = code - 128 if code <= 192 else 192 - code
        return value & ((1 << width) - 1)
    if 240 <= code <= 248:
        if kind in ("b16", "u16", "i16"):
            raise UnimplementedInstruction(f"a float constant as a 16-bit integer operand (code {code})")
        form = kind if kind in FLOAT_KINDS else f"f{width}"
        if code == 248:
            return _INVERSE_2PI[form]
        return _float_bits(_FLOATS[code - 240], form)
    if SCALARS <= code < VECTOR and code != SCC:
        raise UnimplementedInstruction(f"source operand code {code}")
    return None


def _float_bits(value: float, form: str) -> int:
    if form == "bf16":
        return int(np.float32(value).view(np.uint32)) >> 16
    types: dict[str, tuple[type[np.floating], type[np.unsignedinteger]]] = {
        "f16": (np.float16, np.uint16),
        "f32": (np.float32, np.uint32),
        "f64": (np.float64, np.uint64),
    }
    dtype, raw = types[form]
    return int(np.array(value, dtype).view(raw))


def source(
    code: int,
    kind: str,
    instruction: Instruction,
    limits: RegisterLimits,
    *,
    scalar: bool = False,
    high: bool = False,
    absolute: bool = False,
    negate: bool = False,
) -> Source:
    """Resolve operand `code`.

    Parameters
    ----------
    scalar : for the scalar ALU: scalar registers are read as [waves], not as a column
    high : take bits 31:16, for 16-bit kinds
    absolute, negate : the float modifiers, applied in this order
    """
    width = BITS[kind]
    bits = None if kind == "mask" else constant_bits(code, kind, instruction.literal)
    if bits is not None:
        if high and code != LITERAL:
            bits = 0 if bits < 0x8000 or code >= 240 else 0xFFFF  # the constant is a 32-bit value
        elif high:
            bits = (instruction.literal or 0) >> 16
        value = np.array(bits, {16: np.uint16, 32: np.uint32, 64: np.uint64}[width])
        value = _modified(value.reshape(1), kind, absolute, negate).reshape(())
        value = value.view(_TYPES[kind]) if kind in _TYPES else value
        return Source(lambda st: value, kind, (), lambda st: None)
    if code < VECTOR:
        read = _scalar_reader(code, kind, high, scalar)
    else:
        limits.check_vector(code, 2 if width == 64 else 1)
        read = _vector_reader(code - VECTOR, kind, high)
    if absolute or negate:
        plain = read
        read = lambda st: _modified(plain(st), kind, absolute, negate)  # noqa: E731
    if kind in _TYPES:
        bit_reader, dtype = read, _TYPES[kind]
        read = lambda st: bit_reader(st).view(dtype)  # noqa: E731
    registers: tuple[int, ...] = (code, code + 1) if width == 64 else (code,)
    if code == NULL:
        registers = ()
    return Source(read, kind, registers, _poison_reader(registers, width, high, scalar, kind))


def mask_source(code: int) -> Source:
    """A scalar register as one bit per lane."""
    if code >= SCALARS:
        raise UnimplementedInstruction(f"lane mask from operand code {code}")

    def poison(st: Waves) -> np.ndarray | None:
        shadow = st.shadow[code]
        return None if shadow is None else lanes_of(shadow)

    return Source(lambda st: lanes_of(st.s[code]), "mask", (code,), poison)


@dataclass(frozen=True)
class RegisterLimits:
    """How many vector registers the kernel descriptor allocates."""

    vgprs: int

    def check_vector(self, code: int, count: int) -> None:
        if code - VECTOR + count > self.vgprs:
            raise RegisterError(f"v{code - VECTOR + count - 1} is beyond the {self.vgprs} VGPRs of the kernel")


def _modified(value: np.ndarray, kind: str, absolute: bool, negate: bool) -> np.ndarray:
    if not (absolute or negate):
        return value
    if kind == "f64":
        sign = np.uint64(1 << 63)
        value = value & ~sign if absolute else value
        return value ^ sign if negate else value
    return source_modifiers(value, absolute, negate)


def _scalar_reader(code: int, kind: str, high: bool, scalar: bool) -> Reader:
    width = BITS[kind]
    if code == SCC:
        return (lambda st: st.scc.astype(np.uint32)) if scalar else (lambda st: st.scc.astype(np.uint32)[:, None])
    if width == 32:
        return (lambda st: st.s[code]) if scalar else (lambda st: st.s_column[code])
    if width == 16:
        shift = np.uint32(16 if high else 0)
        if scalar:
            return lambda st: (st.s[code] >> shift).astype(np.uint16)
        return lambda st: (st.s_column[code] >> shift).astype(np.uint16)
    if code == NULL:
        return lambda st: np.zeros(1, np.uint64)
    wide = np.uint64(32)
    if scalar:
        return lambda st: st.s[code] | st.s[code + 1].astype(np.uint64) << wide
    return lambda st: st.s_column[code] | st.s_column[code + 1].astype(np.uint64) << wide


def _vector_reader(index: int, kind: str, high: bool) -> Reader:
    width = BITS[kind]
    if width == 32:
        return lambda st: st.v[index]
    if width == 16:
        return (lambda st: st.high[index]) if high else (lambda st: st.low[index])
    wide = np.uint64(32)
    return lambda st: st.v[index] | st.v[index + 1].astype(np.uint64) << wide


def _poison_reader(registers: tuple[int, ...], width: int, high: bool, scalar: bool, kind: str) -> Callable:
    column = not scalar

    def shaped(st: Waves, n: int) -> np.ndarray | None:
        shadow = st.shadow[n]
        return shadow[:, None] if shadow is not None and n < VECTOR and column else shadow

    if not registers:
        return lambda st: None
    if width == 64:

        def wide(st: Waves) -> np.ndarray | None:
            low, top = shaped(st, registers[0]), shaped(st, registers[1])
            bits = None if low is None else low.astype(np.uint64)
            if top is None:
                return bits
            above = top.astype(np.uint64) << np.uint64(32)
            return above if bits is None else bits | above

        return wide
    if width == 16:
        shift = np.uint32(16 if high else 0)

        def half(st: Waves) -> np.ndarray | None:
            shadow = shaped(st, registers[0])
            if shadow is None:
                return None
            bits = shadow >> shift & np.uint32(0xFFFF)
            return bits if bits.any() else None

        return half
    return lambda st: shaped(st, registers[0])


def any_undefined(bits: np.ndarray | None) -> np.ndarray | None:
    """Undefined bits to all-or-nothing per lane, as uint32: what an operation gives that mixes bits."""
    return None if bits is None else np.where(bits != 0, ALL_BITS, np.uint32(0))
