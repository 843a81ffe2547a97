"""Reading of tables in users' files: separated text and Parquet."""

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

from rayfed.data.encodings import UTF_8, decode_text, is_wide
from rayfed.data.kinds import PARQUET, binary_kind, structured_kind
from rayfed.data.layouts import DELIMITERS, TableLayout, detect_layout, irregular_row_error
from rayfed.data.numbers import ConvertedTable, with_numbers
from rayfed.errors import DataError, nearest

TABLES = frozenset({".csv", ".data", ".parquet", ".psv", ".tab", ".tsv", ".txt"})
"""Extensions of tables, which an extension in `PACKED` may follow."""
PACKED: dict[str, tuple[bytes, Callable[[bytes], bytes]]] = {
    ".gz": (b"\x1f\x8b", gzip.decompress),
    ".bz2": (b"BZh", bz2.decompress),
    ".xz": (b"\xfd7zXZ\0", lzma.decompress),
}
"""Extensions of compressed files, with their first bytes and a function that unpacks them."""
_TABS = frozenset({".tab", ".tsv"})
_NAMED = 4
"""Maximum number of columns that a note names."""


class Read(NamedTuple):
    """Table read from a file, with notes on the file's layout."""

    table: pa.Table
    notes: tuple[str, ...] = ()
    """Notes on differences from a comma-separated file in UTF-8 with a header row."""
    has_header: bool = True
    """Whether the file has a header row with the names of columns."""

    def missing(self, name: str) -> str:
        """Return the text of an error about an unknown column `name`, with similar column names."""
        names = self.table.column_names
        return f"no column '{name}': {nearest(name, names)}" + "; the table has no header row" * (not self.has_header)


def read_table(path: Path) -> Read:
    """Read a table from a file, with automatic detection of the file's layout.

    Spaces around names of columns are removed. Columns with whole numbers that start with 0, such as postcodes, stay
    text. Raises `DataError`, naming the file, for another kind of file, an ambiguous layout, and duplicate names of
    columns.
    """
    found = _read(path)
    names = found.table.column_names
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise DataError(f"{path}: two columns are named '{twice[0]}': rename one of them")
    stripped = [name.strip() for name in names]
    return found._replace(table=found.table.rename_columns(stripped)) if len(set(stripped)) == len(names) else found


def name_ending(path: Path) -> str:
    """Return the extension of a table's file name in lower case, without the extension of a compressed file."""
    inner = Path(path.stem) if path.suffix.lower() in PACKED else path
    return inner.suffix.lower()


def _read(path: Path) -> Read:
    if path.is_dir() and path.suffix == ".parquet":  # Spark writes such folders
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
                raise DataError(f"{path} cannot be unpacked: {error}; download the file again") from error
    return content


def _in_arrow(content: bytes) -> pa.Buffer:
    """Return a copy in Arrow's memory, as Arrow's threads abort if they release Python memory at exit."""
    stream = pa.BufferOutputStream()
    stream.write(content)
    return stream.getvalue()


def _parquet(path: Path, source: Path | pa.BufferReader) -> Read:
    """Read Parquet, for any file name; raises `DataError` for damaged files and for invalid names of columns."""
    try:
        table = pq.read_table(source)
        is_called = bool(table.column_names) and name_ending(path) == ".parquet"
    except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
        raise DataError(f"{path} cannot be read: {error}; expected a complete Parquet file") from error
    return Read(table, () if is_called else (f"data: {path.name} is read as a Parquet file",))


def _separated(path: Path, content: bytes) -> Read:
    """Read a text table with a separator between its fields."""
    if name_ending(path) == ".parquet":
        raise DataError(f"{path} is text, expected a complete Parquet file: if it is a table, rename the file to .csv")
    content = content.removesuffix(b"\x1a")  # end-of-file mark of DOS
    text, encoding = decode_text(str(path), content)
    if kind := structured_kind(text):
        raise DataError(f"{path} is {kind.name}, expected a table: {kind.advice}")
    usual = "\t" if name_ending(path) in _TABS else ","
    layout = detect_layout(str(path), text, usual)
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
            return Read(table)  # `read_table` raises the error
        table = _with_codes(table, written)
        found = with_numbers(str(path), table, layout.delimiter, layout.delimiter == usual, written)
    except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
        raise irregular_row_error(str(path), text, layout.start, layout.delimiter) from error
    notes = tuple(_notes(path, layout, usual, encoding, found))
    return Read(found.table, notes, layout.columns is None)


def _with_codes(table: pa.Table, written: Callable[[Sequence[str]], pa.Table]) -> pa.Table:
    """Return a table in which columns of whole numbers stay text if some numbers start with 0."""
    whole = [field.name for field in table.schema if pa.types.is_integer(field.type)]
    as_text = written(whole) if whole else table
    for name in whole:
        if pc.any(pc.match_substring_regex(as_text[name], r"^\s*0[0-9]")).as_py():
            table = table.set_column(table.column_names.index(name), name, as_text[name])
    return table


def _notes(path: Path, layout: TableLayout, usual: str, encoding: str, found: ConvertedTable) -> Iterator[str]:
    """Yield notes on unusual features of the layout."""
    detected = [f"fields are separated by {DELIMITERS[layout.delimiter]}"] if layout.delimiter != usual else []
    if encoding != UTF_8:
        detected.append(f"encoding {encoding}")
    if layout.comments:
        detected.append(f"comment lines before the table: {layout.comments}")
    for names, has in ((found.decimal_comma, "decimal comma"), (found.thousands, "thousands separators")):
        if names:
            detected.append(f"numbers with {has}: {_listed(names)}")
    if detected:
        yield f"data: layout detected in {path.name}: {'; '.join(detected)}"
    if layout.columns is not None:
        yield (f"data: {path.name} has no header row: the columns are named column_1 to column_{len(layout.columns)}")
    for name in found.left:
        yield (
            f"column '{name}' has numbers with a decimal comma, but the table also has decimal points: the column is "
            f"read as text; write all numbers with decimal points"
        )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED]) + f" and {len(names) - _NAMED} more" * (len(names) > _NAMED)
