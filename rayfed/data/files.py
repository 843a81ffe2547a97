"""Image files and tables in users' folders."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
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
    """Read a table; raises `DataError` if it cannot be read or repeats a column's name."""
    absent = pyarrow.csv.ConvertOptions(strings_can_be_null=True)
    separated = pyarrow.csv.ParseOptions(delimiter="\t" if path.suffix == ".tsv" else ",")
    try:
        if path.suffix == ".parquet":
            table = pq.read_table(path)
        else:
            table = pyarrow.csv.read_csv(path, parse_options=separated, convert_options=absent)
        names = table.column_names
    except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
        raise DataError(
            f"{path} cannot be read: {error}; expected a .csv or .tsv with names in line 1, or a .parquet"
        ) from error
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise DataError(f"{path}: two columns are called '{twice[0]}': rename one")
    return table


def by_value(names: set[str]) -> tuple[str, ...]:
    """Return the names of classes sorted, numerically if all are numbers, else alphabetically."""
    numbers = all(name.removeprefix("-").isdecimal() for name in names)
    return tuple(sorted(names, key=int) if numbers else sorted(names))
