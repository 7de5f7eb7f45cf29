"""What can go wrong in an emulated launch: one class per fault, all of them EmulatorError.

A fault raised while an instruction runs carries where it happened: kernel, address in the code object, the
instruction's text, and block, wave and lane where one is to blame. The text of the message begins with them.
"""

from __future__ import annotations


class EmulatorError(Exception):
    """Base of all faults. `kernel`, `pc`, `instruction`, `block`, `wave`, `lane` are None until known."""

    def __init__(self, message: str, *, block: int | None = None, wave: int | None = None, lane: int | None = None):
        super().__init__(message)
        self.message = message
        self.kernel: str | None = None
        self.pc: int | None = None
        self.instruction: str | None = None
        self.block, self.wave, self.lane = block, wave, lane

    def locate(self, kernel: str, pc: int, instruction: str) -> None:
        """Fill in where the fault happened, once: the innermost place wins."""
        if self.pc is None:
            self.kernel, self.pc, self.instruction = kernel, pc, instruction

    def __str__(self) -> str:
        if self.pc is None:
            return self.message
        who = [f"{what} {value}" for what, value in self._who() if value is not None]
        place = f"{self.kernel}+{self.pc:#x}: {self.instruction}" + (f" ({', '.join(who)})" if who else "")
        return f"{place}: {self.message}"

    def _who(self) -> list[tuple[str, int | None]]:
        return [("block", self.block), ("wave", self.wave), ("lane", self.lane)]


class UnimplementedInstruction(EmulatorError):  # noqa: N818 - says what happened
    """The emulator has no semantics for this instruction, or for a mode it is used in: never guessed."""


class UndecodableInstruction(UnimplementedInstruction):
    """The bytes are no instruction that the decoder knows."""


class MemoryAccessError(EmulatorError):
    """A global access that touches bytes outside every live allocation."""


class ReadOnlyWriteError(MemoryAccessError):
    """A store into an allocation that was marked read-only."""


class LdsAccessError(EmulatorError):
    """An LDS access outside what the kernel asked for (static plus dynamic)."""


class ScratchAccessError(EmulatorError):
    """A private-memory access outside the kernel's private segment."""


class AlignmentError(EmulatorError):
    """An access of 2 bytes or more at an address that is not a multiple of min(size, 4)."""


class UninitialisedRead(EmulatorError):  # noqa: N818 - says what happened
    """A value that was never written decides an address, a branch, an exec mask or a stored result."""


class InactiveLaneRead(EmulatorError):  # noqa: N818 - says what happened
    """A cross-lane instruction reads a lane that is switched off in exec."""


class BarrierError(EmulatorError):
    """A wave waits at a barrier that another wave of its block never reaches."""


class LdsRace(EmulatorError):  # noqa: N818 - says what happened
    """Two waves of a block touch the same byte of LDS, one of them to change it, and no barrier lies
    between."""


class RegisterError(EmulatorError):
    """An instruction names a register that the kernel descriptor did not allocate."""


class LaunchError(EmulatorError):
    """The launch does not fit the kernel: block size, kernarg bytes, wave size, architecture."""


class RunawayError(EmulatorError):
    """More instructions than the launch allows: an endless loop."""
