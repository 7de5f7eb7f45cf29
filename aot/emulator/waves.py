"""The registers of a group of waves that stand at one program counter.

A vector register is uint32 [waves, 32], a scalar one uint32 [waves]. Every instruction runs on the whole
group; waves that branch apart are split into groups of their own, and joined when they meet again.

Uninitialised values. `shadow[n]` belongs to register n (0-127 scalar, 256 and up vector): None when every bit
of it is defined, else a mask of its shape with a 1 for every undefined bit. Almost all registers are None
almost always, so the tracking costs one comparison per operand. Values flow through the ALU with their
shadows; what is an error is a decision taken on an undefined bit: an address, a branch, an exec mask, a value
stored to memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .errors import UninitialisedRead

if TYPE_CHECKING:
    from .decode import Instruction
    from .machine import Machine

LANES = 32
VCC, NULL, M0, EXEC, EXEC_HI, SCC = 106, 124, 125, 126, 127, 253
SCALARS = 128
VECTOR = 256  # number of v0 in the operand encoding
ALL_BITS = np.uint32(0xFFFFFFFF)


def lanes_of(masks: np.ndarray) -> np.ndarray:
    """uint32 [waves] to bool [waves, 32]."""
    raw = np.ascontiguousarray(masks).view(np.uint8).reshape(-1, 4)
    return np.unpackbits(raw, axis=1, bitorder="little").view(bool)


def masks_of(lanes: np.ndarray) -> np.ndarray:
    """bool [waves, 32] to uint32 [waves]."""
    return np.packbits(lanes, axis=1, bitorder="little").view(np.uint32)[:, 0]


class Waves:
    """State of `count` waves. `block` and `wave` say which wave of which block each of them is."""

    def __init__(
        self,
        machine: Machine,
        vgprs: int,
        block: np.ndarray,
        wave: np.ndarray,
        *,
        pc: int,
        mode: int,
        scratch_bytes: int,
    ):
        count = block.size
        self.machine = machine
        self.block, self.wave = block, wave
        self.pc, self.mode = pc, mode
        self.rank = 0  # place in a serial schedule
        self.barrier: Instruction | None = None  # that the group waits at
        self.vgpr = np.empty((vgprs, count, LANES), np.uint32)
        self.sgpr = np.empty((SCALARS, count), np.uint32)
        self.scc = np.zeros(count, bool)
        self.shadow: list[np.ndarray | None] = [None] * (VECTOR + vgprs)
        undefined_scalar, undefined_vector = np.full(count, ALL_BITS), np.full((count, LANES), ALL_BITS)
        for n in range(SCALARS):
            self.shadow[n] = undefined_scalar
        for n in (NULL, EXEC_HI):
            self.shadow[n] = None
            self.sgpr[n] = 0
        for n in range(vgprs):
            self.shadow[VECTOR + n] = undefined_vector
        self.vgpr.fill(0xCDCDCDCD)
        self.sgpr[:NULL].fill(0xCDCDCDCD)
        self.scratch = np.zeros((count, LANES, scratch_bytes), np.uint8) if scratch_bytes else None
        self.scratch_undefined = np.ones((count, LANES, scratch_bytes), bool) if scratch_bytes else None
        self._bind()

    def _bind(self) -> None:
        """Make the per-register views that instructions use."""
        self.count = self.block.size
        self.lds_base = ((self.block - self.machine.first_block) * self.machine.lds_stride)[:, None]
        self.v = list(self.vgpr)
        halves = self.vgpr.view(np.uint16).reshape(*self.vgpr.shape, 2)
        self.low = list(halves[..., 0])
        self.high = list(halves[..., 1])
        self.s = list(self.sgpr)
        self.s_column = list(self.sgpr[:, :, None])
        self._exec_known = False
        self._mask: np.ndarray | None = None

    # -- exec --------------------------------------------------------------------------------------------

    def exec_written(self) -> None:
        self._exec_known = False

    @property
    def mask(self) -> np.ndarray | None:
        """Active lanes, bool [waves, 32]; None when all are, so that writes need no mask."""
        if not self._exec_known:
            masks = self.sgpr[EXEC]
            self._mask = None if (masks == ALL_BITS).all() else lanes_of(masks)
            self._exec_known = True
        return self._mask

    @property
    def lanes(self) -> np.ndarray:
        """Active lanes as an array, always."""
        mask = self.mask
        return np.ones((self.count, LANES), bool) if mask is None else mask

    # -- shadows -----------------------------------------------------------------------------------------

    def set_shadow(
        self, n: int, bits: np.ndarray | None, lanes: np.ndarray | None, written: np.uint32 = ALL_BITS
    ) -> None:
        """Vector register `n` got a value whose undefined bits are `bits`, in `lanes` (None: all), bits
        `written`."""
        old = self.shadow[n]
        if old is None and bits is None:
            return
        if lanes is None and written == ALL_BITS:
            self.shadow[n] = None if bits is None or not bits.any() else np.broadcast_to(bits, (self.count, LANES))
            return
        before = np.uint32(0) if old is None else old
        after = np.broadcast_to(
            (before & ~written) | ((np.uint32(0) if bits is None else bits) & written), (self.count, LANES)
        )
        if lanes is not None:
            after = np.where(lanes, after, before)
        self.shadow[n] = after if after.any() else None

    def require_defined_lanes(
        self, n: int, what: str, lanes: np.ndarray | None = None, bits: np.uint32 = ALL_BITS
    ) -> None:
        """UninitialisedRead if vector register `n` has an undefined bit in an active lane."""
        shadow = self.shadow[n]
        if shadow is None:
            return
        if n < VECTOR:
            self.require_defined(n, what)
            return
        bad = (shadow & bits) != 0
        mask = self.mask if lanes is None else lanes
        if mask is not None:
            bad = bad & mask
        if bad.any():
            wave, lane = (int(i) for i in np.argwhere(bad)[0])
            raise UninitialisedRead(
                f"{what} v{n - VECTOR} was never written (undefined bits {int(shadow[wave, lane] & bits):#010x})",
                block=int(self.block[wave]),
                wave=int(self.wave[wave]),
                lane=lane,
            )

    def require_defined(self, n: int, what: str) -> None:
        """UninitialisedRead if scalar register `n` has an undefined bit."""
        shadow = self.shadow[n]
        if shadow is not None and shadow.any():
            wave = int(np.flatnonzero(shadow)[0])
            raise UninitialisedRead(
                f"{what} {scalar_name(n)} was never written (undefined bits {int(shadow[wave]):#010x})",
                block=int(self.block[wave]),
                wave=int(self.wave[wave]),
            )

    # -- groups ------------------------------------------------------------------------------------------

    def take(self, which: np.ndarray) -> Waves:
        """A new group with the waves that `which` selects (bool or index array)."""
        part = object.__new__(Waves)
        part.machine = self.machine
        part.block, part.wave = self.block[which], self.wave[which]
        part.pc, part.mode, part.rank, part.barrier = self.pc, self.mode, self.rank, self.barrier
        part.vgpr = np.ascontiguousarray(self.vgpr[:, which])
        part.sgpr = np.ascontiguousarray(self.sgpr[:, which])
        part.scc = self.scc[which]
        part.shadow = [_reduced(None if s is None else s[which]) for s in self.shadow]
        part.scratch = None if self.scratch is None else self.scratch[which]
        part.scratch_undefined = None if self.scratch_undefined is None else self.scratch_undefined[which]
        part._bind()
        return part

    @staticmethod
    def join(groups: list[Waves]) -> Waves:
        """One group out of several that stand at the same place."""
        first = groups[0]
        whole = object.__new__(Waves)
        whole.machine = first.machine
        whole.block = np.concatenate([g.block for g in groups])
        whole.wave = np.concatenate([g.wave for g in groups])
        whole.pc, whole.mode, whole.rank, whole.barrier = first.pc, first.mode, first.rank, first.barrier
        whole.vgpr = np.concatenate([g.vgpr for g in groups], axis=1)
        whole.sgpr = np.concatenate([g.sgpr for g in groups], axis=1)
        whole.scc = np.concatenate([g.scc for g in groups])
        whole.shadow = []
        for rows in zip(*(g.shadow for g in groups), strict=False):
            if all(row is None for row in rows):
                whole.shadow.append(None)
                continue
            shape = next(row.shape[1:] for row in rows if row is not None)
            parts = [
                np.zeros((g.count, *shape), np.uint32) if row is None else row
                for g, row in zip(groups, rows, strict=False)
            ]
            whole.shadow.append(np.concatenate(parts))
        whole.scratch = None if first.scratch is None else np.concatenate([g.scratch for g in groups])
        whole.scratch_undefined = (
            None if first.scratch_undefined is None else np.concatenate([g.scratch_undefined for g in groups])
        )
        whole._bind()
        return whole


def _reduced(shadow: np.ndarray | None) -> np.ndarray | None:
    return None if shadow is None or not shadow.any() else shadow


def scalar_name(n: int) -> str:
    """s5, vcc_lo, ttmp9, ..."""
    special = {VCC: "vcc_lo", 107: "vcc_hi", NULL: "null", M0: "m0", EXEC: "exec_lo", EXEC_HI: "exec_hi"}
    if n in special:
        return special[n]
    return f"ttmp{n - 108}" if 108 <= n < NULL else f"s{n}"
