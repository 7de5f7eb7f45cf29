"""The manifest of a pack: all that select, load and launch need to know, as data.

`Manifest.parse` takes untrusted bytes and raises ManifestError or a PackSchemaError for whatever is wrong with them;
`Manifest.dump` is its inverse and gives the same bytes for the same content. `Manifest.open` leaves each entry until it
is looked at: a process launches few of a pack's entries, and its first result waits for those that are read. The format
is described in docs/pack-format.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from gristmill.errors import FormulaError, ManifestError, PackSchemaError, PackTooNewError, PackTooOldError
from gristmill.formula import Formula
from gristmill.named_tuple import NamedTuple
from gristmill.problem import DTYPES, OP_W4A16_GEMM

SCHEMA = 1
MAX_BYTES = 16 * 2**20

OBJECT_KINDS = ("hsaco", "cubin")

# What an argument of a kernel can be. "null" is a pointer that the compiler added and that stays null.
ARGUMENT_TYPES = ("pointer", "int32", "int64", "null")
ARGUMENT_NAMES = (
    "x", "qweight", "scales", "zero_points", "bias", "out",
    "M", "N", "K", "group_size", "num_groups",
    "x_row_stride", "qweight_row_stride", "scales_row_stride", "out_row_stride",
)  # fmt: skip

POINTER_NAMES = frozenset({"x", "qweight", "scales", "zero_points", "bias", "out"})

PROBLEM_NAMES = frozenset({"M", "N", "K", "group_size", "num_groups", "alignment", "has_bias"})
DEVICE_NAMES = frozenset({"lds_bytes", "multiprocessor_count"})
FORMULA_NAMES = PROBLEM_NAMES | DEVICE_NAMES

MAX_ARGUMENTS = 64
MAX_NAME = 200
MAX_ARGUMENT_LISTS = 16  # that are remembered while a manifest is read; a pack has four


class Argument(NamedTuple):
    name: str  # one of ARGUMENT_NAMES; free for type "null"
    type: str


class Needs(NamedTuple):
    """What must hold for an entry to be right; selection never takes an entry whose needs do not hold."""

    dtype: str
    zero_points: bool
    conditions: tuple[Formula, ...]


class Entry(NamedTuple):
    """One kernel of one code object."""

    name: str
    op: str
    symbol: str
    object: str  # sha256 of the code object, its file name without suffix
    source: str  # file of the kernel's source, for people
    arguments: tuple[Argument, ...]
    grid: tuple[Formula, Formula, Formula]  # in blocks
    block: tuple[int, int, int]  # in threads
    static_shared_bytes: int
    dynamic_shared_bytes: Formula
    needs: Needs
    roundings: int  # roundings to the activation dtype that a product passes on its way to the output
    weights_in_dtype: bool  # (q - z) * s is rounded to the activation dtype before the multiplication
    resources: Mapping[str, int]  # registers, spills, ...: read from the code object
    # The kernel itself waits for the one ahead in its stream before it touches x or out, so it may be started sooner.
    early_start: bool


class Rule(NamedTuple):
    """One row of the policy: where `when` holds, take the first of `entries` whose needs hold."""

    when: Formula
    entries: tuple[str, ...]
    origin: str  # "measured on NVIDIA H200", "table for gfx1201, not measured"


class Signature(NamedTuple):
    """What an entry must share with a problem before its conditions are asked."""

    op: str
    dtype: str
    zero_points: bool


class Manifest(NamedTuple):
    arch: str
    kind: str  # "hsaco" or "cubin"
    version: str  # of the distribution that built it
    compilers: Mapping[str, str]
    source_digest: str
    entries: Mapping[str, Entry]
    signatures: Mapping[str, Signature]  # of the entries, by their names, in the same order
    policy: tuple[Rule, ...]

    @staticmethod
    def of(
        entries: Iterable[Entry],
        policy: tuple[Rule, ...],
        *,
        arch: str,
        kind: str,
        version: str,
        compilers: Mapping[str, str],
        source_digest: str,
    ) -> Manifest:
        """The manifest of `entries`."""
        by_name = {entry.name: entry for entry in entries}
        signatures = {name: Signature(e.op, e.needs.dtype, e.needs.zero_points) for name, e in by_name.items()}
        return Manifest(arch, kind, version, compilers, source_digest, by_name, signatures, policy)

    @staticmethod
    def parse(data: bytes, origin: str = "manifest") -> Manifest:
        """Check and read a manifest.

        Raises
        ------
        PackTooNewError, PackTooOldError : a schema number that this version does not read
        ManifestError : anything else that is wrong; the message names `origin` and the field
        """
        manifest = Manifest.open(data, origin)
        return manifest._replace(entries=dict(manifest.entries))

    @staticmethod
    def open(data: bytes, origin: str = "manifest") -> Manifest:
        """As `parse`, but what is wrong with an entry is raised where it is first taken from `entries`."""
        return _Reader(origin).manifest(data)

    def dump(self) -> bytes:
        """The manifest as JSON, one line: indented, a large one takes a third longer to read."""
        document = {
            "schema": SCHEMA,
            "arch": self.arch,
            "kind": self.kind,
            "version": self.version,
            "compilers": dict(self.compilers),
            "source_digest": self.source_digest,
            "entries": [_entry_document(entry) for entry in self.entries.values()],
            "policy": [
                {"when": rule.when.text, "entries": list(rule.entries), "origin": rule.origin} for rule in self.policy
            ],
        }
        return (json.dumps(document, sort_keys=True) + "\n").encode()


class _Entries(Mapping[str, Entry]):
    """The entries of a manifest, each read when it is first asked for."""

    __slots__ = ("_found", "_reader")

    def __init__(self, reader: _Reader, rows: dict[str, tuple[dict[str, Any], str]]) -> None:
        self._reader = reader
        self._found: dict[str, Any] = rows  # name -> the entry; a tuple (row, where) until it is read

    def __getitem__(self, name: str) -> Entry:
        found = self._found[name]
        if type(found) is not Entry:
            found = self._found[name] = self._reader.entry(*found)
        return found

    def __contains__(self, name: object) -> bool:
        return name in self._found

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


def _entry_document(entry: Entry) -> dict[str, Any]:
    return {
        "name": entry.name,
        "op": entry.op,
        "symbol": entry.symbol,
        "object": entry.object,
        "source": entry.source,
        "arguments": [[argument.name, argument.type] for argument in entry.arguments],
        "grid": [formula.text for formula in entry.grid],
        "block": list(entry.block),
        "static_shared_bytes": entry.static_shared_bytes,
        "dynamic_shared_bytes": entry.dynamic_shared_bytes.text,
        "needs": {
            "dtype": entry.needs.dtype,
            "zero_points": entry.needs.zero_points,
            "conditions": [formula.text for formula in entry.needs.conditions],
        },
        "roundings": entry.roundings,
        "weights_in_dtype": entry.weights_in_dtype,
        "resources": dict(entry.resources),
        "early_start": entry.early_start,
    }


def _shown(value: Any) -> str:
    """A value of unknown depth and length, for a message."""
    if isinstance(value, (list, dict)):
        return f"a {type(value).__name__} of {len(value)} items"
    return ascii(value)[:80]


def is_name(text: str) -> bool:
    """Whether `text` is letters, digits, '_' and, not first, '.'."""
    return (
        0 < len(text) <= MAX_NAME
        and text.isascii()
        and text[0] != "."
        and text.replace(".", "_").replace("_", "a").isalnum()
    )


def is_digest(text: str) -> bool:
    """Whether `text` is a sha256 in hex, without capitals."""
    return len(text) == 64 and not text.strip("0123456789abcdef")


class _Reader:
    """Reads one manifest; every failure names where in it the fault lies.

    A process reads one before its first result, and most rows of a pack are alike: formulas and lists of arguments that
    have been found right are remembered.
    """

    def __init__(self, origin: str) -> None:
        self.origin = origin
        self.formulas: dict[str, Formula] = {}
        self.argument_lists: list[tuple[list[Any], tuple[Argument, ...]]] = []

    def fail(self, where: str, what: str) -> ManifestError:
        return ManifestError(f"{self.origin}: {where}: {what}")

    def other_schema(self, kind: type[PackSchemaError], schema: int, what: str, action: str) -> PackSchemaError:
        return kind(
            f"{self.origin}: schema {schema} is {what} than schema {SCHEMA}, which this gristmill reads; {action}"
        )

    def manifest(self, data: bytes) -> Manifest:
        if len(data) > MAX_BYTES:
            raise self.fail("file", f"{len(data)} bytes, more than {MAX_BYTES}")
        try:
            document = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise self.fail("file", f"not JSON: {error}") from None
        if not isinstance(document, dict):
            raise self.fail("file", "not a JSON object")
        schema = document.get("schema")
        if type(schema) is not int:
            raise self.fail("schema", f"must be an integer, got {_shown(schema)}")
        if schema < SCHEMA:
            wheel = f"gristmill-{self.name(document, 'arch', 'manifest')}"
            action = f"upgrade the pack: pip install --upgrade {wheel}"
            raise self.other_schema(PackTooOldError, schema, "older", action)
        if schema > SCHEMA:
            action = "upgrade gristmill: pip install --upgrade gristmill"
            raise self.other_schema(PackTooNewError, schema, "newer", action)
        entries, signatures = {}, {}
        for index, row in enumerate(self.field(document, "entries", list, "manifest")):
            where = f"entries[{index}]"
            name = self.name(self.object(row, where), "name", where)
            if name in entries:
                raise self.fail(where, f"second entry of the name {name!r}")
            where = f"{where} ({name})"
            entries[name] = row, where
            signatures[name] = self.signature(row, where)
        rows = self.field(document, "policy", list, "manifest")
        kind = self.field(document, "kind", str, "manifest")
        if kind not in OBJECT_KINDS:
            raise self.fail("kind", f"must be one of {', '.join(OBJECT_KINDS)}, got {_shown(kind)}")
        return Manifest(
            arch=self.name(document, "arch", "manifest"),
            kind=kind,
            version=self.text(document, "version", "manifest"),
            compilers=self.mapping(document, "compilers", str, "manifest"),
            source_digest=self.digest(document, "source_digest", "manifest"),
            entries=_Entries(self, entries),
            signatures=signatures,
            policy=tuple(self.rule(row, f"policy[{index}]", entries) for index, row in enumerate(rows)),
        )

    def signature(self, row: dict[str, Any], where: str) -> Signature:
        op = self.field(row, "op", str, where)
        if op != OP_W4A16_GEMM:
            raise self.fail(where, f"op must be {OP_W4A16_GEMM!r}, got {_shown(op)}")
        needs = self.field(row, "needs", dict, where)
        dtype = self.field(needs, "dtype", str, where)
        if dtype not in DTYPES:
            raise self.fail(where, f"dtype must be one of {', '.join(DTYPES)}, got {_shown(dtype)}")
        return Signature(op, dtype, self.field(needs, "zero_points", bool, where))

    def entry(self, row: dict[str, Any], where: str) -> Entry:
        """An entry whose name has been found right."""
        block = tuple([self.count(value, where, "block", 1, 1024) for value in self.triple(row, "block", where)])
        if block[0] * block[1] * block[2] > 1024:
            raise self.fail(where, f"block {block} has more than 1024 threads")
        grid = tuple([self.formula(text, where, "grid") for text in self.triple(row, "grid", where)])
        op, dtype, zero_points = self.signature(row, where)
        conditions = self.field(row["needs"], "conditions", list, where)
        return Entry(
            name=row["name"],
            op=op,
            symbol=self.name(row, "symbol", where),
            object=self.digest(row, "object", where),
            source=self.text(row, "source", where),
            arguments=self.arguments(row, where),
            grid=grid,  # type: ignore[arg-type]
            block=block,  # type: ignore[arg-type]
            static_shared_bytes=self.count(row.get("static_shared_bytes"), where, "static_shared_bytes", 0, 2**20),
            dynamic_shared_bytes=self.formula(row.get("dynamic_shared_bytes"), where, "dynamic_shared_bytes"),
            needs=Needs(dtype, zero_points, tuple([self.formula(text, where, "needs") for text in conditions])),
            roundings=self.count(row.get("roundings"), where, "roundings", 1, 16),
            weights_in_dtype=self.field(row, "weights_in_dtype", bool, where),
            resources=self.mapping(row, "resources", int, where),
            early_start=self.field(row, "early_start", bool, where),
        )

    def arguments(self, row: dict[str, Any], where: str) -> tuple[Argument, ...]:
        values = self.field(row, "arguments", list, where)
        if len(values) > MAX_ARGUMENTS:
            raise self.fail(where, f"{len(values)} arguments, more than {MAX_ARGUMENTS}")
        # What was found right is lists of strings, which nothing else that JSON can give is equal to.
        for known, arguments in self.argument_lists:
            if values == known:
                return arguments
        arguments = tuple([self.argument(value, where) for value in values])
        if len(self.argument_lists) < MAX_ARGUMENT_LISTS:
            self.argument_lists.append((values, arguments))
        return arguments

    def argument(self, value: Any, where: str) -> Argument:
        if not (isinstance(value, list) and len(value) == 2 and all(isinstance(item, str) for item in value)):
            raise self.fail(where, f"an argument is [name, type], got {_shown(value)}")
        name, type_ = value
        if type_ not in ARGUMENT_TYPES:
            types = ", ".join(ARGUMENT_TYPES)
            raise self.fail(where, f"argument {_shown(name)}: type must be one of {types}, got {_shown(type_)}")
        if type_ != "null" and name not in ARGUMENT_NAMES:
            raise self.fail(where, f"unknown argument {_shown(name)}")
        if type_ != "null" and (type_ == "pointer") != (name in POINTER_NAMES):
            raise self.fail(where, f"argument {name!r} cannot be of type {type_!r}")
        return Argument(name, type_)

    def rule(self, row: Any, where: str, entries: Mapping[str, Any]) -> Rule:
        row = self.object(row, where)
        names = self.field(row, "entries", list, where)
        if not all(type(name) is str for name in names) or not entries.keys() >= set(names):
            unknown = next(name for name in names if not isinstance(name, str) or name not in entries)
            raise self.fail(where, f"names an entry that is not there: {_shown(unknown)}")
        return Rule(
            when=self.formula(row.get("when"), where, "when"),
            entries=tuple(names),
            origin=self.text(row, "origin", where),
        )

    def object(self, value: Any, where: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self.fail(where, f"must be an object, got {type(value).__name__}")
        return value

    def field(self, row: dict[str, Any], name: str, type_: type, where: str) -> Any:
        value = row.get(name)
        if type(value) is not type_:
            raise self.fail(where, f"{name} must be a {type_.__name__}, got {type(value).__name__}")
        return value

    def text(self, row: dict[str, Any], name: str, where: str) -> str:
        """A string for people: one that can be printed."""
        value = self.field(row, name, str, where)
        if not value.isprintable():
            raise self.fail(where, f"{name} must be printable, got {_shown(value)}")
        return value

    def name(self, row: dict[str, Any], name: str, where: str) -> str:
        value = self.field(row, name, str, where)
        if not is_name(value):
            raise self.fail(where, f"{name} must be letters, digits, '_' and, not first, '.', got {_shown(value)}")
        return value

    def digest(self, row: dict[str, Any], name: str, where: str) -> str:
        value = self.field(row, name, str, where)
        if not is_digest(value):
            raise self.fail(where, f"{name} must be a sha256 in hex, got {_shown(value)}")
        return value

    def triple(self, row: dict[str, Any], name: str, where: str) -> list[Any]:
        value = self.field(row, name, list, where)
        if len(value) != 3:
            raise self.fail(where, f"{name} must have 3 items, got {len(value)}")
        return value

    def count(self, value: Any, where: str, what: str, least: int, most: int) -> int:
        if type(value) is not int or not least <= value <= most:
            raise self.fail(f"{where} {what}", f"must be an integer from {least} to {most}, got {_shown(value)}")
        return value

    def mapping(self, row: dict[str, Any], name: str, type_: type, where: str) -> dict[str, Any]:
        value = self.field(row, name, dict, where)
        for key, item in value.items():
            if not key.isprintable():
                raise self.fail(where, f"{name} has a key that cannot be printed: {_shown(key)}")
            if type(item) is not type_:
                raise self.fail(where, f"{name}[{_shown(key)}] must be a {type_.__name__}, got {type(item).__name__}")
        return value

    def formula(self, text: Any, where: str, what: str) -> Formula:
        known = self.formulas.get(text) if type(text) is str else None
        if known is not None:
            return known
        try:
            formula = Formula(text)
        except FormulaError as error:
            raise self.fail(f"{where} {what}", str(error)) from None
        unknown = formula.names - FORMULA_NAMES
        if unknown:
            names = ", ".join(sorted(unknown))
            raise self.fail(
                f"{where} {what}", f"formula {text!r} names {names}; known: {', '.join(sorted(FORMULA_NAMES))}"
            )
        self.formulas[text] = formula
        return formula
