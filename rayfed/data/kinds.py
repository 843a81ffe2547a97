"""Detection of file kinds by content: binary formats by their first bytes, structured texts by their start."""

from __future__ import annotations

import re
from io import BytesIO
from pathlib import Path
from typing import NamedTuple
from zipfile import BadZipFile, ZipFile


class FileKind(NamedTuple):
    """Kind of a file that is not a table."""

    name: str
    """Name of the kind, with its article."""
    advice: str
    """Advice on how to convert such a file to a table."""


PARQUET = b"PAR1"
"""First bytes of a Parquet file."""

_AS_TABLE = "save the table as CSV (UTF-8) or Parquet"
_FROM_PYTHON = "load the file in Python and save the table as CSV or Parquet, for example with `DataFrame.to_parquet`"
_UNPACK = "unpack the archive and give the table or folder that it contains"
_IMAGES = "give the folder of the images, with one folder per class or a table of file names and classes"

_BINARY: tuple[tuple[int, bytes, str, str], ...] = (
    (0, b"\x89PNG\r\n\x1a\n", "a PNG image", _IMAGES),
    (0, b"\xff\xd8\xff", "a JPEG image", _IMAGES),
    (0, b"GIF8", "a GIF image", _IMAGES),
    (0, b"II*\0", "a TIFF image", _IMAGES),
    (0, b"MM\0*", "a TIFF image", _IMAGES),
    (8, b"WEBP", "a WebP image", _IMAGES),
    (0, b"BM", "a BMP image", _IMAGES),
    (128, b"DICM", "a DICOM image", _IMAGES),
    (0, PARQUET, "a Parquet file", "rename the file to .parquet"),
    (0, b"ARROW1", "an Arrow or Feather file", "save it as Parquet"),
    (0, b"FEA1", "a Feather file", "save it as Parquet"),
    (0, b"ORC", "an ORC file", "save it as Parquet"),
    (0, b"Obj\x01", "an Avro file", "save it as Parquet"),
    (0, b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "an Excel workbook (.xls) or another old Office file", _AS_TABLE),
    (0, b"SQLite format 3\0", "an SQLite database", "export the table as CSV or Parquet"),
    (0, b"\x89HDF\r\n\x1a\n", "an HDF5 file", _FROM_PYTHON),
    (0, b"\x93NUMPY", "a NumPy array (.npy)", _FROM_PYTHON),
    (0, b"MATLAB", "a MATLAB file", _FROM_PYTHON),
    (0, b"RDX", "an R data file", "save it in R by `write.csv`"),
    (0, b"RDA", "an R data file", "save it in R by `write.csv`"),
    (0, b"$FL", "an SPSS file", _AS_TABLE),
    (0, b"%PDF-", "a PDF document", _AS_TABLE),
    (0, b"\x28\xb5\x2f\xfd", "a Zstandard archive", _UNPACK),
    (0, b"7z\xbc\xaf\x27\x1c", "a 7-Zip archive", _UNPACK),
    (0, b"Rar!\x1a\x07", "a RAR archive", _UNPACK),
    (257, b"ustar", "a tar archive", _UNPACK),
    (0, b"\x7fELF", "a program", _AS_TABLE),
)
"""Offset and bytes of binary formats. Bytes that are letters and digits count only in binary files, as texts may start
with them."""
_PICKLE = re.compile(rb"\x80[\x02-\x05]")
_MEMBERS = (
    ("xl/", FileKind("an Excel workbook (.xlsx)", _AS_TABLE)),
    ("word/", FileKind("a Word document", _AS_TABLE)),
    ("content.xml", FileKind("an OpenDocument file, such as a spreadsheet (.ods)", _AS_TABLE)),
    ("data.pkl", FileKind("a file from torch.save", _FROM_PYTHON)),
    (".npy", FileKind("an archive of NumPy arrays (.npz)", _FROM_PYTHON)),
)
"""Parts of member names that identify the kind of a ZIP archive."""
_STRUCTURED = (
    (r"\s*<(!doctype|html|\?xml|stata_dta|svg)", "an HTML or XML page", f"download the table itself, or {_AS_TABLE}"),
    (r"\s*(\{\s*[\"}]|\[\s*[\[{\"\d\]-])", "a JSON file", f"{_AS_TABLE}, for example by `pandas.read_json`"),
    (r"version https://git-lfs\.", "a Git LFS pointer", "get the file itself with `git lfs pull`"),
    (r"\s*(%[^\n]*\n\s*)*@relation\b", "an ARFF file", f"{_AS_TABLE}, for example by `scipy.io.arff`"),
)
_CONTROL = re.compile(rb"[\x00-\x08\x0e-\x1a\x1c-\x1f]")
_LOOKED_AT = 65_536
"""Number of bytes in which control characters are counted."""
_MOST_CONTROL = 0.02


def binary_kind(content: bytes) -> FileKind | None:
    """Return the kind of a binary file, such as a PNG image, by the first bytes; None for a text file."""
    if content.startswith(b"PK\x03\x04"):
        return _zipped(content)
    if _PICKLE.match(content):
        return FileKind("a Python pickle", _FROM_PYTHON)
    is_binary = has_control_characters(content)
    for offset, magic, name, advice in _BINARY:
        if content[offset : offset + len(magic)] == magic and (is_binary or not magic.isalnum()):
            return FileKind(name, advice)
    return FileKind("a binary file of an unknown kind", _AS_TABLE) if is_binary else None


def has_control_characters(content: bytes) -> bool:
    """Return whether a file's content has more control characters than text files have."""
    seen = content[:_LOOKED_AT]
    return len(_CONTROL.findall(seen)) > _MOST_CONTROL * len(seen)


def structured_kind(text: str) -> FileKind | None:
    """Return the kind of a structured text that is not a table, such as JSON; None for other texts."""
    for pattern, name, advice in _STRUCTURED:
        if re.match(pattern, text[:_LOOKED_AT], re.IGNORECASE):
            return FileKind(name, advice)
    return None


def is_parquet(path: Path) -> bool:
    """Return whether a file is Parquet, by the file's first bytes; False if the file cannot be read."""
    try:
        with path.open("rb") as file:
            begin = file.read(_LOOKED_AT)
    except OSError:
        return False
    return begin.startswith(PARQUET) and has_control_characters(begin)


def _zipped(content: bytes) -> FileKind:
    try:
        with ZipFile(BytesIO(content)) as archive:
            names = archive.namelist()
    except (BadZipFile, OSError, ValueError):
        return FileKind("a damaged ZIP archive", "download the file again")
    for part, kind in _MEMBERS:
        if any(part in name for name in names):
            return kind
    return FileKind("a ZIP archive", _UNPACK)
