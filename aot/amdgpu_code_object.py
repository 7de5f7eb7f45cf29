"""Reading AMD code objects (hsaco): what the build writes into a manifest, and what the emulator loads.

Sources: LLVM, "User Guide for AMDGPU Backend" (ELF header flags, kernel descriptor, metadata note of code
object version 5 and 6). Nothing here depends on a GPU or on the emulator.
"""

from __future__ import annotations

import io
import struct
from dataclasses import dataclass, field
from typing import Any

import msgpack
from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection
from elftools.elf.segments import NoteSegment

EM_AMDGPU = 224
NT_AMDGPU_METADATA = 32

# EF_AMDGPU_MACH: the low byte of e_flags names the processor.
MACHINES = {
    0x03F: "gfx90a",
    0x041: "gfx1100",
    0x043: "gfx1150",
    0x044: "gfx1103",
    0x046: "gfx1101",
    0x047: "gfx1102",
    0x048: "gfx1200",
    0x04A: "gfx1151",
    0x04C: "gfx942",
    0x04E: "gfx1201",
    0x054: "gfx11-generic",
    0x055: "gfx1152",
    0x058: "gfx1153",
    0x059: "gfx12-generic",
}


class CodeObjectError(ValueError):
    """The bytes are not a code object that we can read; the message says what is wrong."""


@dataclass(frozen=True)
class KernelArgument:
    """One entry of the kernarg segment, as the metadata note lists it."""

    offset: int
    size: int
    value_kind: str  # "by_value", "global_buffer", "hidden_block_count_x", ...
    name: str = ""

    @property
    def is_hidden(self) -> bool:
        return self.value_kind.startswith("hidden_")


@dataclass(frozen=True)
class KernelDescriptor:
    """The 64 bytes from which the command processor starts a wave."""

    group_segment_bytes: int
    private_segment_bytes: int
    kernarg_bytes: int
    entry_offset: int  # from the descriptor's own address to the first instruction
    rsrc1: int
    rsrc2: int
    rsrc3: int
    properties: int
    kernarg_preload: int

    @classmethod
    def parse(cls, raw: bytes) -> KernelDescriptor:
        group, private, kernarg = struct.unpack_from("<III", raw, 0)
        (entry,) = struct.unpack_from("<q", raw, 16)
        rsrc3, rsrc1, rsrc2 = struct.unpack_from("<III", raw, 44)
        properties, preload = struct.unpack_from("<HH", raw, 56)
        return cls(group, private, kernarg, entry, rsrc1, rsrc2, rsrc3, properties, preload)

    def _bits(self, word: int, low: int, count: int) -> int:
        return (word >> low) & ((1 << count) - 1)

    @property
    def wave32(self) -> bool:
        return bool(self.properties & (1 << 10))

    @property
    def vgprs(self) -> int:
        """VGPRs the wave may name: granules of 8 in wave32 (4 in wave64)."""
        return (self._bits(self.rsrc1, 0, 6) + 1) * (8 if self.wave32 else 4)

    @property
    def float_mode(self) -> int:
        """The MODE register's low byte: round 32 (2 bits), round 16/64, denorm 32, denorm 16/64."""
        return self._bits(self.rsrc1, 12, 8)

    @property
    def dx10_clamp(self) -> bool:
        """Clamp turns NaN into 0 (gfx11; always so on gfx12)."""
        return bool(self._bits(self.rsrc1, 21, 1))

    @property
    def ieee_mode(self) -> bool:
        """Signalling NaNs are quieted by min, max and the like (gfx11; gfx12 has no such bit)."""
        return bool(self._bits(self.rsrc1, 23, 1))

    @property
    def fp16_overflow(self) -> bool:
        """Conversions to f16 clamp to the largest finite value instead of giving infinity."""
        return bool(self._bits(self.rsrc1, 26, 1))

    @property
    def user_sgprs(self) -> int:
        return self._bits(self.rsrc2, 1, 5)

    @property
    def workgroup_id_enabled(self) -> tuple[bool, bool, bool]:
        return tuple(bool(self._bits(self.rsrc2, 7 + axis, 1)) for axis in range(3))  # type: ignore[return-value]

    @property
    def workgroup_info_enabled(self) -> bool:
        return bool(self._bits(self.rsrc2, 10, 1))

    @property
    def workitem_id_axes(self) -> int:
        """1, 2 or 3: how many of x, y, z the hardware packs into v0."""
        return self._bits(self.rsrc2, 11, 2) + 1

    def user_sgpr_layout(self) -> list[tuple[str, int]]:
        """User SGPRs in order: (what, how many registers)."""
        order = [
            ("private_segment_buffer", 4, 0),
            ("dispatch_ptr", 2, 1),
            ("queue_ptr", 2, 2),
            ("kernarg_segment_ptr", 2, 3),
            ("dispatch_id", 2, 4),
            ("flat_scratch_init", 2, 5),
            ("private_segment_size", 1, 6),
        ]
        return [(what, count) for what, count, bit in order if self.properties & (1 << bit)]


@dataclass(frozen=True)
class KernelInfo:
    """One kernel: its symbol, resources and arguments."""

    name: str
    descriptor: KernelDescriptor
    descriptor_address: int
    code_bytes: int  # size of the symbol; 0 when the symbol table does not say
    vgpr_count: int
    sgpr_count: int
    vgpr_spills: int
    sgpr_spills: int
    group_segment_bytes: int
    private_segment_bytes: int
    kernarg_bytes: int
    kernarg_align: int
    wavefront_size: int
    max_threads: int
    uses_dynamic_stack: bool
    args: tuple[KernelArgument, ...]

    @property
    def entry_address(self) -> int:
        return self.descriptor_address + self.descriptor.entry_offset

    @property
    def explicit_args(self) -> tuple[KernelArgument, ...]:
        return tuple(a for a in self.args if not a.is_hidden)

    @property
    def hidden_args(self) -> tuple[KernelArgument, ...]:
        return tuple(a for a in self.args if a.is_hidden)


@dataclass(frozen=True)
class Segment:
    """A loadable piece of the file: `data` goes to `address`, the rest of `memory_bytes` is zero."""

    address: int
    memory_bytes: int
    data: bytes
    executable: bool


@dataclass(frozen=True)
class CodeObject:
    """A parsed hsaco."""

    arch: str
    target_id: str  # as the metadata note spells it
    segments: tuple[Segment, ...]
    kernels: dict[str, KernelInfo]
    text_address: int
    text: bytes
    metadata: dict[str, Any] = field(repr=False, compare=False)

    @classmethod
    def parse(cls, data: bytes) -> CodeObject:
        """Read a code object; CodeObjectError if it is not one for an AMD GPU we know."""
        try:
            elf = ELFFile(io.BytesIO(data))
        except ELFError as error:
            raise CodeObjectError(f"not an ELF file ({error}); a code object is an hsaco as lld writes it") from error
        if elf.header.e_machine not in ("EM_AMDGPU", EM_AMDGPU):
            raise CodeObjectError(f"ELF machine is {elf.header.e_machine}, not AMDGPU")
        machine = elf.header.e_flags & 0xFF
        if machine not in MACHINES:
            raise CodeObjectError(f"unknown AMDGPU machine number {machine:#x} in e_flags {elf.header.e_flags:#x}")

        segments = tuple(
            Segment(s.header.p_vaddr, s.header.p_memsz, s.data(), bool(s.header.p_flags & 1))
            for s in elf.iter_segments("PT_LOAD")
        )
        text = elf.get_section_by_name(".text")
        if text is None:
            raise CodeObjectError("no .text section")
        metadata = _metadata(elf)
        image = _Image(segments)
        kernels = {}
        symbols = _symbols(elf)
        for row in metadata.get("amdhsa.kernels", []):
            kernels[row[".name"]] = _kernel(row, symbols, image)
        return cls(
            arch=MACHINES[machine],
            target_id=metadata.get("amdhsa.target", ""),
            segments=segments,
            kernels=kernels,
            text_address=text.header.sh_addr,
            text=text.data(),
            metadata=metadata,
        )

    def kernel(self, name: str) -> KernelInfo:
        if name not in self.kernels:
            raise CodeObjectError(f"no kernel {name!r} in this {self.arch} code object; it has {sorted(self.kernels)}")
        return self.kernels[name]


class _Image:
    """Bytes by virtual address."""

    def __init__(self, segments: tuple[Segment, ...]):
        self.segments = segments

    def read(self, address: int, count: int) -> bytes:
        for segment in self.segments:
            start = address - segment.address
            if start >= 0 and start + count <= len(segment.data):
                return segment.data[start : start + count]
        raise CodeObjectError(f"{count} bytes at {address:#x} lie in no segment of the file")


def _metadata(elf: ELFFile) -> dict[str, Any]:
    for segment in elf.iter_segments("PT_NOTE"):
        assert isinstance(segment, NoteSegment)
        for note in segment.iter_notes():
            if note["n_name"] == "AMDGPU" and note["n_type"] in (NT_AMDGPU_METADATA, "NT_AMDGPU_METADATA"):
                description = note["n_desc"]
                raw = description if isinstance(description, bytes) else description.encode("latin-1")
                return msgpack.unpackb(raw)
    raise CodeObjectError("no AMDGPU metadata note")


def _symbols(elf: ELFFile) -> dict[str, tuple[int, int]]:
    """Symbol name -> (address, size). The dynamic table is what a loader sees; it survives stripping."""
    table = elf.get_section_by_name(".dynsym") or elf.get_section_by_name(".symtab")
    if not isinstance(table, SymbolTableSection):
        raise CodeObjectError("no symbol table")
    return {s.name: (s.entry.st_value, s.entry.st_size) for s in table.iter_symbols() if s.name}


def _kernel(row: dict[str, Any], symbols: dict[str, tuple[int, int]], image: _Image) -> KernelInfo:
    name, descriptor_symbol = row[".name"], row[".symbol"]
    if descriptor_symbol not in symbols:
        raise CodeObjectError(f"metadata names descriptor {descriptor_symbol!r}, the symbol table does not have it")
    address, _ = symbols[descriptor_symbol]
    descriptor = KernelDescriptor.parse(image.read(address, 64))
    args = tuple(
        KernelArgument(a[".offset"], a[".size"], a[".value_kind"], a.get(".name", "")) for a in row.get(".args", [])
    )
    return KernelInfo(
        name=name,
        descriptor=descriptor,
        descriptor_address=address,
        code_bytes=symbols.get(name, (0, 0))[1],
        vgpr_count=row[".vgpr_count"],
        sgpr_count=row[".sgpr_count"],
        vgpr_spills=row.get(".vgpr_spill_count", 0),
        sgpr_spills=row.get(".sgpr_spill_count", 0),
        group_segment_bytes=row[".group_segment_fixed_size"],
        private_segment_bytes=row[".private_segment_fixed_size"],
        kernarg_bytes=row[".kernarg_segment_size"],
        kernarg_align=row[".kernarg_segment_align"],
        wavefront_size=row[".wavefront_size"],
        max_threads=row[".max_flat_workgroup_size"],
        uses_dynamic_stack=row.get(".uses_dynamic_stack", False),
        args=args,
    )
