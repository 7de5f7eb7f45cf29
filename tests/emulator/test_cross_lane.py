"""Lane moves against the ISA's tables, written out lane by lane."""

from __future__ import annotations

import numpy as np
import pytest
from gristmill.aot.emulator import cross_lane as cl
from gristmill.aot.emulator.errors import UnimplementedInstruction

LANES = range(32)
WAVES = 3
SOURCE = (np.arange(WAVES)[:, None] * 1000 + np.arange(32)).astype(np.uint32)
ALL_ON = np.ones((WAVES, 32), bool)


def some_off(*lanes):
    mask = ALL_ON.copy()
    mask[:, list(lanes)] = False
    return mask


def assert_reads(moved, source_of):
    """Every lane reads lane `source_of(lane)` of its own wave."""
    expected = SOURCE[:, [source_of(lane) for lane in LANES]]
    np.testing.assert_array_equal(moved.values, expected)
    assert moved.values.dtype == np.uint32
    assert moved.write.all()
    assert not moved.read_inactive.any()


# DPP16


@pytest.mark.parametrize("pattern", [(0, 1, 2, 3), (1, 0, 3, 2), (2, 3, 0, 1), (3, 3, 0, 2)])
def test_quad_perm(pattern):
    ctrl = sum(lane << 2 * i for i, lane in enumerate(pattern))
    assert_reads(cl.dpp16(SOURCE, ALL_ON, ctrl), lambda lane: lane // 4 * 4 + pattern[lane % 4])


@pytest.mark.parametrize("n", [1, 4, 15])
def test_row_ror_takes_the_lane_n_below_around_the_row(n):
    assert_reads(cl.dpp16(SOURCE, ALL_ON, 0x120 + n), lambda lane: lane // 16 * 16 + (lane % 16 - n) % 16)


def test_row_mirrors():
    assert_reads(cl.dpp16(SOURCE, ALL_ON, 0x140), lambda lane: lane // 16 * 16 + 15 - lane % 16)
    assert_reads(cl.dpp16(SOURCE, ALL_ON, 0x141), lambda lane: lane // 8 * 8 + 7 - lane % 8)


@pytest.mark.parametrize("n", [0, 3, 15])
def test_row_share_and_row_xmask(n):
    assert_reads(cl.dpp16(SOURCE, ALL_ON, 0x150 + n), lambda lane: lane // 16 * 16 + n)
    assert_reads(cl.dpp16(SOURCE, ALL_ON, 0x160 + n), lambda lane: lane // 16 * 16 + (lane % 16 ^ n))


@pytest.mark.parametrize("n", [1, 8, 15])
@pytest.mark.parametrize(("base", "step"), [(0x100, 1), (0x110, -1)], ids=["row_shl", "row_shr"])
def test_row_shifts_stop_at_the_row(base, step, n):
    inside = [0 <= lane % 16 + step * n < 16 for lane in LANES]
    zeroed = cl.dpp16(SOURCE, ALL_ON, base + n, bound_ctrl=True)
    kept = cl.dpp16(SOURCE, ALL_ON, base + n)
    for lane in LANES:
        if inside[lane]:
            assert (zeroed.values[:, lane] == SOURCE[:, lane + step * n]).all()
            assert (kept.values[:, lane] == SOURCE[:, lane + step * n]).all()
        else:
            assert (zeroed.values[:, lane] == 0).all()
    assert zeroed.write.all()
    np.testing.assert_array_equal(kept.write, np.broadcast_to(inside, (WAVES, 32)))
    assert not kept.read_inactive.any()  # a lane that does not exist is not a lane that is off


# bound_ctrl, fetch_inactive: what lane 0 gets from lane 1 when lane 1 is off, and whether lane 0 is written
@pytest.mark.parametrize(
    ("bound_ctrl", "fetch_inactive", "value", "written"),
    [(False, False, None, False), (True, False, 0, True), (False, True, 1, True), (True, True, 1, True)],
)
def test_dpp16_source_lane_off(bound_ctrl, fetch_inactive, value, written):
    moved = cl.dpp16(SOURCE, some_off(1), 0x101, bound_ctrl=bound_ctrl, fetch_inactive=fetch_inactive)
    assert moved.write[0, 0] == written
    if value is not None:
        assert moved.values[0, 0] == value
    assert [lane for lane in LANES if moved.read_inactive[0, lane]] == [0]


def test_fetch_inactive_does_not_make_lanes_beyond_the_row_exist():
    moved = cl.dpp16(SOURCE, ALL_ON, 0x101, fetch_inactive=True)
    assert not moved.write[:, [15, 31]].any()
    zeroed = cl.dpp16(SOURCE, ALL_ON, 0x101, fetch_inactive=True, bound_ctrl=True)
    assert (zeroed.values[:, [15, 31]] == 0).all()


def test_lanes_that_are_off_do_not_count_as_readers():
    moved = cl.dpp16(SOURCE, some_off(0, 1), 0x101, bound_ctrl=True)  # lane 0 would read lane 1
    assert not moved.read_inactive.any()


@pytest.mark.parametrize(
    ("row_mask", "bank_mask", "lanes"),
    [
        (0b0001, 0xF, range(16)),
        (0b0010, 0xF, range(16, 32)),
        (0xF, 0b0100, [8, 9, 10, 11, 24, 25, 26, 27]),
        (0b0010, 0b1001, [16, 17, 18, 19, 28, 29, 30, 31]),
        (0b1100, 0xF, []),  # rows of a wave64 only
    ],
)
def test_row_and_bank_masks_stop_writes(row_mask, bank_mask, lanes):
    moved = cl.dpp16(SOURCE, ALL_ON, 0xE4, row_mask=row_mask, bank_mask=bank_mask, bound_ctrl=True)
    assert [lane for lane in LANES if moved.write[1, lane]] == list(lanes)


def test_a_masked_lane_does_not_count_as_a_reader():
    moved = cl.dpp16(SOURCE, some_off(17), 0x150 + 1, row_mask=1)
    assert not moved.read_inactive.any()


@pytest.mark.parametrize("ctrl", [0x100, 0x110, 0x120, 0x130, 0x138, 0x142, 0x143, 0x14F, 0x170, 0x1FF])
def test_dpp_controls_of_other_generations_are_refused(ctrl):
    with pytest.raises(UnimplementedInstruction, match=f"dpp_ctrl {ctrl:#x}"):
        cl.dpp16(SOURCE, ALL_ON, ctrl)


# DPP8


def test_dpp8():
    order = [7, 0, 6, 1, 5, 2, 4, 3]
    select = sum(lane << 3 * i for i, lane in enumerate(order))
    assert_reads(cl.dpp8(SOURCE, ALL_ON, select), lambda lane: lane // 8 * 8 + order[lane % 8])


def test_dpp8_source_lane_off():
    moved = cl.dpp8(SOURCE, some_off(9), 0o11111111)  # all of eight read lane 1
    assert (moved.values[:, 8:16] == 0).all()
    assert (moved.values[:, :8] == SOURCE[:, 1:2]).all()
    assert moved.write.all()
    assert [lane for lane in LANES if moved.read_inactive[0, lane]] == [8, 10, 11, 12, 13, 14, 15]
    fetched = cl.dpp8(SOURCE, some_off(9), 0o11111111, fetch_inactive=True)
    assert (fetched.values[:, 8:16] == SOURCE[:, 9:10]).all()


# permlane


def scalar(value):
    return np.full(WAVES, value, np.uint32)


def test_permlane16_selects_within_the_row():
    # lane i of a row takes lane 15 - i
    low, high = scalar(0x89ABCDEF), scalar(0x01234567)
    same, other = (f(SOURCE, ALL_ON, low, high) for f in (cl.permlane16, cl.permlanex16))
    assert_reads(same, lambda lane: lane // 16 * 16 + 15 - lane % 16)
    assert_reads(other, lambda lane: (1 - lane // 16) * 16 + 15 - lane % 16)


def test_permlanex16_identity_swaps_the_rows():
    moved = cl.permlanex16(SOURCE, ALL_ON, scalar(0x76543210)[:, None], scalar(0xFEDCBA98)[:, None])
    assert_reads(moved, lambda lane: lane ^ 16)


def test_permlane_selectors_differ_by_wave():
    low = np.array([0x00000000, 0x11111111, 0x76543210], np.uint32)
    moved = cl.permlane16(SOURCE, ALL_ON, np.broadcast_to(low[:, None], (WAVES, 32)), scalar(0x22222222))
    assert (moved.values[0, :8] == 0).all()
    assert (moved.values[1, 16:24] == 1017).all()
    assert (moved.values[2, :8] == 2000 + np.arange(8)).all()
    assert (moved.values[:, 8:16] == SOURCE[:, 2:3]).all()


@pytest.mark.parametrize(
    ("bound_ctrl", "fetch_inactive", "value", "written"),
    [(False, False, None, False), (True, False, 0, True), (False, True, 21, True), (True, True, 21, True)],
)
def test_permlanex16_source_lane_off(bound_ctrl, fetch_inactive, value, written):
    moved = cl.permlanex16(
        SOURCE,
        some_off(21),
        scalar(0x76543210),
        scalar(0xFEDCBA98),
        fetch_inactive=fetch_inactive,
        bound_ctrl=bound_ctrl,
    )
    assert moved.write[0, 5] == written
    if value is not None:
        assert moved.values[0, 5] == value
    assert [lane for lane in LANES if moved.read_inactive[0, lane]] == [5]


def test_permlane_var_takes_the_selector_of_each_lane():
    select = np.broadcast_to((np.arange(32) * 7 + 0x100) & 0xFFF, (WAVES, 32)).astype(np.uint32)
    assert_reads(cl.permlane16_var(SOURCE, ALL_ON, select), lambda lane: lane // 16 * 16 + lane * 7 % 16)
    assert_reads(cl.permlanex16_var(SOURCE, ALL_ON, select), lambda lane: (1 - lane // 16) * 16 + lane * 7 % 16)


# readlane, writelane


def test_readlane_wraps_and_reports_lanes_that_are_off():
    value, off = cl.readlane(SOURCE, some_off(5), np.array([5, 6, 37], np.uint32))
    assert value.tolist() == [5, 1006, 2005]
    assert off.tolist() == [True, False, True]
    assert cl.readlane(SOURCE, ALL_ON, 31)[0].tolist() == [31, 1031, 2031]


def test_readfirstlane():
    mask = ALL_ON.copy()
    mask[0] = False  # none on: lane 0
    mask[1, :7] = False
    value, off = cl.readfirstlane(SOURCE, mask)
    assert value.tolist() == [0, 1007, 2000]
    assert off.tolist() == [True, False, False]


def test_writelane_changes_one_lane_of_a_copy():
    before = SOURCE.copy()
    result = cl.writelane(SOURCE, np.array([7, 8, 9], np.uint32), np.array([0, 31, 34], np.uint32))
    assert (result[0, 0], result[1, 31], result[2, 2]) == (7, 8, 9)
    assert (result != SOURCE).sum() == 3
    np.testing.assert_array_equal(SOURCE, before)


# The LDS crossbar


def test_ds_bpermute_wraps_and_adds_the_offset():
    address = np.broadcast_to(np.arange(32) * 4 + 3, (WAVES, 32)).astype(np.uint32)  # the low bits do not count
    assert_reads(cl.ds_bpermute(address, SOURCE, ALL_ON), lambda lane: lane)
    assert_reads(cl.ds_bpermute(address, SOURCE, ALL_ON, offset=8), lambda lane: (lane + 2) % 32)
    assert_reads(cl.ds_bpermute(address + np.uint32(1 << 20), SOURCE, ALL_ON), lambda lane: lane)


def test_ds_bpermute_reads_zero_from_a_lane_that_is_off():
    address = np.full((WAVES, 32), 4 * 6, np.uint32)
    moved = cl.ds_bpermute(address, SOURCE, some_off(6))
    assert (moved.values == 0).all()
    assert moved.read_inactive.sum(1).tolist() == [31, 31, 31]


def test_ds_permute_highest_pusher_wins_and_the_rest_is_zero():
    address = np.broadcast_to(np.where(np.arange(32) < 4, 40, 44), (WAVES, 32)).astype(np.uint32)
    address = address.copy()
    address[:, 20] = 4 * (32 + 9)  # wraps to lane 9
    mask = some_off(3, 20)
    moved = cl.ds_permute(address, SOURCE, mask)
    for wave in range(WAVES):
        expected = np.zeros(32, np.uint32)
        expected[10], expected[11] = SOURCE[wave, 2], SOURCE[wave, 31]
        np.testing.assert_array_equal(moved.values[wave], expected)
    assert [lane for lane in LANES if moved.read_inactive[0, lane]] == [9]  # only lane 20, off, pushed there


def swizzle(offset):
    return cl.ds_swizzle(SOURCE, ALL_ON, offset)


def test_ds_swizzle_bit_mode():
    assert_reads(swizzle(0x1F | 1 << 10), lambda lane: lane ^ 1)
    assert_reads(swizzle(0x1F | 16 << 10), lambda lane: lane ^ 16)
    assert_reads(swizzle(0x1E | 1 << 5), lambda lane: lane | 1)
    # and, or, xor in this order: the xor clears a bit that the or has set
    assert_reads(swizzle(0x18 | 0x02 << 5 | 0x06 << 10), lambda lane: lane & 0x18 | 4)


def test_ds_swizzle_quad_mode():
    assert_reads(swizzle(0x8000 | 0b00_01_10_11), lambda lane: lane // 4 * 4 + 3 - lane % 4)


def test_ds_swizzle_rotate_mode():
    assert_reads(swizzle(0xC000 | 3 << 5), lambda lane: (lane + 3) % 32)
    assert_reads(swizzle(0xC400 | 3 << 5), lambda lane: (lane - 3) % 32)
    # the mask keeps the group: rotate by 1 within groups of four
    assert_reads(swizzle(0xC000 | 1 << 5 | 0b11100), lambda lane: lane // 4 * 4 + (lane + 1) % 4)


def test_ds_swizzle_fft_mode():
    assert_reads(swizzle(0xE01F), lambda lane: lane)
    assert_reads(swizzle(0xE000), lambda lane: int(f"{lane:05b}"[::-1], 2))
    # the mask keeps the upper bits: bit reversal of the lower three
    assert_reads(swizzle(0xE018), lambda lane: lane & 0x18 | int(f"{lane & 7:03b}"[::-1], 2))


def test_ds_swizzle_reads_zero_from_a_lane_that_is_off():
    moved = cl.ds_swizzle(SOURCE, some_off(4), 0x1F | 1 << 10)
    assert (moved.values[:, 5] == 0).all()
    assert [lane for lane in LANES if moved.read_inactive[0, lane]] == [5]


def test_sources_stay_as_they_are():
    before, mask = SOURCE.copy(), ALL_ON.copy()
    cl.dpp16(SOURCE, mask, 0x101)
    cl.ds_permute(SOURCE, SOURCE, mask)
    np.testing.assert_array_equal(SOURCE, before)
    assert mask.all()
