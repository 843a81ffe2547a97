"""The user's images: a folder of files, and a table of their classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from rayfed.data.base import Source, Split, hold_out_fifth
from rayfed.data.files import LABEL_COLUMNS, TABLES, by_value, is_image, read_table
from rayfed.data.images import Encoded
from rayfed.errors import DataError, nearest
from rayfed.files import local_path
from rayfed.registry import component

FILE_COLUMNS = ("file", "filename", "file_name", "filepath", "path", "image", "image_id", "image_path", "id", "name")
"""Columns of file names that are found by themselves, in small letters; the first that a table has."""


@component
class ImageTable(Source):
    """Images in files, their classes in a table (`.csv`, `.tsv`, `.parquet`) with a row for each image.

    Without `test` a stratified fifth is the test split. Files that the table does not name are passed over.
    """

    table: Path
    """The table, with the names of its columns in the first line; `~` and environment variables are expanded."""
    images: Path | None = None
    """Folder of the images, in which the table's names may lie at any depth; null: the table's own."""
    test: Path | None = None
    """Table of the test split, with the same columns."""
    file_column: str | None = None
    """Column of the names of files, whose ending may be left out; null: `file`, `path`, `image` or alike."""
    label_column: str | None = None
    """Column of the classes; null: `label`, `class`, `target`, `diagnosis` or alike, where there is one alone."""

    def read(self) -> tuple[Split, Split, tuple[str, ...]]:
        """Read samples in the order of the table; classes in the order of their numbers, or else of their names."""
        paths = [local_path(path) for path in (self.table, self.test) if path is not None]
        files = Files.of(local_path(self.images) if self.images is not None else paths[0].parent)
        rows = [self._rows(path, files) for path in paths]
        classes = by_value({label for _, labels in rows for label in labels})
        numbers = {name: number for number, name in enumerate(classes)}
        splits = [Split(images, np.array([numbers[n] for n in labels], np.int64)) for images, labels in rows]
        if len(splits) == 1:
            return *hold_out_fifth(splits[0], str(paths[0])), classes
        return splits[0], splits[1], classes

    def _rows(self, path: Path, files: Files) -> tuple[list[Encoded], list[str]]:
        """Return the images of a table and the names of their classes."""
        table = read_table(path)
        try:
            found = columns(table, self.file_column, self.label_column)
        except DataError as error:
            raise DataError(f"{path}: {error}") from error
        names, labels = (_texts(path, table, column) for column in found)
        return [Encoded(str(file), file) for file in files.named(path, names)], labels


class Files:
    """Images in a folder, by their names in a table."""

    def __init__(self, root: Path, known: Mapping[str, list[Path]]) -> None:
        self._root, self._known = root, known

    @classmethod
    def of(cls, root: Path) -> Files:
        """List a folder's images, at any depth; raises `DataError` where there is no such folder."""
        if not root.is_dir():
            raise DataError(f"{root} is no folder; expected the one that the images lie in")
        known: dict[str, list[Path]] = {}
        for path in sorted(path for path in root.rglob("*") if path.is_file() and is_image(path)):
            for name in {path.name, path.stem}:
                known.setdefault(name, []).append(path)
        return cls(root, known)

    def named(self, table: Path, names: list[str]) -> list[Path]:
        """Return the files named in a table's rows; raises `DataError` for a row with none or several."""
        return [self._one(f"{table}, row {row} (from 0)", name) for row, name in enumerate(names)]

    def has(self, name: str) -> bool:
        """Return whether a name is that of a file in the folder."""
        return (self._root / name).is_file() or Path(name).name in self._known

    def _one(self, where: str, name: str) -> Path:
        if (exact := self._root / name).is_file():
            return exact
        ends = Path(name).parts
        same = [path for path in self._known.get(ends[-1] if ends else "", []) if _within(path, ends)]
        if len(same) != 1:
            found = f"{len(same)} images of that name: {', '.join(map(str, same[:3]))}" if same else "no such image"
            raise DataError(f"{where}: '{name}', but {self._root} has {found}; write its path below that folder")
        return same[0]


def tables_of_images(path: Path) -> list[Path]:
    """Return the tables, in a folder or the file itself, whose first row names an image beside or below."""
    files = [path] if path.is_file() else sorted(path.iterdir()) if path.is_dir() else []
    return [file for file in files if file.suffix in TABLES and _names_images(file)]


def _names_images(path: Path) -> bool:
    table = read_table(path)
    column = _found(table, FILE_COLUMNS)
    first = table[column[0]].drop_null().slice(0, 1).to_pylist() if column else []
    return bool(first) and isinstance(first[0], str | int) and Files.of(path.parent).has(str(first[0]))


def columns(table: pa.Table, file: str | None, label: str | None) -> tuple[str, str]:
    """Return a table's columns of file names and classes; raises `DataError` for a missing or ambiguous one."""
    every = ", ".join(table.column_names)
    for asked in (file, label):
        if asked is not None and asked not in table.column_names:
            raise DataError(f"no column '{asked}': {nearest(asked, table.column_names)}")
    if file is None:
        found = _found(table, FILE_COLUMNS)
        if not found:
            raise DataError(
                f"no column is called {FILE_COLUMNS[0]} or alike: name one of {every} by `data.file_column`"
            )
        file = found[0]
    if label is None:
        found = [name for name in _found(table, LABEL_COLUMNS) if name != file]
        if len(found) != 1:
            problem = "may each be the classes" if found else "no column is called label or alike"
            raise DataError(f"{' and '.join(found)} {problem}: name one of {every} by `data.label_column`")
        label = found[0]
    return file, label


def _found(table: pa.Table, names: Sequence[str]) -> list[str]:
    """Return the columns with one of these names, in the columns' order."""
    known = {name.strip().lower(): name for name in reversed(table.column_names)}
    return [known[name] for name in names if name in known]


def _texts(path: Path, table: pa.Table, column: str) -> list[str]:
    values = table[column].to_pylist()
    for row, value in enumerate(values):
        if value is None or isinstance(value, float | dict | list | bytes):
            raise DataError(f"{path}, row {row} (from 0): '{column}' is {value!r}; expected a name or a whole number")
    return [str(value).strip() for value in values]


def _within(path: Path, ends: tuple[str, ...]) -> bool:
    """Return whether a path ends with another, whose last part may lack its suffix."""
    return path.parent.parts[len(path.parent.parts) - len(ends) + 1 :] == ends[:-1]
