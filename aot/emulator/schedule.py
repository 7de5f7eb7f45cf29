"""Running a batch of blocks: which group of waves goes next, where groups part and meet, and barriers.

Blocks are independent, so all waves of all blocks of a batch that stand at one program counter run as one
group. Groups that part at a branch meet again because the one with the lowest program counter always goes
first.

That is the "lockstep" schedule. It can hide a missing barrier: waves that move together see each other's
stores early. The serial schedules do not: between two barriers, all of one wave runs before anything of the
next, in rising ("forward"), falling ("reverse") or, drawn anew after each barrier, random order. Only the
same wave of different blocks then shares a group. A kernel whose result depends on the order lacks a barrier.
"""

from __future__ import annotations

import random
from collections import Counter

import numpy as np

from .errors import BarrierError, EmulatorError, RunawayError
from .machine import Machine
from .program import Block, Exit, Program
from .races import LdsRaces
from .waves import Waves

SCHEDULES = ("lockstep", "forward", "reverse", "random")


class Batch:
    """Blocks that run together, to their end."""

    def __init__(
        self, program: Program, kernel: str, machine: Machine, waves: Waves, blocks: int,
        waves_per_block: int, schedule: str, generator: random.Random, budget: int,
    ):  # fmt: skip
        self.program, self.kernel, self.machine = program, kernel, machine
        self.schedule, self.generator, self.budget = schedule, generator, budget
        self.waves_per_block = waves_per_block
        # Barriers: how often each wave has signalled and waited.
        shape = (blocks, waves_per_block)
        self.signals, self.waits = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        self.alive = np.ones(shape, bool)
        if waves_per_block > 1 and machine.lds_bytes:
            machine.races = LdsRaces(machine.lds[1].size, machine.first_block, self.signals, self.waits)
        self.runs: Counter[int] = Counter()  # by index of the block: how many waves ran it
        self.parked: list[Waves] = []
        self.ready = self._initial(waves)

    def _initial(self, waves: Waves) -> list[Waves]:
        if self.schedule == "lockstep":
            return [waves]
        groups = [waves.take(waves.wave == w) for w in range(self.waves_per_block)]
        self._rank(groups)
        return groups

    def _rank(self, groups: list[Waves]) -> None:
        """Give every wave number its place in the order."""
        order = list(range(self.waves_per_block))
        if self.schedule == "reverse":
            order.reverse()
        elif self.schedule == "random":
            self.generator.shuffle(order)
        place = {wave: i for i, wave in enumerate(order)}
        for group in groups:
            group.rank = 0 if self.schedule == "lockstep" else place[int(group.wave[0])]

    def run(self) -> None:
        """Run every wave to its end."""
        while self.ready or self.parked:
            if not self.ready:
                self._release()
                continue
            group = min(self.ready, key=lambda g: (g.rank, g.pc))
            self._run_group(self._joined(group))

    def _joined(self, group: Waves) -> Waves:
        """`group`, with all others that stand at the same place."""
        same = [g for g in self.ready if g.pc == group.pc and g.rank == group.rank and g.mode == group.mode]
        if len(same) > 1:
            self.ready = [g for g in self.ready if g not in same]
            group = Waves.join(same)
            self.ready.append(group)
        return group

    def _run_group(self, st: Waves) -> None:
        """Run until another group is due, or the group parts, waits or ends."""
        while True:
            block = self.program.block(st.pc, st.mode)
            self._execute(block, st)
            if not self._leave(block, st):
                return
            if len(self.ready) > 1 and any(
                (g.rank, g.pc) <= (st.rank, st.pc) for g in self.ready if g is not st
            ):  # fmt: skip
                return

    def _execute(self, block: Block, st: Waves) -> None:
        self.runs[block.index] += st.count
        self.budget -= len(block.instructions) * st.count
        if self.budget < 0:
            raise RunawayError("the launch executed more instructions than allowed: an endless loop?")
        try:
            for step in block.steps:
                step(st)
        except EmulatorError as error:
            instruction = block.step_instructions[block.steps.index(step)]
            error.locate(self.kernel, instruction.address, str(instruction))
            raise

    def _leave(self, block: Block, st: Waves) -> bool:
        """Apply the end of a block. True if the group goes on as it is."""
        leave = block.exit
        try:
            if leave.kind == "fall":
                st.pc = leave.next
                return True
            if leave.kind == "jump":
                st.pc = leave.target
                return True
            if leave.kind == "branch":
                return self._branch(leave, st)
            if leave.kind == "end":
                self.ready.remove(st)
                self.alive[st.block - self.machine.first_block, st.wave] = False
                return False
            if leave.kind == "mode":
                st.mode, st.pc = leave.mode, leave.next
                return True
            if leave.kind == "computed":
                return self._computed(leave, st)
            if leave.kind in ("barrier", "signal", "wait"):
                return self._barrier(leave, st)
            assert leave.taken is not None, f"{leave.kind} without a function"
            leave.taken(st)
        except EmulatorError as error:
            if leave.instruction is not None:
                error.locate(self.kernel, leave.instruction.address, str(leave.instruction))
            else:
                error.locate(self.kernel, leave.next, "")
            raise
        raise AssertionError(f"unknown exit {leave.kind}")

    def _branch(self, leave: Exit, st: Waves) -> bool:
        assert leave.taken is not None, f"{leave.kind} without a function"
        taken = leave.taken(st)
        if taken.all():
            st.pc = leave.target
            return True
        if not taken.any():
            st.pc = leave.next
            return True
        if leave.exec_zero and leave.target > leave.next:
            skipped = self.program.block(leave.next, st.mode)
            if skipped.lane_only and skipped.exit.next == leave.target and not self._anyone_between(leave, st):
                # Waves without an active lane may as well run the code that they would jump over: it only
                # touches active lanes. It keeps the group whole where loads are masked. They are not counted
                # as having run it.
                st.pc = leave.next
                self._execute(skipped, st)
                self.runs[skipped.index] -= int(taken.sum())
                st.pc = leave.target
                return True
        self._split(st, [(taken, leave.target), (~taken, leave.next)])
        return False

    def _anyone_between(self, leave: Exit, st: Waves) -> bool:
        return any(leave.next <= g.pc < leave.target for g in self.ready if g is not st)

    def _split(self, st: Waves, parts: list[tuple[np.ndarray, int]]) -> None:
        self.ready.remove(st)
        for which, pc in parts:
            part = st.take(which)
            part.pc = pc
            self.ready.append(part)

    def _computed(self, leave: Exit, st: Waves) -> bool:
        assert leave.taken is not None, f"{leave.kind} without a function"
        addresses = leave.taken(st).astype(np.int64) - self.machine.image_base
        targets = np.unique(addresses)
        if targets.size == 1:
            st.pc = int(targets[0])
            return True
        self._split(st, [(addresses == t, int(t)) for t in targets])
        return False

    # -- barriers ----------------------------------------------------------------------------------------

    def _barrier(self, leave: Exit, st: Waves) -> bool:
        slots = st.block - self.machine.first_block
        st.pc = leave.next
        if leave.kind in ("barrier", "signal"):
            self.signals[slots, st.wave] += 1
            if (self.signals - self.waits)[slots, st.wave].max() > 1:
                raise BarrierError("a wave signals the barrier twice without waiting for it")
            if leave.kind == "signal":
                return True
        self.waits[slots, st.wave] += 1
        st.barrier = leave.instruction
        if self.schedule == "lockstep" and len(self.ready) == 1 and not self.parked and self._passable(st).all():
            return True
        self.ready.remove(st)
        self.parked.append(st)
        return False

    def _passable(self, st: Waves) -> np.ndarray:
        """Which waves of the group have a complete barrier: all living waves of the block signalled it."""
        reached = np.where(self.alive, self.signals, np.iinfo(np.int64).max).min(axis=1)
        slots = st.block - self.machine.first_block
        return reached[slots] >= self.waits[slots, st.wave]

    def _release(self) -> None:
        """Nobody can run: let go the waves whose barrier is complete."""
        self._check_nobody_left()
        waiting, self.parked = self.parked, []
        free = []
        for group in waiting:
            passable = self._passable(group)
            if passable.all():
                free.append(group)
            elif passable.any():
                free.append(group.take(passable))
                self.parked.append(group.take(~passable))
            else:
                self.parked.append(group)
        if not free:
            group = self.parked[0]
            slot, wave = int(group.block[0]) - self.machine.first_block, int(group.wave[0])
            behind = np.flatnonzero(self.alive[slot] & (self.signals[slot] < self.waits[slot, wave]))
            raise self._located(
                f"wave waits for a barrier that waves {behind.tolist()} of its block never signal", group
            )
        self._rank(free)
        self.ready = free

    def _check_nobody_left(self) -> None:
        """The hardware no longer waits for a wave that has ended. A wave that ends while others of its block
        still wait for it has taken another path than they did, which no kernel of ours means to do."""
        for group in self.parked:
            slots = group.block - self.machine.first_block
            behind = ~self.alive[slots] & (self.signals[slots] < self.waits[slots, group.wave][:, None])
            if behind.any():
                i, left = (int(n) for n in np.argwhere(behind)[0])
                raise self._located(
                    f"wave {left} of the block ended without reaching this barrier", group.take(np.array([i]))
                )

    def _located(self, message: str, group: Waves) -> BarrierError:
        error = BarrierError(message, block=int(group.block[0]), wave=int(group.wave[0]))
        assert group.barrier is not None, "only a group at a barrier is parked"
        error.locate(self.kernel, group.barrier.address, str(group.barrier))
        return error
