"""Letting nothing leak when a call of the driver fails between getting something and returning it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from gristmill.errors import GristmillError


@contextmanager
def released_on_error(held: list[Any], release: Callable[[Any], None]) -> Iterator[None]:
    """Release what the block has put into `held` if it fails, or if what it entered fails on the way out.

    The failure is the one that is reported; releasing may fail after it.
    """
    try:
        yield
    except BaseException:
        for handle in held:
            with suppress(GristmillError):
                release(handle)
        raise
