"""Users' images in a folder, with a table of their classes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from rayfed.core.files import local_path
from rayfed.data.base import Source, StoredSplit, hold_out_fifth
from rayfed.data.files import ENDINGS, LABEL_COLUMNS, is_image, is_sample, notes_on_files, sort_class_names
from rayfed.data.images import Encoded
from rayfed.data.tables import TABLES, Read, name_ending, read_table
from rayfed.errors import DataError
from rayfed.registry import component

FILE_COLUMNS = ("file", "filename", "file_name", "filepath", "path", "image", "image_id", "image_path", "id", "name")
"""Names (lower case) of the column of file names, in order of preference."""


@component
class ImageTable(Source):
    """Image files, with their classes in a table (separated text or Parquet) with one row per image.

    Without `test` a stratified fifth is the test split. A note counts the images that are not in the table.
    """

    table: Path
    """Path of the table; `~` and environment variables are expanded. Without a header row, columns are named
    `column_1` and so on."""
    images: Path | None = None
    """Folder of the images, which may be in subfolders. Default: the folder of the table."""
    test: Path | None = None
    """Table of the test split, with the same columns."""
    file_column: str | None = None
    """Name of the column of file names, with or without extension. Default: `file`, `path`, `image` or similar; without
    a header row, the first column that names an image."""
    label_column: str | None = None
    """Column of the classes. Default: the only column named `label`, `class`, `target`, `diagnosis` or similar. Without
    a header row, the other one of two columns."""

    def read(self) -> tuple[StoredSplit, StoredSplit, tuple[str, ...]]:
        """Read the images in the order of the table; classes are sorted by number, or else by name."""
        paths, root = self._places()
        files = FolderImages.from_folder(root)
        rows = [self._rows(path, files) for path in paths]
        classes = sort_class_names({label for _, labels in rows for label in labels})
        numbers = {name: number for number, name in enumerate(classes)}
        splits = [StoredSplit(images, np.array([numbers[n] for n in labels], np.int64)) for images, labels in rows]
        if len(splits) == 1:
            return *hold_out_fifth(splits[0], str(paths[0])), classes
        return splits[0], splits[1], classes

    def notes(self) -> Iterator[str]:
        """Yield notes on the layout of the tables, and on unused files."""
        paths, root = self._places()
        files = FolderImages.from_folder(root)
        for path in paths:
            yield from read_table(path).notes
        used = {image.data for path in paths for image in self._rows(path, files)[0]}
        yield from notes_on_files(root, {path for path in used if isinstance(path, Path)}, paths)

    def _places(self) -> tuple[list[Path], Path]:
        """Return the paths of the tables and of the image folder."""
        paths = [local_path(path) for path in (self.table, self.test) if path is not None]
        return paths, local_path(self.images) if self.images is not None else paths[0].parent

    def _rows(self, path: Path, files: FolderImages) -> tuple[list[Encoded], list[str]]:
        """Return the images of a table and the names of their classes."""
        read = read_table(path)
        try:
            found = find_columns(read, self.file_column, self.label_column)
        except DataError as error:
            raise DataError(f"{path}: {error}") from error
        names, labels = (_texts(path, read.table, column) for column in found)
        return [Encoded(str(file), file) for file in files.named(path, names)], labels


class FolderImages:
    """Images in a folder, searched by the file names in a table."""

    def __init__(self, root: Path, known: Mapping[str, list[Path]]) -> None:
        self._root, self._known = root, known

    @classmethod
    def from_folder(cls, root: Path) -> FolderImages:
        """List the images in a folder and its subfolders; raise `DataError` if there is no such folder."""
        if not root.is_dir():
            raise DataError(f"{root} is not a folder; expected the folder of the images")
        known: dict[str, list[Path]] = {}
        for path in sorted(p for p in root.rglob("*") if is_sample(p, root) and p.is_file() and is_image(p)):
            for name in {path.name, path.stem}:
                known.setdefault(name, []).append(path)
        return cls(root, known)

    def named(self, table: Path, names: list[str]) -> list[Path]:
        """Return the files named in a table's rows; raise `DataError` if a row matches no file or several files."""
        return [self._one(f"{table}, row {row} (from 0)", name) for row, name in enumerate(names)]

    def has(self, name: str) -> bool:
        """Return whether the folder contains an image file named `name`."""
        return (self._root / name).is_file() or Path(name).name in self._known

    def _one(self, where: str, name: str) -> Path:
        if (exact := self._root / name).is_file():
            return exact
        ends = Path(name).parts
        same = [path for path in self._known.get(ends[-1] if ends else "", []) if _within(path, ends)]
        if len(same) != 1:
            found = f"{len(same)} images of that name: {', '.join(map(str, same[:3]))}" if same else "no such image"
            raise DataError(
                f"{where}: '{name}', but {self._root} has {found}; write the image's path relative to that folder"
            )
        return same[0]


def tables_of_images(path: Path) -> list[Path]:
    """Return the tables in a folder, or the table itself, whose first row names an image in or below the folder."""
    files = [path] if path.is_file() else sorted(path.iterdir()) if path.is_dir() else []
    return [file for file in files if name_ending(file) in TABLES and is_sample(file, path) and _names_images(file)]


def _names_images(path: Path) -> bool:
    try:
        read = read_table(path)
    except DataError:
        if name_ending(path) in (".data", ".txt"):  # these may be other files than tables
            return False
        raise
    found = _column_of_files(read)
    return found is not None and FolderImages.from_folder(path.parent).has(_first(read, found))


def _column_of_files(read: Read) -> str | None:
    """Return the column of file names, by its name or (without a header row) its first value; None if there is none."""
    if read.has_header:
        return next(iter(_found(read.table, FILE_COLUMNS)), None)
    names: list[str] = read.table.column_names
    return next((name for name in names if Path(_first(read, name)).suffix.lower() in ENDINGS), None)


def _first(read: Read, column: str) -> str:
    """Return the first value of a column if it is a text or a whole number, else an empty string."""
    first = read.table[column].drop_null().slice(0, 1).to_pylist()
    return str(first[0]).strip() if first and isinstance(first[0], str | int) else ""


def find_columns(read: Read, file: str | None, label: str | None) -> tuple[str, str]:
    """Return the names of a table's columns of file names and classes.

    Raises `DataError` for a missing or ambiguous column.
    """
    names = read.table.column_names
    every = ", ".join(names)
    for asked in (file, label):
        if asked is not None and asked.strip() not in names:
            raise DataError(read.missing(asked))
    if file is None:
        file = _column_of_files(read)
    if file is None:
        raise DataError(
            f"no column is named {FILE_COLUMNS[0]} or similar: set `data.file_column` to the column of file names, one "
            f"of {every}"
        )
    if label is None:
        label = _label(read, file.strip(), every)
    return file.strip(), label.strip()


def _label(read: Read, file: str, every: str) -> str:
    others = [name for name in read.table.column_names if name != file]
    if not read.has_header and len(others) == 1:
        return str(others[0])
    found = [name for name in _found(read.table, LABEL_COLUMNS) if name != file]
    if len(found) != 1:
        problem = (
            f"each of the columns {' and '.join(found)} may contain the classes"
            if found
            else "no column is named label or similar"
        )
        raise DataError(f"{problem}: set `data.label_column` to the column of classes, one of {every}")
    return found[0]


def _found(table: pa.Table, names: Sequence[str]) -> list[str]:
    """Return the columns with one of these names, in the order of `names`."""
    known = {name.strip().lower(): name for name in reversed(table.column_names)}
    return [known[name] for name in names if name in known]


def _texts(path: Path, table: pa.Table, column: str) -> list[str]:
    values = table[column].to_pylist()
    for row, value in enumerate(values):
        if value is None or isinstance(value, float | dict | list | bytes):
            raise DataError(f"{path}, row {row} (from 0): '{column}' is {value!r}; expected a name or a whole number")
    return [str(value).strip() for value in values]


def _within(path: Path, ends: tuple[str, ...]) -> bool:
    """Return whether a path ends with these parts, except for the file name."""
    return path.parent.parts[len(path.parent.parts) - len(ends) + 1 :] == ends[:-1]
