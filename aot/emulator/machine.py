"""What the waves of a batch of blocks share: global memory, their blocks' LDS, the launch's counters."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .memory import DeviceMemory
from .races import LdsRaces

LDS_GRANULE = 16


@dataclass
class Counts:
    """Running totals of a launch."""

    bytes_read: int = 0  # global memory, by lanes
    bytes_written: int = 0
    scalar_bytes_read: int = 0
    lds_bytes_read: int = 0
    lds_bytes_written: int = 0


class Machine:
    """Memory as a batch of blocks sees it. Blocks are numbered from `first_block`."""

    def __init__(
        self,
        memory: DeviceMemory,
        first_block: int,
        blocks: int,
        lds_bytes: int,
        image_base: int,
        counts: Counts,
    ):
        self.memory = memory
        self.first_block = first_block
        self.lds_bytes = lds_bytes
        self.lds_stride = -(-lds_bytes // LDS_GRANULE) * LDS_GRANULE
        self.image_base = image_base  # device address of the code object's address 0
        self.counts = counts
        self.races: LdsRaces | None = None  # None where a block is one wave
        words = blocks * self.lds_stride // 4
        # A block starts with whatever the last one left in its LDS; 0xFF bytes mark what it has not written
        # itself.
        self.lds = {4: np.full(words, 0xCDCDCDCD, np.uint32)}
        self.lds_undefined = {4: np.full(words, 0xFFFFFFFF, np.uint32)}
        for table in (self.lds, self.lds_undefined):
            table[2], table[1] = table[4].view(np.uint16), table[4].view(np.uint8)
