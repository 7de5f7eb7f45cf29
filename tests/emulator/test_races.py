"""The race detector on histories of a few accesses, each with the verdict that its barriers give it."""

import numpy as np
import pytest
from gristmill.aot.emulator import LdsRace
from gristmill.aot.emulator.races import LdsRaces

BLOCK, WAVES = 5, 3


class History:
    """One block of three waves and 64 bytes of LDS."""

    def __init__(self):
        self.signals, self.waits = np.zeros((1, WAVES), np.int64), np.zeros((1, WAVES), np.int64)
        self.races = LdsRaces(64, BLOCK, self.signals, self.waits)

    def step(self, wave: int, what: str, unit: int = 4, place: int = 0, changed: bool = True) -> None:
        who = np.array([BLOCK]), np.array([wave]), np.array([[place]]), unit
        if what == "load":
            self.races.load(*who)
        elif what == "store":
            self.races.store(*who, np.array([[changed]]))
        else:
            {"signal": self.signals, "wait": self.waits}[what][0, wave] += 1

    def barrier(self) -> None:
        for what in ("signal", "wait"):
            for wave in range(WAVES):
                self.step(wave, what)


def run(history, *steps):
    for step in steps:
        history.barrier() if step == "barrier" else history.step(*step)


ORDERED = {
    "one wave alone": [(0, "store"), (0, "load"), (0, "store")],
    "a barrier between store and load": [(0, "store"), "barrier", (1, "load")],
    "a barrier between load and store": [(0, "load"), "barrier", (1, "store")],
    "a barrier between stores": [(0, "store"), "barrier", (1, "store")],
    "two readers": [(0, "load"), (1, "load")],
    "neighbouring halves": [(0, "store", 2, 0), (1, "store", 2, 1), (2, "load", 2, 2)],
    "neighbouring bytes": [(0, "store", 1, 0), (1, "store", 1, 1)],
    "the same value": [(0, "store"), (1, "store", 4, 0, False)],
    "the same value, read by both": [(0, "store"), (1, "store", 4, 0, False), (1, "load"), (0, "load")],
    "store before the signal, load after the wait": [
        (0, "store"), (0, "signal"), (1, "signal"), (2, "signal"), (1, "wait"), (1, "load"),
    ],
}  # fmt: skip

RACES = {
    "load after store": ([(0, "store"), (1, "load")], "wave 1 reads what wave 0 of its block wrote"),
    "store after load": ([(0, "load"), (1, "store")], "wave 1 overwrites what wave 0 of its block read"),
    "store after store": ([(0, "store"), (2, "store")], "wave 2 overwrites what wave 0 of its block wrote"),
    "the barrier came before": (["barrier", (0, "store"), (1, "load")], "wave 1 reads what wave 0"),
    "half of a word": ([(0, "store", 2, 1), (1, "load", 4, 0)], "4 bytes at 0"),
    "byte of a word": ([(0, "load", 1, 7), (1, "store", 4, 1)], "4 bytes at 4"),
    "an earlier reader": ([(0, "load"), (1, "load"), (0, "signal"), (1, "store")], "what wave 0 of its"),
    "half of what the reader stored": (
        [(1, "store", 2, 0), (0, "store", 2, 1), (1, "load", 4, 0)], "wave 1 reads what wave 0",
    ),
    "the same value, for a third": ([(0, "store"), (1, "store", 4, 0, False), (2, "load")], "wave 2 reads"),
    "load before the wait": (
        [(0, "store"), (0, "signal"), (1, "signal"), (2, "signal"), (1, "load")], "wave 1 reads what wave 0",
    ),
    "store after the signal": (
        [(0, "signal"), (0, "store"), (1, "signal"), (2, "signal"), (1, "wait"), (1, "load")], "wave 1 reads",
    ),
}  # fmt: skip


@pytest.mark.parametrize("steps", ORDERED.values(), ids=ORDERED)
def test_ordered_accesses_are_no_race(steps):
    run(History(), *steps)


@pytest.mark.parametrize(("steps", "words"), RACES.values(), ids=RACES)
def test_unordered_accesses_are_a_race(steps, words):
    history = History()
    run(history, *steps[:-1])
    with pytest.raises(LdsRace, match=words) as raised:
        run(history, steps[-1])
    assert (raised.value.block, raised.value.wave) == (BLOCK, steps[-1][0])


def test_many_barriers_make_up_no_race():
    history = History()
    history.signals += 70000
    history.waits += 70000
    run(history, (0, "store"), "barrier", (1, "load"))
