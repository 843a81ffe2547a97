"""Image files and tables in users' folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from rayfed.data.dicom import is_dicom
from rayfed.errors import DataError

ENDINGS = frozenset(
    {".bmp", ".dcm", ".dicom", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
)
TABLES = frozenset({".csv", ".tsv", ".parquet"})
LABEL_COLUMNS = ("label", "labels", "class", "target", "diagnosis", "category", "dx")
"""Names, in small letters, by which the column of the classes is found."""


def is_image(path: Path) -> bool:
    """Return whether a file is an image, by its suffix or, for DICOM, by its content."""
    if path.suffix.lower() in ENDINGS:
        return True
    if path.suffix[1:].isalpha():  # no number of a DICOM identifier: another kind of file
        return False
    try:
        with path.open("rb") as file:
            return is_dicom(file.read(132))
    except OSError:
        return False


def read_table(path: Path) -> pa.Table:
    """Read a table; raises `DataError` if it cannot be read or repeats a column's name.

    In a file of text, whole numbers of which some begin with 0 are codes, such as postcodes, and stay text.
    """
    try:
        table = pq.read_table(path) if path.suffix == ".parquet" else _separated(path)
        names = table.column_names
    except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
        raise DataError(
            f"{path} cannot be read: {error}; expected a .csv or .tsv with names in line 1, or a .parquet"
        ) from error
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise DataError(f"{path}: two columns are called '{twice[0]}': rename one")
    return table


def _separated(path: Path) -> pa.Table:
    """Read a `.csv` or `.tsv` file."""
    between = pyarrow.csv.ParseOptions(delimiter="\t" if path.suffix == ".tsv" else ",")

    def read(**options: Any) -> pa.Table:
        absent = pyarrow.csv.ConvertOptions(strings_can_be_null=True, **options)
        return pyarrow.csv.read_csv(path, parse_options=between, convert_options=absent)

    table = read()
    if len(set(table.column_names)) < table.num_columns:
        return table  # which is refused
    whole = [field.name for field in table.schema if pa.types.is_integer(field.type)]
    written = read(include_columns=whole, column_types=dict.fromkeys(whole, pa.string())) if whole else table
    for name in whole:
        if pc.any(pc.match_substring_regex(written[name], r"^\s*0[0-9]")).as_py():
            table = table.set_column(table.column_names.index(name), name, written[name])
    return table


def by_value(names: set[str]) -> tuple[str, ...]:
    """Return the names of classes sorted, numerically if all are numbers, else alphabetically."""
    numbers = all(name.removeprefix("-").isdecimal() for name in names)
    return tuple(sorted(names, key=int) if numbers else sorted(names))
