"""Runs inputs of one parser under limits."""

from __future__ import annotations

import codecs
import random
import resource
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import sample_pack

from fuzz import gguf_headers, manifests

PARSERS = {"manifest": manifests, "gguf": gguf_headers}

# Above what the process has when it starts; an input has a few kB.
MEMORY_BYTES = 256 * 2**20
SECONDS = 5


@dataclass(frozen=True)
class Result:
    inputs: int
    taken: int  # by the parser, as valid
    peak_mb: float
    fault: str | None  # the input and what it did


def fuzz(parser: str, count: int, seed: int, first: int = 0) -> Result:
    """Run inputs `first` .. `first` + `count` - 1; ends at the first fault. Limits the memory of this process."""
    module = PARSERS[parser]
    taken = done = 0
    fault = None
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as temporary:
        folder = sample_pack.write_pack(Path(temporary))
        for encoding in ("utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"):
            codecs.lookup(encoding)  # Python loads them on first use, json guesses them
        watch = _Watch(folder)
        _limit_memory()
        for number in range(first, first + count):
            data = module.generate(random.Random(f"{seed} {number}"))
            done += 1
            try:
                taken += watch.run(module.check, data, folder)
            except BaseException:
                fault = f"input {number} of seed {seed}: {data[:2000]!r}\n{traceback.format_exc()}"
                break
    return Result(done, taken, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000, fault)


class _Watch:
    """Lets a check take only so long, and open nothing outside its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.on = False
        self.opened: list[str] = []
        sys.addaudithook(self._audit)
        signal.signal(signal.SIGALRM, self._late)

    def run(self, check: Callable[[bytes, Path], bool], data: bytes, folder: Path) -> bool:
        self.opened.clear()
        self.on = True
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        try:
            taken = check(data, folder)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            self.on = False
        strange = [path for path in self.opened if not self._is_inside(path)]
        assert not strange, f"opened {strange}"
        return taken

    def _audit(self, event: str, arguments: tuple) -> None:
        if self.on and event == "open":
            self.opened.append(str(arguments[0]))

    def _is_inside(self, path: str) -> bool:
        # A bare name is opened below the folder; a number is a handle that was opened before.
        return "/" not in path or (Path(path).is_relative_to(self.folder) and ".." not in Path(path).parts)

    @staticmethod
    def _late(signal_number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"an input took more than {SECONDS} s")


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
