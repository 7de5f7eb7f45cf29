"""Device memory from the host's side."""

from __future__ import annotations

import numpy as np
import pytest
from gristmill.aot.emulator import DeviceMemory, MemoryAccessError
from gristmill.aot.emulator.memory import ALIGNMENT, GUARD_BYTES, POISON_BYTE


def test_new_memory_is_poisoned():
    memory = DeviceMemory()
    assert memory.read(memory.allocate(100), 100) == bytes([POISON_BYTE]) * 100


def test_write_then_read():
    memory = DeviceMemory()
    address = memory.allocate(64)
    memory.write(address + 4, np.arange(5, dtype=np.int16))
    memory.write(address + 40, b"abc")
    assert np.frombuffer(memory.read(address + 4, 10), np.int16).tolist() == [0, 1, 2, 3, 4]
    assert memory.read(address + 40, 3) == b"abc"


def test_host_may_write_read_only_memory():
    memory = DeviceMemory()
    address = memory.allocate(4, read_only=True)
    memory.write(address, b"1234")
    assert memory.read(address, 4) == b"1234"


def test_map_shares_the_array():
    memory, array = DeviceMemory(), np.zeros((3, 4), np.float32)
    address = memory.map(array, "array")
    memory.write(address + 20, np.float32(2.5).tobytes())
    assert array[1, 1] == 2.5
    array[0, 0] = -1
    assert memory.read(address, 4) == np.float32(-1).tobytes()


@pytest.mark.parametrize("offset", range(4))
def test_map_keeps_the_low_address_bits(offset):
    array = np.zeros(64, np.uint8)[offset:]
    assert DeviceMemory().map(array) % 4 == array.ctypes.data % 4


def test_map_refuses_what_it_cannot_share():
    with pytest.raises(ValueError, match="C-contiguous"):
        DeviceMemory().map(np.zeros((4, 4))[:, ::2])
    frozen = np.zeros(4)
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="not writeable"):
        DeviceMemory().map(frozen)
    DeviceMemory().map(frozen, read_only=True)


def test_map_at_an_address():
    memory, array = DeviceMemory(), np.arange(16, dtype=np.uint8)
    behind = memory.allocate(8)
    for address in (0x5000, 0x5010, 0x1000):
        assert memory.map(array, address=address) == address
    assert memory.read(0x5004, 3) == bytes([4, 5, 6])
    assert [a.address for a in memory.allocations()] == [0x1000, 0x5000, 0x5010, behind]
    for address in (0x4FF4, 0x5004, 0x501C, 0x0FF4):
        with pytest.raises(ValueError, match="overlap"):
            memory.map(array, address=address)
    memory.free(0x5000)
    with pytest.raises(MemoryAccessError):
        memory.read(0x5000, 1)
    memory.map(array, address=0x4FF4)
    with pytest.raises(ValueError, match="not aligned to 4 bytes as the array is"):
        memory.map(array, address=0x9001)


def test_allocations_are_aligned_and_apart():
    memory = DeviceMemory()
    a, b = memory.allocate(1), memory.allocate(1000)
    assert a % ALIGNMENT == b % ALIGNMENT == 0
    assert b - (a + 1) >= GUARD_BYTES
    assert b < 1 << 48


def test_empty_allocation():
    memory = DeviceMemory()
    address = memory.allocate(0)
    assert memory.read(address, 0) == b""
    with pytest.raises(MemoryAccessError):
        memory.read(address, 1)


def test_read_across_the_end():
    memory = DeviceMemory()
    address = memory.allocate(8, "eight")
    with pytest.raises(MemoryAccessError, match="'eight' has 8 bytes and this is at byte 6"):
        memory.read(address + 6, 4)


def test_free_ends_an_allocation():
    memory = DeviceMemory()
    address = memory.allocate(8)
    memory.free(address)
    with pytest.raises(MemoryAccessError, match="nothing is allocated"):
        memory.read(address, 1)
    with pytest.raises(ValueError, match="not the start of a live allocation"):
        memory.free(address)
