"""Hypothesis strategies that damage documents, texts, tables and files by small lists of changes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from datetime import date
from io import BytesIO
from math import isfinite
from pathlib import PurePath
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from hypothesis import strategies as st

MARK = "<fuzz>"
"""Text that pages must not interpret as a tag."""
ODD: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, 10**30, -(10**30), 1e308, float("nan"), float("inf"), -float("inf"), 0.5,
    "", "x", "../../etc", "a.b", "1", "ünï\u202e", MARK, "os:system", "rayfed.errors:UserError", "no_such:Thing",
    [], {}, [[]], [None], {"name": None}, {"name": "x"}, {1: 2}, {None: None}, {"name": ["a"]}, {"name": "gaussian"},
    [1, 2], ["a"], b"bytes", date(2020, 1, 1), "x" * 500, {"low": 1, "high": "a"}, {"a": {"a": {"a": []}}},
]  # fmt: skip
KEYS: list[Any] = ["x", 1, None, "name", True, "arms", "sweep"]
CELLS: list[Any] = [None, "", MARK, float("nan"), float("inf"), -1, 2**31 - 1, b"\xff", "../..", "trials/0000-0", True]
SCRAPS = ["", "\t", "&a ", "*a", "!!int ", "!!bool ", "!!set ", "{", "]", "- ", ": ", '"\\ud800"', "\x85", "<<: "]

Place = tuple[Any, ...]
"""Keys and indices that lead to a value of a document."""


# Documents


@dataclass(frozen=True)
class Put:
    """Replace or add the value at a place."""

    place: Place
    value: Any

    def apply(self, document: Any) -> None:
        *above, last = self.place
        parent = _at(document, above)
        if isinstance(parent, list) and last == len(parent):
            parent.append(deepcopy(self.value))
        else:
            parent[last] = deepcopy(self.value)


@dataclass(frozen=True)
class Drop:
    """Remove the value at a place."""

    place: Place

    def apply(self, document: Any) -> None:
        *above, last = self.place
        del _at(document, above)[last]


Change = Put | Drop


@st.composite
def changes(draw: st.DrawFn, document: Any) -> list[Change]:
    """Generate one to four changes that can be applied to a document in sequence."""
    document, drawn = deepcopy(document), list[Change]()
    for _ in range(draw(st.integers(1, 4))):
        if places := list(_places(document)):
            drawn.append(draw(_change(document, places)))
            drawn[-1].apply(document)
    return drawn


def _change(document: Any, places: Sequence[Place]) -> st.SearchStrategy[Change]:
    place = st.sampled_from(places)
    values = st.sampled_from(ODD) | place.map(lambda at: deepcopy(_at(document, at)))
    # The document and its mappings and lists, to which an entry can be added.
    wholes = [(), *(at for at in places if isinstance(_at(document, at), dict | list))]
    added = st.builds(lambda at, key: _new(document, at, key), st.sampled_from(wholes), st.sampled_from(KEYS))
    return st.builds(Put, place, values) | st.builds(Drop, place) | st.builds(Put, added, values)


def _new(document: Any, whole: Place, key: Any) -> Place:
    """Return the place of a new entry in a mapping or list."""
    inside = _at(document, whole)
    return (*whole, len(inside) if isinstance(inside, list) else key)


def changed(document: Any, made: Sequence[Change]) -> Any:
    """Return a copy of a document with changes applied."""
    document = deepcopy(document)
    for change in made:
        change.apply(document)
    return document


def dumped(document: Any) -> str:
    """Return a document as YAML."""
    return str(yaml.safe_dump(document, allow_unicode=True, sort_keys=False))


def _places(document: Any, path: Place = ()) -> Iterator[Place]:
    entries = document.items() if isinstance(document, dict) else enumerate(document)
    for key, value in entries:
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from _places(value, (*path, key))


def _at(document: Any, path: Sequence[Any]) -> Any:
    for key in path:
        document = document[key]
    return document


# Files


class Damage(Protocol):
    """A change of a file."""

    def of(self, content: bytes) -> bytes | None:
        """Return the changed content; None if the file is removed."""


@dataclass(frozen=True)
class Cut:
    """Keep only the first bytes."""

    length: int

    def of(self, content: bytes) -> bytes:
        return content[: self.length]


@dataclass(frozen=True)
class Flip:
    """Overwrite bytes, given as (index, byte)."""

    written: list[tuple[int, int]]

    def of(self, content: bytes) -> bytes:
        flipped = bytearray(content)
        for place, byte in self.written:
            flipped[place] = byte
        return bytes(flipped)


@dataclass(frozen=True)
class Remove:
    """Remove the file."""

    def of(self, content: bytes) -> None:
        return None


@dataclass(frozen=True)
class Splice:
    """Replace some characters by a short text."""

    place: int
    scrap: str
    removed: int

    def of(self, content: bytes) -> bytes:
        text = content.decode()
        return (text[: self.place] + self.scrap + text[self.place + self.removed :]).encode()


@dataclass(frozen=True)
class Edit:
    """Change the document in a JSON or YAML file."""

    changes: list[Change]
    json: bool

    def of(self, content: bytes) -> bytes:
        document = changed(yaml.safe_load(content), self.changes)
        return (json.dumps(document, default=str, skipkeys=True) if self.json else dumped(document)).encode()


@dataclass(frozen=True)
class Rows:
    """Keep only the first rows of a table."""

    count: int

    def of(self, content: bytes) -> bytes:
        return _parquet(_table(content).slice(0, self.count))


@dataclass(frozen=True)
class Column:
    """Drop (`to` None) or rename a column of a table."""

    name: str
    to: str | None

    def of(self, content: bytes) -> bytes:
        table = _table(content)
        if self.to is None:
            return _parquet(table.drop_columns([self.name]))
        return _parquet(table.rename_columns([self.to if n == self.name else n for n in table.column_names]))


@dataclass(frozen=True)
class Retype:
    """Fill a column with one value, whatever its type."""

    name: str
    value: Any

    def of(self, content: bytes) -> bytes:
        table = _table(content)
        return _parquet(_with_column(table, self.name, pa.array([self.value] * len(table))))


@dataclass(frozen=True)
class BreakText:
    """Fill a column with text that is not UTF-8."""

    name: str

    def of(self, content: bytes) -> bytes:
        table = _table(content)
        buffers = pa.array([b"\xff\xfe"] * len(table), pa.binary()).buffers()
        return _parquet(_with_column(table, self.name, pa.Array.from_buffers(pa.string(), len(table), buffers)))


@dataclass(frozen=True)
class Cells:
    """Put a value into the first cell or all cells of a column, if its type allows it."""

    name: str
    value: Any
    all: bool

    def of(self, content: bytes) -> bytes:
        table = _table(content)
        rows = table.to_pylist()
        for row in rows if self.all else rows[:1]:
            row[self.name] = self.value
        with suppress(pa.ArrowException, OverflowError):
            return _parquet(pa.Table.from_pylist(rows, schema=table.schema))
        return content


def damages(name: str, content: bytes) -> st.SearchStrategy[Damage]:
    """Generate damages of a file with this name and content. Two thirds are other valid content of its kind."""
    places = st.integers(0, max(0, len(content) - 1))
    flips = st.lists(st.tuples(places, st.integers(0, 255)), min_size=1, max_size=50 if content else 0)
    cuts = st.integers(0, len(content))
    raw = st.builds(Remove) | st.builds(Cut, cuts) | (st.builds(Flip, flips) if content else st.nothing())
    match PurePath(name).suffix:
        case ".json" | ".yaml" as suffix:
            inside = changes(yaml.safe_load(content)).map(lambda made: Edit(made, suffix == ".json"))
        case ".parquet":
            inside = _table_damages(_table(content))
        case _:
            return raw
    return st.one_of(inside, inside, raw)


def _table_damages(table: pa.Table) -> st.SearchStrategy[Damage]:
    names = st.sampled_from(table.column_names)
    return st.one_of(
        st.builds(Cells, names, st.sampled_from(CELLS), st.booleans()),
        st.builds(Column, names, st.sampled_from([None, "x?"])),
        st.builds(Retype, names, st.sampled_from([None, "a", 1, [1], {"a": 1}, b"\xff", float("nan")])),
        st.builds(BreakText, names),
        st.builds(Rows, st.sampled_from([0, 1])),
    )


def splices(text: str) -> st.SearchStrategy[list[Splice]]:
    """Generate one to three replacements in a text."""
    one = st.builds(Splice, st.integers(0, len(text)), st.sampled_from(SCRAPS), st.sampled_from([0, 1, 20]))
    return st.lists(one, min_size=1, max_size=3)


@st.composite
def damaged_files(draw: st.DrawFn, files: Mapping[str, bytes]) -> dict[str, Damage]:
    """Generate damages for one or two files of a folder. Half of the files are at the top level."""
    top = [name for name in files if "/" not in name]
    chosen = draw(st.lists(st.sampled_from(top) | st.sampled_from(list(files)), min_size=1, max_size=2, unique=True))
    return {name: draw(damages(name, files[name])) for name in chosen}


def _with_column(table: pa.Table, name: str, column: pa.Array) -> pa.Table:
    return table.set_column(table.column_names.index(name), name, column)


def _table(content: bytes) -> pa.Table:
    return pq.read_table(BytesIO(content))


def _parquet(table: pa.Table) -> bytes:
    buffer = BytesIO()
    pq.write_table(table, buffer)
    return buffer.getvalue()


# What is accepted


def assert_finite(value: Any, where: str = "") -> None:
    """Check that every number in a container is finite. None and text are allowed."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            assert_finite(inner, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            assert_finite(inner, f"{where}[{index}]")
    elif isinstance(value, float):
        assert isfinite(value), f"{where} is {value}"
