"""Tables in users' files: separated texts and Parquet."""

from __future__ import annotations

import bz2
import gzip
import lzma
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from rayfed.data.encodings import UTF_8, decoded, is_wide
from rayfed.data.kinds import PARQUET, binary_kind, structured_kind
from rayfed.data.layouts import DELIMITERS, Layout, irregular, layout_of
from rayfed.data.numbers import Found, with_numbers
from rayfed.errors import DataError, nearest

TABLES = frozenset({".csv", ".data", ".parquet", ".psv", ".tab", ".tsv", ".txt"})
"""Endings of tables, which one of `PACKED` may follow."""
PACKED: dict[str, tuple[bytes, Callable[[bytes], bytes]]] = {
    ".gz": (b"\x1f\x8b", gzip.decompress),
    ".bz2": (b"BZh", bz2.decompress),
    ".xz": (b"\xfd7zXZ\0", lzma.decompress),
}
"""Endings of compressed files, with their first bytes and how to unpack them."""
_TABS = frozenset({".tab", ".tsv"})
_NAMED = 4
"""Number of columns that a note names."""


class Read(NamedTuple):
    """A table as it was read."""

    table: pa.Table
    notes: tuple[str, ...] = ()
    """Differences from a comma-separated file in UTF-8 with a header row."""
    has_header: bool = True
    """Whether the names of the columns are the file's own."""

    def missing(self, name: str) -> str:
        """Return in words that there is no column of a name, and which there are."""
        names = self.table.column_names
        return f"no column '{name}': {nearest(name, names)}" + "; it has no header row" * (not self.has_header)


def read_table(path: Path) -> Read:
    """Read a table in any layout that can be recognised.

    Names of columns lose surrounding spaces. In a text, whole numbers of which some begin with 0 are codes, such as
    postcodes, and stay text. Raises `DataError`, naming the file, for another kind of file, an ambiguous layout, and
    a column's name that is there twice.
    """
    found = _read(path)
    names = found.table.column_names
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise DataError(f"{path}: two columns are called '{twice[0]}': rename one")
    stripped = [name.strip() for name in names]
    return found._replace(table=found.table.rename_columns(stripped)) if len(set(stripped)) == len(names) else found


def name_ending(path: Path) -> str:
    """Return the ending of a table's name in small letters, without that of a compressed file."""
    inner = Path(path.stem) if path.suffix.lower() in PACKED else path
    return inner.suffix.lower()


def _read(path: Path) -> Read:
    if path.is_dir() and path.suffix == ".parquet":  # as Spark writes it
        return _parquet(path, path)
    try:
        content = _unpacked(path, path.read_bytes())
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}; give an existing table") from error
    kind = None if is_wide(content) else binary_kind(content)
    if kind is None:
        return _separated(path, content)
    if content.startswith(PARQUET):
        return _parquet(path, pa.BufferReader(_in_arrow(content)))
    raise DataError(f"{path} is {kind.name}, expected a table: {kind.advice}")


def _unpacked(path: Path, content: bytes) -> bytes:
    for magic, unpack in PACKED.values():
        if content.startswith(magic):
            try:
                return unpack(content)
            except (EOFError, OSError, ValueError, lzma.LZMAError, zlib.error) as error:
                raise DataError(f"{path} cannot be unpacked: {error}; fetch it again") from error
    return content


def _in_arrow(content: bytes) -> pa.Buffer:
    """Return a copy in memory of Arrow: its threads abort if they release Python's as the interpreter exits."""
    stream = pa.BufferOutputStream()
    stream.write(content)
    return stream.getvalue()


def _parquet(path: Path, source: Path | pa.BufferReader) -> Read:
    """Read Parquet, whatever the file's name; a name of a column that is no text is found here, too."""
    try:
        table = pq.read_table(source)
        is_called = bool(table.column_names) and name_ending(path) == ".parquet"
    except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
        raise DataError(f"{path} cannot be read: {error}; expected a whole Parquet file") from error
    return Read(table, () if is_called else (f"data: {path.name} is a Parquet file and is read as one",))


def _separated(path: Path, content: bytes) -> Read:
    """Read a text with a separator between its fields."""
    if name_ending(path) == ".parquet":
        raise DataError(f"{path} is text, expected a whole Parquet file: give it the ending .csv if it is a table")
    content = content.removesuffix(b"\x1a")  # the end of a file in DOS
    text, encoding = decoded(str(path), content)
    if kind := structured_kind(text):
        raise DataError(f"{path} is {kind.name}, expected a table: {kind.advice}")
    usual = "\t" if name_ending(path) in _TABS else ","
    layout = layout_of(str(path), text, usual)
    is_plain = encoding == UTF_8 and not layout.start
    data = _in_arrow(content if is_plain else text[layout.start :].encode())

    def read(**options: Any) -> pa.Table:
        return pyarrow.csv.read_csv(
            pa.BufferReader(data),
            read_options=pyarrow.csv.ReadOptions(column_names=layout.columns),
            parse_options=pyarrow.csv.ParseOptions(delimiter=layout.delimiter, newlines_in_values='"' in text),
            convert_options=pyarrow.csv.ConvertOptions(strings_can_be_null=True, **options),
        )

    def written(names: Sequence[str]) -> pa.Table:
        return read(include_columns=names, column_types=dict.fromkeys(names, pa.string()))

    try:
        table = read()
        if len(set(table.column_names)) < table.num_columns:
            return Read(table)  # which is refused
        table = _with_codes(table, written)
        found = with_numbers(str(path), table, layout.delimiter, layout.delimiter == usual, written)
    except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
        raise irregular(str(path), text, layout.start, layout.delimiter) from error
    notes = tuple(_notes(path, layout, usual, encoding, found))
    return Read(found.table, notes, layout.columns is None)


def _with_codes(table: pa.Table, written: Callable[[Sequence[str]], pa.Table]) -> pa.Table:
    """Return a table in which whole numbers stay text if some of their column begin with 0."""
    whole = [field.name for field in table.schema if pa.types.is_integer(field.type)]
    as_text = written(whole) if whole else table
    for name in whole:
        if pc.any(pc.match_substring_regex(as_text[name], r"^\s*0[0-9]")).as_py():
            table = table.set_column(table.column_names.index(name), name, as_text[name])
    return table


def _notes(path: Path, layout: Layout, usual: str, encoding: str, found: Found) -> Iterator[str]:
    """Yield notes on all that was detected and is unusual."""
    detected = [f"fields are separated by {DELIMITERS[layout.delimiter]}"] if layout.delimiter != usual else []
    if encoding != UTF_8:
        detected.append(f"the encoding is {encoding}")
    if layout.comments:
        detected.append(f"comment lines before the table: {layout.comments}")
    for names, has in ((found.decimal_comma, "decimal comma"), (found.thousands, "thousands separators")):
        if names:
            detected.append(f"numbers with {has}: {_listed(names)}")
    if detected:
        yield f"data: detected in {path.name}: {'; '.join(detected)}"
    if layout.columns is not None:
        yield (f"data: {path.name} has no header row: its columns are called column_1 to column_{len(layout.columns)}")
    for name in found.left:
        yield (
            f"column '{name}' has numbers with a decimal comma, but the table has decimal points, too: the column is "
            f"text; write all numbers with decimal points"
        )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED]) + f" and {len(names) - _NAMED} more" * (len(names) > _NAMED)
