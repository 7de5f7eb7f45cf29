"""Named tuples of our own are those of `typing` in all that we use of them."""

from __future__ import annotations

import copy
import pickle
import typing

import pytest
from gristmill.named_tuple import NamedTuple
from hypothesis import given
from hypothesis import strategies as st


class Ours(NamedTuple):
    """A class."""

    a: int
    b: tuple[int, ...]
    c: str = "c"
    d: float = 0.5

    @property
    def both(self):
        return (self.a, self.b)


class Theirs(typing.NamedTuple):
    """A class."""

    a: int
    b: tuple[int, ...]
    c: str = "c"
    d: float = 0.5

    @property
    def both(self):
        return (self.a, self.b)


def outcome(function, *arguments, **named):
    """What a call gives, or the kind of its error."""
    try:
        return function(*arguments, **named)
    except (TypeError, ValueError, AttributeError) as error:
        return TypeError if isinstance(error, ValueError) else type(error)


VALUES = st.lists(st.integers(0, 3), max_size=5)
NAMED = st.dictionaries(st.sampled_from(["a", "b", "c", "d", "e"]), st.integers(0, 3), max_size=5)


@given(VALUES, NAMED)
def test_the_same_values_are_taken(values, named):
    ours, theirs = outcome(Ours, *values, **named), outcome(Theirs, *values, **named)
    assert ours == theirs
    if isinstance(ours, Ours):
        assert (hash(ours), ours.a, ours.b, ours.c, ours.d, ours.both) == (
            hash(theirs), theirs.a, theirs.b, theirs.c, theirs.d, theirs.both,
        )  # fmt: skip
        assert repr(ours) == repr(theirs).replace("Theirs", "Ours")


@given(NAMED)
def test_replace(named):
    ours, theirs = outcome(Ours(1, (2,))._replace, **named), outcome(Theirs(1, (2,))._replace, **named)
    assert ours == theirs
    assert (type(ours) is Ours) == (type(theirs) is Theirs)


def test_it_cannot_be_changed():
    row = Ours(1, (2,))
    for name in ("a", "e"):
        with pytest.raises(AttributeError):
            setattr(row, name, 3)
    assert not hasattr(row, "__dict__")


def test_copies_and_the_way_to_another_process():
    row = Ours(1, (2,), d=3)
    for other in (copy.copy(row), copy.deepcopy(row), pickle.loads(pickle.dumps(row))):
        assert other == row
        assert type(other) is Ours
    match row:
        case Ours(1, _, c):
            assert c == "c"
    assert Ours._fields == Theirs._fields
    assert Ours.__doc__ == Theirs.__doc__


def test_a_class_without_fields_is_refused():
    with pytest.raises(TypeError, match="Empty has no fields"):

        class Empty(NamedTuple):
            pass


def test_a_mistake_says_what_is_missing_or_too_much():
    with pytest.raises(TypeError, match="Ours needs a value for b"):
        Ours(1)
    with pytest.raises(TypeError, match="Ours takes a, b, c, d once each, got e"):
        Ours(1, (2,), e=3)
    with pytest.raises(TypeError, match="Ours has no field e"):
        Ours(1, (2,))._replace(e=3)
