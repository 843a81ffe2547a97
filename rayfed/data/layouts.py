"""Detection of a text table's layout: leading lines, field separator, and whether there is a header row."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Sequence
from io import StringIO
from itertools import islice, pairwise
from pathlib import PurePath
from typing import NamedTuple

from rayfed.data.numbers import COMMA, is_number, parse_number
from rayfed.errors import DataError

DELIMITERS = {",": "','", ";": "';'", "\t": "tab", "|": "'|'"}
"""Field separators, with their names."""
_TRIED = 1000
"""Number of rows from which the layout is detected."""
DATE = re.compile(r"\d{1,4}([-./])\d{1,2}\1\d{1,4}([T ]\d.*)?")
_DECLARED = re.compile(r"sep=(.)\s*", re.IGNORECASE)
_MISSING = frozenset({"", "NA", "N/A", "NaN", "nan", "null", "NULL", "?", "-"})
_FIX = "save the table with one separator, and put fields that contain the separator in double quotes"

Row = list[str]


class TableLayout(NamedTuple):
    """Layout of a text table: start, field separator and column names."""

    start: int
    """Number of characters before the table."""
    comments: int
    """Number of comment lines before the table."""
    delimiter: str
    columns: list[str] | None
    """Names of the columns if there is no header row; None if there is a header row."""


def detect_layout(where: str, text: str, usual: str) -> TableLayout:
    """Return the layout of a text table.

    Raises `DataError`, naming the file `where`, if the layout is ambiguous or irregular. `usual` is the separator that
    the file's extension implies.
    """
    start, comments, declared = _before(text)
    table = text[start:]
    if not table.strip():
        raise DataError(f"{where} is empty: expected a table with the names of its columns in the first row")
    delimiter = declared or _delimiter(where, text, start, usual)
    rows = [row for _, row in _rows(table, delimiter, _TRIED)]
    is_named = has_header(rows)
    header = _marked_header(text, comments, delimiter, len(rows[0]), is_named)
    if header is not None:
        return TableLayout(comments[header], header, delimiter, None)
    names = None if is_named else [f"column_{place}" for place in range(1, len(rows[0]) + 1)]
    return TableLayout(start, len(comments), delimiter, names)


def _marked_header(text: str, comments: Sequence[int], delimiter: str, width: int, is_named: bool) -> int | None:
    """Return the index of the comment line that is a header, such as `#id,age`; None if there is none.

    A header has as many fields as the table. A line with a space after `#` counts only if the table has no other
    header.
    """
    fitting = [place for place, start in enumerate(comments) if len(_rows(text[start:], delimiter, 1)[0][1]) == width]
    names = [place for place in fitting if not text[comments[place] :].lstrip()[1:2].isspace()]
    if names:
        return names[0]
    return fitting[-1] if fitting and not is_named else None


def irregular_row_error(where: str, text: str, start: int, delimiter: str) -> DataError:
    """Return the error for the first row whose number of fields differs from the first row of the table."""
    rows, before = _rows(text[start:], delimiter), text.count("\n", 0, start)
    expected, name = len(rows[0][1]), DELIMITERS[delimiter]
    wrong = next(((line, row) for line, row in rows if len(row) != expected), None)
    if wrong is None:
        return DataError(f"{where} cannot be read as a table with the field separator {name}: {_FIX}")
    return DataError(
        f"{where}, line {wrong[0] + before}: {len(wrong[1])} fields separated by {name}, but {expected} in the first "
        f"row: {_FIX}"
    )


def _rows(text: str, delimiter: str, most: int | None = None) -> list[tuple[int, Row]]:
    """Return the non-empty rows, each with the number of its last line, from 1."""
    usual = csv.field_size_limit(len(text) + 1)
    try:
        reader = csv.reader(StringIO(text, newline=""), delimiter=delimiter)
        return list(islice(((reader.line_num, row) for row in reader if row), most))
    finally:
        csv.field_size_limit(usual)


def _before(text: str) -> tuple[int, list[int], str | None]:
    """Return the start of a table, the starts of the comment lines before it, and a separator declared with `sep=`."""
    start, comments, declared = 0, list[int](), None
    for line in StringIO(text, newline=""):
        if found := _DECLARED.fullmatch(line):
            declared = found[1] if found[1] in DELIMITERS else None
        elif line.lstrip().startswith("#"):
            comments.append(start)
        elif line.strip():
            break
        start += len(line)
    return start, comments, declared


def _delimiter(where: str, text: str, start: int, usual: str) -> str:
    """Return the separator with which all rows have the same number of fields, at least two.

    A table with one column has the usual separator. Raises `DataError` if no separator fits, or several do.
    """
    rows = {mark: [row for _, row in _rows(text[start:], mark, _TRIED)] for mark in DELIMITERS}
    widths = {mark: Counter(map(len, found)) for mark, found in rows.items()}
    regular = [mark for mark in DELIMITERS if len(widths[mark]) == 1 and 1 not in widths[mark]]
    if "," in regular and any(_is_decimal(rows[mark][1:]) for mark in regular if mark != ","):
        regular.remove(",")
    if len(regular) > 1:
        names = " or ".join(DELIMITERS[mark] for mark in regular)
        raise DataError(f"{where} is ambiguous, because the field separator may be {names}: {_FIX}")
    if regular:
        return regular[0]
    mark = max(DELIMITERS, key=lambda mark: _agreeing(rows[mark]))
    if _agreeing(rows[mark]) or len(widths[usual]) > 1 or 1 not in widths[usual]:
        raise irregular_row_error(where, text, start, mark)
    if _has_spaces([row[0].split() for row in rows[usual]]):
        raise DataError(f"{where}: the fields seem to be separated by spaces: save the table with commas or tabs")
    return usual


def _agreeing(rows: Sequence[Row]) -> int:
    """Return the number of rows with as many fields as the first row; 0 for one field, or for at most half the rows."""
    width = len(rows[0])
    same = sum(len(row) == width for row in rows)
    return same if width > 1 and 2 * same > len(rows) else 0


def _is_decimal(rows: Sequence[Row]) -> bool:
    """Return whether rows have commas, all of them in numbers."""
    cells = [cell.strip() for row in rows for cell in row if "," in cell]
    return bool(cells) and all(map(COMMA.fits, cells))


def _has_spaces(rows: Sequence[Row]) -> bool:
    """Return whether all rows have the same number of words, at least two, and half of the words are numbers."""
    words = [word for row in rows for word in row]
    same = len({len(row) for row in rows}) == 1 and len(rows[0]) > 1
    return same and 2 * sum(map(is_number, words)) >= len(words)


def has_header(rows: Sequence[Row]) -> bool:
    """Return whether the first row of a table has column names instead of values like the rows below."""
    first, *others = ([cell.strip() for cell in row] for row in rows)
    below = [row for row in others if len(row) == len(first) and row != first]
    if not below or len(first) == 1 or _are_numbered(first):
        return True
    columns = [[cell for cell in column if cell not in _MISSING] for column in zip(*below, strict=True)]
    cells = [pair for pair in zip(first, columns, strict=True) if pair[0] not in _MISSING]
    numeric = [(cell, column) for cell, column in cells if column and all(map(is_number, column))]
    texts = [pair for pair in cells if pair not in numeric]
    if not all(_is_like_numbers(cell, column) for cell, column in numeric):
        return True
    if not numeric:
        return not all(_is_like_texts(cell, column) for cell, column in texts)
    if any(_is_like_texts(cell, column) for cell, column in texts):
        return False
    if any(_repeats(column) for _, column in texts):  # the first row's text is not among the repeated values
        return True
    return _are_even([parse_number(cell) for cell, _ in numeric]) or not _are_within(numeric)


def _is_like_numbers(cell: str, column: Row) -> bool:
    """Return whether a text is a number like the column's, so not a whole number if all others have decimals."""
    whole = [one.isdecimal() for one in (cell, *column)]
    return is_number(cell) and not (whole[0] and not any(whole[1:]))


def _is_like_texts(cell: str, column: Row) -> bool:
    """Return whether a text is in the column, or a date or file name like all values of the column."""
    ending = PurePath(cell).suffix
    is_file = bool(ending) and not is_number(ending) and all(PurePath(one).suffix == ending for one in column)
    return cell in column or (bool(column) and (is_file or all(map(DATE.fullmatch, [cell, *column]))))


def _repeats(column: Row) -> bool:
    """Return whether a column repeats few values, or has dates, so a first row of data would look alike."""
    return bool(column) and (2 * len(set(column)) <= len(column) or all(map(DATE.fullmatch, column)))


def _are_numbered(first: Row) -> bool:
    """Return whether names are consecutive numbers, as written for a DataFrame without column names."""
    cells = [cell for cell in first if cell]
    whole = [int(cell) for cell in cells if cell.isdecimal()]
    return len(cells) > 1 and len(whole) == len(cells) and all(b == a + 1 for a, b in pairwise(whole))


def _are_even(values: Sequence[float]) -> bool:
    """Return whether numbers are evenly spaced, such as years or wavelengths."""
    steps = [b - a for a, b in pairwise(values)]
    return len(steps) > 1 and steps[0] != 0 and all(abs(step - steps[0]) <= 1e-6 * abs(steps[0]) for step in steps)


def _are_within(numeric: Sequence[tuple[str, Row]]) -> bool:
    """Return whether at least half of the first row's numbers are within the range of the numbers below them."""
    within = [
        min(map(parse_number, below)) <= parse_number(cell) <= max(map(parse_number, below)) for cell, below in numeric
    ]
    return 2 * sum(within) >= len(within)
