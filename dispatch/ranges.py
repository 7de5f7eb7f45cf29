"""Ranges of integers, for formulas over all M of a range at once.

A `Range` stands where a formula expects an integer. Arithmetic gives the range of what can come out; a comparison gives
a truth value where it is the same for all numbers of the range, and raises `UndecidedError` where it is not. So a
result that comes without an exception is the one for every number.
"""

from __future__ import annotations

from typing import Any


class UndecidedError(Exception):
    """What was asked holds for some numbers of a range only, or cannot be told."""


class Range:
    """The integers from `least` to `most`."""

    __slots__ = ("least", "most")

    def __init__(self, least: int, most: int) -> None:
        self.least = least
        self.most = most

    def __repr__(self) -> str:
        return f"Range({self.least}, {self.most})"

    def __neg__(self) -> Any:
        return Range(-self.most, -self.least)

    def __add__(self, other: Any) -> Any:
        least, most = _ends(other)
        return Range(self.least + least, self.most + most)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        least, most = _ends(other)
        return Range(self.least - most, self.most - least)

    def __rsub__(self, other: Any) -> Any:
        return -self + other

    def __mul__(self, other: Any) -> Any:
        least, most = _ends(other)
        return _hull(self.least * least, self.least * most, self.most * least, self.most * most)

    __rmul__ = __mul__

    def __floordiv__(self, other: Any) -> Any:
        return _quotients(self, other)

    def __rfloordiv__(self, other: Any) -> Any:
        return _quotients(other, self)

    def __mod__(self, other: Any) -> Any:
        return _remainders(self, other)

    def __rmod__(self, other: Any) -> Any:
        return _remainders(other, self)

    def __lt__(self, other: Any) -> bool:
        least, most = _ends(other)
        return _decided(self.most < least, self.least >= most)

    def __le__(self, other: Any) -> bool:
        least, most = _ends(other)
        return _decided(self.most <= least, self.least > most)

    def __gt__(self, other: Any) -> bool:
        return not self <= other

    def __ge__(self, other: Any) -> bool:
        return not self < other

    def __eq__(self, other: object) -> bool:
        least, most = _ends(other)
        return _decided(self.least == most and self.most == least, self.most < least or self.least > most)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        return self != 0


def smaller(a: Any, b: Any) -> Any:
    """`min` of two numbers or ranges."""
    try:
        return min(a, b)
    except UndecidedError:
        ends = _ends(a), _ends(b)
        return Range(*map(min, *ends))


def larger(a: Any, b: Any) -> Any:
    """`max` of two numbers or ranges."""
    try:
        return max(a, b)
    except UndecidedError:
        ends = _ends(a), _ends(b)
        return Range(*map(max, *ends))


def _ends(value: Any) -> tuple[int, int]:
    return (value.least, value.most) if isinstance(value, Range) else (value, value)


def _hull(*values: int) -> Range:
    return Range(min(values), max(values))


def _decided(holds: bool, fails: bool) -> bool:
    if not (holds or fails):
        raise UndecidedError
    return holds


def _quotients(dividend: Any, divisor: Any) -> Range:
    a, b = _ends(dividend)
    c, d = _ends(divisor)
    if c == d == 0:
        raise ZeroDivisionError("integer division or modulo by zero")
    if c <= 0 <= d:
        raise UndecidedError
    return _hull(a // c, a // d, b // c, b // d)  # monotonic in each, where the divisor keeps its sign


def _remainders(dividend: Any, divisor: Any) -> Range:
    a, b = _ends(dividend)
    c, d = _ends(divisor)
    if c == d == 0:
        raise ZeroDivisionError("integer division or modulo by zero")
    if c <= 0:
        raise UndecidedError
    if c == d and a // c == b // c:
        return Range(a % c, b % c)
    return Range(0, d - 1)
