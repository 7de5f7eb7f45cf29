"""`NamedTuple` as in `typing`, made in a tenth of the time.

Python's own writes source text for each class and compiles it, 0.1 to 0.5 ms a class, and the first result of a process
waits for all of ours. Here fields, defaults, comparison, hash, `_replace`, pickling and repr are the same; no field can
be set.
"""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING, Any

try:
    from _collections import _tuplegetter as field_of  # type: ignore[import-not-found]  # in C, as Python's own
except ImportError:

    def field_of(position: int, doc: str) -> Any:  # type: ignore[no-redef]
        return property(itemgetter(position), doc=doc)


class _TupleMeta(type):
    """Makes a class of annotated fields a tuple with these fields."""

    def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> Any:
        fields = tuple(namespace.get("__annotations__", ()))
        if not fields:  # under Python 3.14 they are not there before someone asks, unless written as strings
            raise TypeError(f"{name} has no fields, or its module no `from __future__ import annotations`")
        namespace["__slots__"] = ()
        namespace["__match_args__"] = namespace["_fields"] = fields
        namespace["_defaults"] = {field: namespace[field] for field in fields if field in namespace}
        for position, field in enumerate(fields):
            namespace[field] = field_of(position, f"field {position}")
        return super().__new__(cls, name, bases, namespace)


class _Row(tuple):
    """What the classes have in common."""

    __slots__ = ()
    _fields: tuple[str, ...]
    _defaults: dict[str, Any]

    def __new__(cls, *values: Any, **named: Any) -> Any:
        if named or len(values) != len(cls._fields):
            values = _complete(cls, values, named)
        return tuple.__new__(cls, values)

    def _replace(self, **changes: Any) -> Any:
        values = [changes.pop(field, value) for field, value in zip(self._fields, self, strict=True)]
        if changes:
            raise TypeError(f"{type(self).__name__} has no field {', '.join(changes)}")
        return tuple.__new__(type(self), values)

    def __getnewargs__(self) -> tuple[Any, ...]:
        return tuple(self)

    def __repr__(self) -> str:
        shown = ", ".join(f"{field}={value!r}" for field, value in zip(self._fields, self, strict=True))
        return f"{type(self).__name__}({shown})"


_row_of = type.__new__(_TupleMeta, "NamedTuple", (_Row,), {"__slots__": ()})


def _complete(cls: type[_Row], values: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
    """All values in the order of the fields."""
    missing = cls._fields[len(values) :]
    if missing and len(named) == len(missing):
        try:
            return values + tuple(map(named.__getitem__, missing))
        except KeyError:
            pass  # one that there is not is named, and the error below says which
    given = {**cls._defaults, **named} if cls._defaults else named
    try:
        complete = (*values, *[given[field] for field in missing])
    except KeyError as error:
        raise TypeError(f"{cls.__name__} needs a value for {error.args[0]}") from None
    if len(complete) != len(cls._fields) or not named.keys() <= set(missing):
        wrong = ", ".join(named.keys() - set(missing)) or f"{len(values)} values"
        raise TypeError(f"{cls.__name__} takes {', '.join(cls._fields)} once each, got {wrong}")
    return complete


if TYPE_CHECKING:
    from typing import NamedTuple as NamedTuple
else:
    NamedTuple = _row_of
