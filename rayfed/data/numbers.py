"""Parsing of numbers with a decimal comma or thousands separators in the columns of a table.

The decimal mark of a column is inferred from its numbers. For ambiguous numbers such as 1,234, the mark of the other
columns is used, or else the usual mark for the field separator. If both are unknown, the column is rejected.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from rayfed.errors import DataError

_GROUPS = "'’\u00a0\u202f "
"""Thousands separators that cannot be decimal marks."""
_MISSING = ("?", "-")


class _Reading(NamedTuple):
    """Meaning of the marks in numbers."""

    decimal: str
    group: str
    pattern: str

    @classmethod
    def from_marks(cls, decimal: str, group: str) -> _Reading:
        mark = re.escape(decimal)
        groups = "|".join(rf"(?:{re.escape(one)}\d{{3}})+" for one in group + _GROUPS)
        grouped = rf"[1-9]\d{{0,2}}(?:{groups})(?:{mark}\d+)?"
        others = rf"(?:(?:0|[1-9]\d*)(?:{mark}\d+)?|{mark}\d+)(?:[eE][-+]?\d+)?"
        return cls(decimal, group, rf"^[-+]?(?:{grouped}|{others})$")

    def fits(self, text: str) -> bool:
        """Return whether a text is a number with these decimal and thousands marks."""
        return re.match(self.pattern, text.strip(), re.ASCII) is not None

    def plain(self, texts: pa.ChunkedArray) -> pa.ChunkedArray:
        """Convert numbers in texts to Python's notation; other texts are unchanged."""
        trimmed = pc.utf8_trim_whitespace(texts)
        ungrouped = pc.replace_substring_regex(trimmed, f"[{self.group}{_GROUPS}]", "")
        plain = pc.replace_substring(ungrouped, self.decimal, ".")
        return pc.if_else(pc.match_substring_regex(trimmed, self.pattern), plain, texts)


COMMA, POINT = _Reading.from_marks(",", "."), _Reading.from_marks(".", ",")


def is_number(text: str) -> bool:
    """Return whether a text is a number, with a decimal point or a decimal comma."""
    return POINT.fits(text) or COMMA.fits(text)


def parse_number(text: str) -> float:
    """Convert a text to a number; if the marks are ambiguous, as in 1,234, assume a decimal point."""
    reading = POINT if POINT.fits(text) else COMMA
    return float(reading.plain(pa.chunked_array([[text]]))[0].as_py())


class ConvertedTable(NamedTuple):
    """Table with converted columns of numbers, and the names of these columns."""

    table: pa.Table
    decimal_comma: list[str]
    thousands: list[str]
    left: list[str]
    """Columns that stay text because the table also has decimal points."""


class _Column:
    """A column as written, with its distinct texts grouped by the decimal marks that they fit."""

    def __init__(self, name: str, written: pa.ChunkedArray) -> None:
        self.name, self.written = name, written
        texts = pc.unique(pc.utf8_trim_whitespace(written)).drop_null()
        point, comma = (pc.match_substring_regex(texts, reading.pattern) for reading in (POINT, COMMA))
        numbers, others = texts.filter(pc.or_(point, comma)), texts.filter(pc.invert(pc.or_(point, comma)))
        self.only = {
            POINT: texts.filter(pc.and_not(point, comma)),
            COMMA: texts.filter(pc.and_not(comma, point)),
        }
        both = texts.filter(pc.and_(point, comma))
        self.either = both.filter(pc.match_substring_regex(both, "[.,]"))
        self.is_number = len(numbers) > 0 and set(others.to_pylist()) <= {*_MISSING}
        self.is_mostly_number = len(others) <= len(numbers)
        self.is_marked = not pc.all(pc.match_substring_regex(numbers, r"^[-+]?\d+$")).as_py()

    def has(self, marks: str) -> bool:
        """Return whether a number has one of these marks."""
        pattern = f"[{marks}]"
        every = (*self.only.values(), self.either)
        return any(pc.any(pc.match_substring_regex(texts, pattern)).as_py() for texts in every)

    def first(self, texts: pa.Array) -> str:
        """Return the first of some texts in the column with its row number, for messages."""
        row = pc.index(pc.utf8_trim_whitespace(self.written), texts[0]).as_py()
        return f"'{texts[0]}' (row {row}, from 0)"

    def read(self, reading: _Reading) -> pa.ChunkedArray:
        """Return the column as numbers, or as text with plain numbers if it also has other texts."""
        plain = reading.plain(self.written)
        for kind in (pa.int64(), pa.float64()):
            try:
                return plain.cast(kind)
            except pa.ArrowInvalid:
                continue
        return plain


def with_numbers(
    where: str, table: pa.Table, delimiter: str, is_usual: bool, written: Callable[[Sequence[str]], pa.Table]
) -> ConvertedTable:
    """Convert text columns to numbers if they have a decimal comma or thousands separators.

    If the field separator `is_usual` for the file's extension, decimal points are expected, so a column with other
    texts is unchanged. `written` returns columns as text. Raises `DataError`, naming column and row, for ambiguous
    numbers.
    """
    columns = _columns(table, delimiter, is_usual, written)
    marks = [reading for reading in (POINT, COMMA) if any(c.is_number and len(c.only[reading]) for c in columns)]
    found = ConvertedTable(table, [], [], [])
    for column in columns:
        reading = _reading(where, column, marks, delimiter, is_usual)
        if reading is None:
            found.left.append(column.name)
        elif reading is COMMA or not pa.types.is_floating(table[column.name].type):
            place = found.table.column_names.index(column.name)
            found = found._replace(table=found.table.set_column(place, column.name, column.read(reading)))
            _note(found, column, reading)
    return found


def _columns(
    table: pa.Table, delimiter: str, is_usual: bool, written: Callable[[Sequence[str]], pa.Table]
) -> list[_Column]:
    """Return the columns of numbers that may have other marks; empty for a plain file, which saves time."""
    texts = [name for name in table.column_names if pa.types.is_string(table[name].type)]
    if is_usual:
        texts = [name for name in texts if pc.any(pc.match_substring(table[name], ",")).as_py()]
    columns = [_Column(name, table[name]) for name in texts]
    columns = [column for column in columns if column.is_number or (column.is_mostly_number and not is_usual)]
    if delimiter == ";" or any(len(column.only[COMMA]) or len(column.either) for column in columns):
        floats = [name for name in table.column_names if pa.types.is_floating(table[name].type)]
        as_text = written(floats) if floats else table
        columns += [_Column(name, as_text[name]) for name in floats]
    return [column for column in columns if column.is_marked]


def _reading(where: str, column: _Column, marks: Sequence[_Reading], delimiter: str, is_usual: bool) -> _Reading | None:
    """Return the marks of a column; None if it stays text. Raises `DataError` if it is ambiguous."""
    comma, point = column.only[COMMA], column.only[POINT]
    if len(comma) and is_usual and (len(point) or (POINT in marks and delimiter == ",")):
        return None
    if len(comma) and len(point):
        raise DataError(
            f"{where}: column '{column.name}' has {column.first(comma)} and {column.first(point)}: use one decimal mark"
        )
    if len(comma) or len(point) or not len(column.either):
        return COMMA if len(comma) else POINT
    if len(marks) == 1:
        return marks[0]
    if delimiter == "," or (delimiter != ";" and not marks and not column.has(",")):
        return POINT
    raise DataError(
        f"{where}: column '{column.name}' has {column.first(column.either)}, which is ambiguous (decimal mark or "
        f"thousands separator): write numbers without thousands separators, and with a decimal point"
    )


def _note(found: ConvertedTable, column: _Column, reading: _Reading) -> None:
    """Add a column's name to the lists of columns with a decimal comma and with thousands separators."""
    if reading is COMMA and column.has(","):
        found.decimal_comma.append(column.name)
    if column.has(reading.group + _GROUPS) or not column.has(".,"):
        found.thousands.append(column.name)
