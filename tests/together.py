"""Many threads at once."""

from __future__ import annotations

import threading
from collections.abc import Callable


def together(count: int, work: Callable[[int], object]) -> None:
    """Run work(0) .. work(count - 1), each in a thread of its own, all let go at once; the first failure is raised."""
    start, failures = threading.Barrier(count), []

    def run(index: int) -> None:
        start.wait()
        try:
            work(index)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
