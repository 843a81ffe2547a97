"""Translation of a user's data, such as the command-line option `--data`, to the section `data` of a scenario."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from rayfed import registry
from rayfed.data.files import is_image, is_sample
from rayfed.data.kinds import is_parquet
from rayfed.data.sets import check_given, hugging_face, image_masks
from rayfed.data.sets.image_table import tables_of_images
from rayfed.data.sets.tabular import column_names
from rayfed.data.sets.text_table import text_column
from rayfed.errors import UserError


@dataclass(frozen=True)
class UserData:
    """Data of a user, with the options to read them.

    >>> from rayfed.data.section import UserData
    >>> UserData("patients.parquet", label="diagnosis").section()
    {'name': 'table', 'path': 'patients.parquet', 'label': 'diagnosis'}
    """

    source: str | PathLike[str] | tuple[Any, Any]
    """File, folder, data set's name, or a pair (inputs, labels) of tensors or arrays. Images may be in one folder per
    class, in `images` with their `masks` in a second folder, next to a table of file names and classes, or in a Hugging
    Face data set. In memory, inputs are images (N, C, H, W) in [0, 1] or of type uint8, or a table's rows (N, D)."""
    size: int | None = None
    """Height and width in pixels to which images are resized. Default: original size."""
    label: str | None = None
    """Column of a table with the classes."""
    targets: Sequence[str] | None = None
    """Columns of a table with numbers to predict, instead of `label`."""
    text: str | None = None
    """Column of a table with the texts. Default: a column named `text` or similar."""

    def section(self) -> dict[str, Any]:
        """Return the section `data` of a scenario.

        Raises `UserError` for a table without a label, and for anything that is not data.
        """
        if self.label is not None and self.targets:
            raise UserError(
                "--label names a column of classes, --target columns of numbers: give only one of these options"
            )
        if isinstance(self.source, tuple):
            from rayfed.data.in_memory import file_of_arrays

            if self.size is not None:
                raise UserError("size: tensors and arrays are not resized; resize them, or give files")
            return file_of_arrays(self.source)
        if not isinstance(self.source, str | PathLike):
            raise UserError(
                f"data: found a {type(self.source).__name__}; give a path, a data set's name, or a pair (inputs, "
                f"labels) of tensors"
            )
        data = fspath(self.source)
        path = Path(data).expanduser()
        if self.targets:
            return self._regression(data, path)
        return self._labelled_images(data, path) or self._table(data, path) or self._files(data, path)

    @property
    def _resized(self) -> dict[str, Any]:
        return {} if self.size is None else {"size": self.size}

    @property
    def _labelled(self) -> dict[str, Any]:
        return {} if self.label is None else {"label_column": self.label}

    def _regression(self, data: str, path: Path) -> dict[str, Any]:
        """Return the section of a table with numbers to predict."""
        if path.is_dir():
            raise UserError(
                f"--target selects columns of a table, but {data} is a folder: to attack images with numeric labels, "
                f"save them as a Parquet file whose column `label` holds numbers or lists of numbers"
            )
        return {"name": "table", "path": data, "targets": list(self.targets or ())}

    def _labelled_images(self, data: str, path: Path) -> dict[str, Any] | None:
        """Return the section of images with masks, in a Hugging Face folder or next to a table; None for other data."""
        if self.label is None and self.text is None and image_masks.is_given(path):
            return {"name": "image_masks", "root": data} | self._resized
        if path.is_dir() and hugging_face.list_splits(path):
            return {"name": "hugging_face", "root": data} | self._labelled | self._resized
        if tables := tables_of_images(path):
            return {"name": "image_table", **_splits(data, tables)} | self._labelled | self._resized
        return None

    def _table(self, data: str, path: Path) -> dict[str, Any] | None:
        """Return the section of a table of numbers or texts; None for other data."""
        columns = column_names(path) if _is_table(data, path) else []
        if path.is_file() and is_parquet(path) and not columns:
            return {"name": "parquet", "train": data} | self._labelled | self._resized
        if column := self.text or text_column(columns):
            return {"name": "text_table", "path": data, "text_column": column} | self._labelled
        if self.label is not None:
            return {"name": "table", "path": data, "label": self.label}
        if columns:
            raise UserError(
                f"--data {data} is a table: name the column of classes with --label, or columns of numbers to predict "
                f"with --target; for a text model, name the column of texts with --text. Columns: {', '.join(columns)}"
            )
        return None

    def _files(self, data: str, path: Path) -> dict[str, Any]:
        """Return the section of files of images, a folder of texts, or a data set."""
        if path.suffix == ".parquet":  # its reader reports errors itself
            return {"name": "parquet", "train": data} | self._resized
        check_given(data)
        if files := sorted(file for file in path.glob("*.parquet") if is_sample(file, path)):
            if any(map(_split_of, files)):  # reading them as one split would train on test images
                return {"name": "parquet", **_splits(data, files, "train")} | self._resized
            return {"name": "parquet", "train": data} | self._resized
        if path.is_dir() and _holds_texts(path):
            return {"name": "text", "root": data}
        if path.suffix == ".arrow":
            return {"name": "arrow", "path": data} | self._resized
        return ({"name": "image_folder", "root": data} if path.is_dir() else {"name": data}) | self._resized


def _is_table(data: str, path: Path) -> bool:
    """Return whether to read a file as a table: it has no packed images, and its path is not a data set's name."""
    return path.is_file() and path.suffix != ".arrow" and data not in registry.table("datasets")


def _holds_texts(root: Path) -> bool:
    """Return whether the class folders of a folder contain more texts than images."""
    files = [path for path in root.glob("*/*") if is_sample(path, root)]
    texts = [path for path in files if path.suffix == ".txt"]
    return bool(texts) and len(texts) > sum(is_image(path) for path in files)


def _splits(data: str, tables: Sequence[Path], first: str = "table") -> dict[str, str]:
    """Return the training table, under the key `first`, and the test table, if any; raises `UserError` for others."""
    by_split = {_split_of(table): table for table in tables}
    test = next((split for split in hugging_face.TESTS if split in by_split), None)
    if len(tables) == 1:
        return {first: str(tables[0])}
    train = by_split.get("train") or by_split.get("")
    if len(tables) == 2 and train and test:
        return {first: str(train), "test": str(by_split[test])}
    raise UserError(
        f"--data {data} has several tables of images: give one of these tables: {', '.join(map(str, tables))}"
    )


def _split_of(table: Path) -> str:
    """Return the split in a file's name, such as `train`; empty if there is none."""
    words = [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", table.stem)]
    begins = next((split for split in ("train", "test") if any(word.startswith(split) for word in words)), "")
    return begins or next((split for split in hugging_face.TESTS if split in words), "")
