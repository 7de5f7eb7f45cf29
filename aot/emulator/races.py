"""Races in LDS: two waves of a block touch a byte, one of them to change it, and no barrier lies between.

Barriers are the only thing that orders waves, so the order is known exactly, whichever wave the schedule runs
first: what wave A did before it signalled barrier i comes before what wave B does after it has waited for
barrier i. An access made after `signals` signals by A is therefore over for B once B has waited more than
`signals` times.

For each byte and each wave of its block the tables hold signals + 1 at the wave's last access, 0 for none.
Writing the value that is there already is no race: compilers let several waves store what all of them hold.
Atomics are not tracked.
"""

from __future__ import annotations

import numpy as np

from .errors import LdsRace

_LATEST = 0xFFFF  # past so many barriers a race may be missed, but none is made up
_PACKED = {1: np.uint16, 2: np.uint32, 4: np.uint64}  # the entries of one unit's bytes side by side
_REPEATED = {1: 1, 2: 0x0001_0001, 4: 0x0001_0001_0001_0001}

Table = dict[int, np.ndarray]  # unit in bytes -> [waves of a block, units]


class LdsRaces:
    """Who touched which byte of a batch's LDS when.

    Parameters
    ----------
    lds_bytes : of all blocks of the batch
    first_block : number of the batch's first block
    signals, waits : int64 [blocks, waves of a block], how often each wave has signalled a barrier and waited
        for one; the scheduler's own counters, which it goes on counting in
    """

    def __init__(self, lds_bytes: int, first_block: int, signals: np.ndarray, waits: np.ndarray):
        self.first_block, self.signals, self.waits = first_block, signals, waits
        self.waves = signals.shape[1]
        self.read, self.written = self._table(lds_bytes), self._table(lds_bytes)

    def _table(self, lds_bytes: int) -> Table:
        whole = np.zeros((self.waves, lds_bytes), np.uint16)
        return {unit: whole.view(packed) for unit, packed in _PACKED.items()}

    def load(self, block: np.ndarray, wave: np.ndarray, index: np.ndarray, unit: int) -> None:
        """A load of units `index` [count, accesses]; `block` and `wave` say who makes each access.

        Raises
        ------
        LdsRace : another wave's store is not ordered before it
        """
        slot = block - self.first_block
        self._check(self.written, slot, wave, index, unit, None)
        self._note(self.read, slot, wave, index, unit)

    def store(self, block: np.ndarray, wave: np.ndarray, index: np.ndarray, unit: int, changed: np.ndarray) -> None:
        """A store; `changed` [count, accesses] says which units get another value.

        Raises
        ------
        LdsRace : another wave's load or store is not ordered before it
        """
        slot = block - self.first_block
        if changed.any():
            self._check(self.written, slot, wave, index, unit, changed)
            self._check(self.read, slot, wave, index, unit, changed)
        self._note(self.written, slot, wave, index, unit)

    def _check(
        self,
        table: Table,
        slot: np.ndarray,
        wave: np.ndarray,
        index: np.ndarray,
        unit: int,
        changed: np.ndarray | None,
    ) -> None:
        when = table[unit].take(index, axis=1).view(np.uint16).reshape(self.waves, *index.shape, unit)
        unordered = when > self.waits[slot, wave][:, None]  # [waves, count, accesses, bytes of a unit]
        mine = (np.arange(self.waves)[:, None] == wave)[:, None, :, None]
        others = unordered & ~mine
        if not others.any():
            return
        if changed is not None:
            others &= changed[..., None]
        else:
            # The reader has stored there as well, so all have stored one value: else that was a race.
            others &= ~(unordered & mine).any(axis=0)
        if others.any():
            other, row, position, _ = (int(i) for i in np.argwhere(others)[0])
            does = "reads" if changed is None else "overwrites"
            did = "wrote" if table is self.written else "read"
            raise LdsRace(
                f"wave {int(wave[position])} {does} what wave {other} of its block {did}, with no barrier "
                f"between: {unit} bytes at {int(index[row, position]) * unit} of the batch's LDS",
                block=int(slot[position]) + self.first_block,
                wave=int(wave[position]),
            )

    def _note(self, table: Table, slot: np.ndarray, wave: np.ndarray, index: np.ndarray, unit: int) -> None:
        now = np.minimum(self.signals[slot, wave] + 1, _LATEST).astype(_PACKED[unit])
        table[unit][wave, index] = now * _PACKED[unit](_REPEATED[unit])
