"""The search for sequences that hardware gets wrong."""

from __future__ import annotations

import pytest
from assembled import Source, assemble
from gristmill.aot.emulator.hazards import vopd_interlock_hazards

HAZARDS = [
    "v_dual_add_f32 v2, v4, v5 :: v_dual_mul_f32 v3, v6, v8",  # v4 and v6 are both even
    "v_dual_add_f32 v2, v4, v5 :: v_dual_mul_f32 v3, v7, v11",  # v5 and v11 are both odd
    "v_dual_mov_b32 v2, v4 :: v_dual_mov_b32 v3, v6",
]
HARMLESS = [
    "v_dual_add_f32 v2, v4, v5 :: v_dual_mul_f32 v3, v7, v8",
    "v_dual_add_f32 v2, s20, v5 :: v_dual_mul_f32 v3, v6, v8",
    "v_dual_mov_b32 v2, v4 :: v_dual_add_f32 v3, v7, v8",
    "v_add_f32 v2, v4, v6",
]


@pytest.mark.parametrize("text", HAZARDS)
def test_hazard_is_found_on_gfx11(text):
    module = assemble("gfx1151", (Source("kernel", text, framed=False),))
    found = vopd_interlock_hazards(module.code_object)
    assert [str(i) for i in found["kernel"]] == [text]


@pytest.mark.parametrize("text", HARMLESS)
def test_what_is_no_hazard(text):
    module = assemble("gfx1151", (Source("kernel", text, framed=False),))
    assert vopd_interlock_hazards(module.code_object) == {}


@pytest.mark.parametrize("text", HAZARDS)
def test_gfx12_does_not_have_the_fault(text):
    module = assemble("gfx1201", (Source("kernel", text, framed=False),))
    assert vopd_interlock_hazards(module.code_object) == {}
