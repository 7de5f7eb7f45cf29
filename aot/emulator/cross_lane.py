"""Moves between the lanes of a wave32: DPP, permlane, readlane and the LDS crossbar (ds_bpermute, ds_permute,
ds_swizzle).

A register is uint32 [waves, 32], exec is bool [waves, 32]; nothing is modified. Each vector move returns
`Moved`; the caller writes `values` where `write & exec`.

A lane that is switched off still has a register, whose contents the program did not mean to share. What the
hardware does when another lane reads it is defined (zero, no write, or the stale value) and is what these
functions return; but compilers have been seen to emit such reads by mistake, so each move also says which
lanes did it. Only lanes that are themselves on are reported.

Source: AMD's pseudocode (as tinygrad carries it) for permlane, readlane, ds_permute, ds_bpermute and the FFT
mode of ds_swizzle. Not checked against a document or a device: the DPP16 and DPP8 controls and their rules
for missing sources, op_sel of permlane, and the other modes of ds_swizzle.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np

from .errors import UnimplementedInstruction
from .waves import LANES

_LANE = np.arange(LANES)


class Moved(NamedTuple):
    values: np.ndarray  # uint32 [waves, 32]
    write: np.ndarray  # bool [waves, 32]: lanes written, before exec is applied
    read_inactive: np.ndarray  # bool [waves, 32]: lanes on whose source lane is off


# DPP


def dpp16(
    source: np.ndarray,
    exec_mask: np.ndarray,
    dpp_ctrl: int,
    *,
    row_mask: int = 0xF,
    bank_mask: int = 0xF,
    bound_ctrl: bool = False,
    fetch_inactive: bool = False,
) -> Moved:
    """Fetch operand 0 of a DPP16 instruction.

    Parameters
    ----------
    source : uint32 [waves, 32], the register named by src0
    exec_mask : bool [waves, 32]
    dpp_ctrl : 9 bits: quad_perm, row_shl, row_shr, row_ror, row_mirror, row_half_mirror, row_share or row_xmask
    row_mask, bank_mask : a clear bit stops writes to that row of 16 lanes, or to that four of each row
    bound_ctrl : a lane without a source reads 0; otherwise it is not written
    fetch_inactive : a lane that is off is a source like any other; otherwise it counts as none

    Raises
    ------
    UnimplementedInstruction : `dpp_ctrl` is reserved, or a wave shift or row broadcast of gfx9
    """
    lanes, in_row = _dpp16_lanes(dpp_ctrl)
    moved = _fetch(source, exec_mask, lanes, in_row, bound_ctrl, fetch_inactive)
    if row_mask == bank_mask == 0xF:
        return moved
    enabled = _dpp_write_mask(row_mask, bank_mask)
    return Moved(moved.values, moved.write & enabled, moved.read_inactive & enabled)


def dpp8(source: np.ndarray, exec_mask: np.ndarray, lane_select: int, *, fetch_inactive: bool = False) -> Moved:
    """Fetch operand 0 of a DPP8 instruction: `lane_select` holds 3 bits per lane of eight.

    Lanes that are off read as 0 unless `fetch_inactive` (the DPP8FI encoding).
    """
    lanes = (_LANE & ~7) + (lane_select >> 3 * (_LANE & 7) & 7)
    return _fetch(source, exec_mask, lanes, None, True, fetch_inactive)


@cache
def _dpp16_lanes(dpp_ctrl: int) -> tuple[np.ndarray, np.ndarray | None]:
    """Source lane of each lane, and which of them exist (None: all)."""
    row, place, amount = _LANE & ~15, _LANE & 15, dpp_ctrl & 15
    if dpp_ctrl < 0x100:
        return (_LANE & ~3) + (dpp_ctrl >> 2 * (_LANE & 3) & 3), None
    if 0x101 <= dpp_ctrl <= 0x10F:  # row_shl
        return row + (place + amount & 15), place + amount < 16
    if 0x111 <= dpp_ctrl <= 0x11F:  # row_shr
        return row + (place - amount & 15), place >= amount
    if 0x121 <= dpp_ctrl <= 0x12F:  # row_ror
        return row + (place - amount & 15), None
    if dpp_ctrl == 0x140:  # row_mirror
        return row + 15 - place, None
    if dpp_ctrl == 0x141:  # row_half_mirror
        return row + (place ^ 7), None
    if 0x150 <= dpp_ctrl <= 0x15F:  # row_share
        return row + amount, None
    if 0x160 <= dpp_ctrl <= 0x16F:  # row_xmask
        return row + (place ^ amount), None
    raise UnimplementedInstruction(f"dpp_ctrl {dpp_ctrl:#x} is no lane move of gfx11 or gfx12")


@cache
def _dpp_write_mask(row_mask: int, bank_mask: int) -> np.ndarray:
    return ((row_mask >> _LANE // 16 & 1) & (bank_mask >> _LANE % 16 // 4 & 1)).astype(bool)


def _fetch(source, exec_mask, lanes, exists, bound_ctrl, fetch_inactive) -> Moved:
    """Gather `lanes` ([32], or [waves, 32] if they differ by wave) by the rules for missing sources."""
    values = _gather(source, lanes)
    valid = np.ones(values.shape, bool)
    if exists is not None:
        valid &= exists
    if exec_mask.all():
        read_inactive = np.zeros(values.shape, bool)
    else:
        source_on = _gather(exec_mask, lanes)
        read_inactive = exec_mask & valid & ~source_on
        if not fetch_inactive:
            valid &= source_on
    if bound_ctrl:
        return Moved(values * valid, np.ones(values.shape, bool), read_inactive)
    return Moved(values, valid, read_inactive)


def _gather(x, lanes):
    if lanes.ndim == 1:
        return x.take(lanes, 1)
    return x.ravel().take(lanes + LANES * np.arange(x.shape[0])[:, None])


# permlane


def permlane16(
    source: np.ndarray,
    exec_mask: np.ndarray,
    select_low: np.ndarray,
    select_high: np.ndarray,
    *,
    fetch_inactive: bool = False,
    bound_ctrl: bool = False,
) -> Moved:
    """v_permlane16_b32: any lane of the same row of 16.

    Parameters
    ----------
    source : uint32 [waves, 32]
    exec_mask : bool [waves, 32]
    select_low, select_high : uint32 [waves], [waves, 1] or [waves, 32], scalars: 4 bits per lane of a row
    fetch_inactive, bound_ctrl : op_sel[0] and op_sel[1]; they mean what they mean in DPP16
    """
    lanes = (_LANE & 16) + _permlane_select(select_low, select_high)
    return _fetch(source, exec_mask, lanes, None, bound_ctrl, fetch_inactive)


def permlanex16(
    source: np.ndarray,
    exec_mask: np.ndarray,
    select_low: np.ndarray,
    select_high: np.ndarray,
    *,
    fetch_inactive: bool = False,
    bound_ctrl: bool = False,
) -> Moved:
    """v_permlanex16_b32: any lane of the other row of 16; operands as in `permlane16`."""
    lanes = (_LANE & 16 ^ 16) + _permlane_select(select_low, select_high)
    return _fetch(source, exec_mask, lanes, None, bound_ctrl, fetch_inactive)


def permlane16_var(
    source: np.ndarray,
    exec_mask: np.ndarray,
    select: np.ndarray,
    *,
    fetch_inactive: bool = False,
    bound_ctrl: bool = False,
) -> Moved:
    """v_permlane16_var_b32 (gfx12): `permlane16`, each lane naming its source in bits 3:0 of `select`."""
    lanes = (_LANE & 16) + (select & np.uint32(15)).astype(np.intp)
    return _fetch(source, exec_mask, lanes, None, bound_ctrl, fetch_inactive)


def permlanex16_var(
    source: np.ndarray,
    exec_mask: np.ndarray,
    select: np.ndarray,
    *,
    fetch_inactive: bool = False,
    bound_ctrl: bool = False,
) -> Moved:
    """v_permlanex16_var_b32 (gfx12): `permlanex16`, each lane naming its source in bits 3:0 of `select`."""
    lanes = (_LANE & 16 ^ 16) + (select & np.uint32(15)).astype(np.intp)
    return _fetch(source, exec_mask, lanes, None, bound_ctrl, fetch_inactive)


def _permlane_select(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Lane within the row, [waves, 32], from the two scalars: lanes 0-7 in `low`, 8-15 in `high`."""
    waves = low.shape[0]
    words = np.stack([low.reshape(waves, -1)[:, 0], high.reshape(waves, -1)[:, 0]], 1)  # [waves, 2]
    shift = (4 * (_LANE & 7)).astype(np.uint32)
    return (words[:, _LANE >> 3 & 1] >> shift & np.uint32(15)).astype(np.intp)


# readlane, writelane


def readlane(source: np.ndarray, exec_mask: np.ndarray, lane: np.ndarray | int) -> tuple[np.ndarray, np.ndarray]:
    """v_readlane_b32: uint32 [waves], and bool [waves]: the lane was off.

    `lane` is taken modulo 32; one number or [waves].
    """
    index = np.broadcast_to(np.asarray(lane).astype(np.intp) & 31, source.shape[0])
    waves = np.arange(source.shape[0])
    return source[waves, index], ~exec_mask[waves, index]


def readfirstlane(source: np.ndarray, exec_mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """v_readfirstlane_b32: uint32 [waves] of the first lane on; bool [waves]: none is, lane 0 was read."""
    index = exec_mask.argmax(1)
    waves = np.arange(source.shape[0])
    return source[waves, index], ~exec_mask[waves, index]


def writelane(destination: np.ndarray, value: np.ndarray | int, lane: np.ndarray | int) -> np.ndarray:
    """v_writelane_b32: `destination` with one lane replaced, whatever exec says. `lane` as in `readlane`."""
    index = np.broadcast_to(np.asarray(lane).astype(np.intp) & 31, destination.shape[0])
    result = destination.copy()
    result[np.arange(destination.shape[0]), index] = value
    return result


# The LDS crossbar


def ds_bpermute(address: np.ndarray, data: np.ndarray, exec_mask: np.ndarray, offset: int = 0) -> Moved:
    """ds_bpermute_b32: each lane pulls `data` of lane (address + offset) / 4 modulo 32; 0 if that is off."""
    lanes = (address + np.uint32(offset) >> np.uint32(2) & np.uint32(31)).astype(np.intp)
    return _fetch(data, exec_mask, lanes, None, True, False)


def ds_permute(address: np.ndarray, data: np.ndarray, exec_mask: np.ndarray, offset: int = 0) -> Moved:
    """ds_permute_b32: each lane that is on pushes `data` to lane (address + offset) / 4 modulo 32.

    The highest-numbered pusher wins; a lane that nobody pushed to gets 0. `read_inactive` marks the lanes
    that only lanes that are off would have pushed to.
    """
    lanes = (address + np.uint32(offset) >> np.uint32(2) & np.uint32(31)).astype(np.intp)
    values = np.zeros_like(data)
    received, addressed = np.zeros(exec_mask.shape, bool), np.zeros(exec_mask.shape, bool)
    waves = np.arange(data.shape[0])
    for lane in range(LANES):  # in rising order, so that the highest wins
        on = exec_mask[:, lane]
        values[waves[on], lanes[on, lane]] = data[on, lane]
        received[waves[on], lanes[on, lane]] = True
        addressed[waves, lanes[:, lane]] = True
    return Moved(values, np.ones(values.shape, bool), exec_mask & addressed & ~received)


def ds_swizzle(data: np.ndarray, exec_mask: np.ndarray, offset: int) -> Moved:
    """ds_swizzle_b32: the pattern that the 16-bit `offset` encodes; a lane whose source is off gets 0."""
    return _fetch(data, exec_mask, _swizzle_lanes(offset), None, True, False)


@cache
def _swizzle_lanes(offset: int) -> np.ndarray:
    if offset >= 0xE000:  # FFT: bit reversal within groups that the mask leaves
        mask = offset & 31
        reversed_lane = np.array([int(f"{lane:05b}"[::-1], 2) for lane in range(LANES)])
        return reversed_lane >> mask.bit_count() | _LANE & mask
    if offset >= 0xC000:  # rotate within groups that the mask leaves
        mask, amount = offset & 31, offset >> 5 & 31
        turned = _LANE - amount if offset & 0x400 else _LANE + amount
        return _LANE & mask | turned & ~mask & 31
    if offset & 0x8000:  # any lane of the same four
        return (_LANE & ~3) + (offset >> 2 * (_LANE & 3) & 3)
    and_mask, or_mask, xor_mask = offset & 31, offset >> 5 & 31, offset >> 10 & 31
    return (_LANE & and_mask | or_mask) ^ xor_mask
