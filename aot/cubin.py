"""Reading NVIDIA code objects (cubin): target, symbol, arguments and resources.

NVIDIA does not document the format. What is read here was compared with cuobjdump and `ptxas -v` of CUDA 12.9
and 13.4 (the two assemblers of Triton 3.9's wheel): e_flags, `.nv.info` and the sizes of sections.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

EM_CUDA = 190

# Formats of an attribute in .nv.info: no value, one byte, two bytes, or a size and that many bytes.
_EIFMT_NVAL, _EIFMT_BVAL, _EIFMT_HVAL, _EIFMT_SVAL = 1, 2, 3, 4
_EIATTR_FRAME_SIZE = 0x11
_EIATTR_MIN_STACK_SIZE = 0x12
_EIATTR_KPARAM_INFO = 0x17
_EIATTR_REGCOUNT = 0x2F

# Since sm90 the driver's own block of shared memory is counted in the kernel's section, although it lies
# outside the limit that a block is checked against (227 of 228 KiB on sm90) and `ptxas -v` leaves it out.
_RESERVED_SECTION = ".nv.shared.reserved.0"
_RESERVED_BYTES = 1024


class CubinError(ValueError):
    """The bytes are not a cubin that we can read; the message says what is wrong."""


@dataclass(frozen=True, slots=True)
class CubinKernel:
    """One kernel of a cubin."""

    arch: str  # "sm90"
    symbol: str
    code_bytes: int
    registers: int  # per thread
    local_bytes: int  # per thread, in memory: where spilled registers go
    static_shared_bytes: int
    argument_bytes: tuple[int, ...]


def read_cubin(data: bytes, symbol: str) -> CubinKernel:
    """Read the kernel `symbol`.

    Raises
    ------
    CubinError : not a cubin, or no such kernel in it
    """
    try:
        elf = ELFFile(io.BytesIO(data))
    except ELFError as error:
        raise CubinError(f"not an ELF file ({error})") from None
    if elf.header.e_machine not in ("EM_CUDA", EM_CUDA):
        raise CubinError(f"ELF machine is {elf.header.e_machine}, not CUDA")
    ends = [s["sh_offset"] + s["sh_size"] for s in elf.iter_sections() if s["sh_type"] != "SHT_NOBITS"]
    ends += [s["p_offset"] + s["p_filesz"] for s in elf.iter_segments()]
    if max(ends, default=0) > len(data):
        raise CubinError(f"cut short: {len(data)} bytes, its last part ends at {max(ends)}")
    table = elf.get_section_by_name(".symtab")
    names = [entry.name for entry in table.iter_symbols()] if isinstance(table, SymbolTableSection) else []
    text = elf.get_section_by_name(f".text.{symbol}")
    if symbol not in names or text is None:
        raise CubinError(f"no kernel {symbol!r}; symbols: {', '.join(name for name in names if name)}")
    index = names.index(symbol)
    shared = elf.get_section_by_name(f".nv.shared.{symbol}")
    shared_bytes = 0 if shared is None else shared["sh_size"]
    if elf.get_section_by_name(_RESERVED_SECTION) is not None:
        shared_bytes = max(0, shared_bytes - _RESERVED_BYTES)
    registers = local_bytes = 0
    for attribute, value in _attributes(elf, ".nv.info"):
        if attribute not in (_EIATTR_REGCOUNT, _EIATTR_FRAME_SIZE, _EIATTR_MIN_STACK_SIZE):
            continue
        function, number = struct.unpack_from("<II", value)
        if function != index:
            continue
        if attribute == _EIATTR_REGCOUNT:
            registers = number
        else:
            local_bytes = max(local_bytes, number)
    if not registers:
        raise CubinError(f"no register count for {symbol!r}")
    return CubinKernel(
        arch=_arch(elf),
        symbol=symbol,
        code_bytes=text["sh_size"],
        registers=registers,
        local_bytes=local_bytes,
        static_shared_bytes=shared_bytes,
        argument_bytes=tuple(size for _, size in sorted(_arguments(elf, symbol))),
    )


def _arch(elf: ELFFile) -> str:
    """The arch in e_flags: the low byte up to ABI version 7, the second byte from 8 on."""
    flags = elf.header.e_flags
    number = flags & 0xFF if elf.header.e_ident.EI_ABIVERSION < 8 else flags >> 8 & 0xFF
    return f"sm{number}"


def _arguments(elf: ELFFile, symbol: str) -> Iterator[tuple[int, int]]:
    """(ordinal, bytes) of each argument, in no order."""
    for attribute, value in _attributes(elf, f".nv.info.{symbol}"):
        if attribute == _EIATTR_KPARAM_INFO:
            _, ordinal, _, packed = struct.unpack("<IHHI", value)
            yield ordinal, packed >> 18


def _attributes(elf: ELFFile, section: str) -> Iterator[tuple[int, bytes]]:
    info = elf.get_section_by_name(section)
    data = b"" if info is None else info.data()
    at = 0
    while at + 4 <= len(data):
        form, attribute = data[at], data[at + 1]
        size = struct.unpack_from("<H", data, at + 2)[0] if form == _EIFMT_SVAL else 0
        if form not in (_EIFMT_NVAL, _EIFMT_BVAL, _EIFMT_HVAL, _EIFMT_SVAL) or at + 4 + size > len(data):
            raise CubinError(f"{section}: unknown attribute format {form} at byte {at}")
        yield attribute, data[at + 4 : at + 4 + size]
        at += 4 + size
