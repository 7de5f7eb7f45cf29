import ctypes
import struct

import fake_driver
import pytest
from gristmill.errors import ArgumentError
from gristmill.launch import ArgumentBuffer, check_int32, fill
from gristmill.manifest import Argument

ARGUMENTS = (
    Argument("x", "pointer"),
    Argument("M", "int32"),
    Argument("x_row_stride", "int64"),
    Argument("N", "int32"),
    Argument("K", "int32"),
    Argument("scratch", "null"),
)
VALUES = {"x": 0xFFFF_8000_0000_0010, "M": 7, "x_row_stride": 2**40, "N": 2**31 - 1, "K": 5}


def filled(**changes) -> ArgumentBuffer:
    entry = fake_driver.entry("kernel", b"", arguments=ARGUMENTS)
    return fill(ArgumentBuffer(ARGUMENTS, spare_slots=1), entry, {**VALUES, **changes})


def test_pointers_lead_to_values():
    buffer = filled()
    pointers = (ctypes.c_void_p * 6).from_address(buffer.address)
    assert ctypes.c_uint64.from_address(pointers[0]).value == VALUES["x"]
    assert ctypes.c_int32.from_address(pointers[1]).value == 7
    assert ctypes.c_int64.from_address(pointers[2]).value == 2**40
    assert ctypes.c_int32.from_address(pointers[3]).value == 2**31 - 1
    assert ctypes.c_uint64.from_address(pointers[5]).value == 0


def test_packed_has_natural_alignment_and_no_spare_slot():
    assert filled().packed() == struct.pack("<Qi4xqiiQ", VALUES["x"], 7, 2**40, 2**31 - 1, 5, 0)


def test_negative_int32():
    assert ctypes.c_int32.from_buffer(filled(M=-3).values, 8).value == -3


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1])
def test_int32_out_of_range(value):
    with pytest.raises(ArgumentError, match=rf"N must be below 2\*\*31 for kernel kernel, got {value}"):
        filled(N=value)
    check_int32("N", 2**31 - 1, fake_driver.entry("kernel", b""))


def test_every_argument_name_of_the_manifest_has_a_value(fake_weight):
    from gristmill.manifest import ARGUMENT_NAMES

    entry = fake_driver.entry("kernel", b"", arguments=tuple(Argument(name, "int64") for name in ARGUMENT_NAMES))
    fill(ArgumentBuffer(entry.arguments, 1), entry, fake_weight.values)
