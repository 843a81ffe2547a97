"""Translation of the command-line option `--data` to the section `data` of a scenario."""

from __future__ import annotations

import re
from collections.abc import Sequence
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


def data_section(
    data: str,
    size: int | None,
    label: str | None = None,
    targets: Sequence[str] | None = None,
    text: str | None = None,
) -> dict[str, Any]:
    """Return a scenario's section `data` for a file, a folder of images or texts, or a data set's name.

    Images may be in one folder per class, in `images` with their `masks` in a second folder, next to a table of file
    names and classes, or in a Hugging Face data set. In a table, `label` names the column of classes, `targets` columns
    of numbers, and `text` the column of texts (default: a column named `text` or similar). `size` is the height and
    width to which images are resized (default: original size). Raises `UserError` for a table without a label, and for
    anything that is not data.
    """
    path, resized = Path(data).expanduser(), {} if size is None else {"size": size}
    if targets and path.is_dir():
        raise UserError(
            f"--target selects columns of a table, but {data} is a folder: to attack images with numeric labels, save "
            f"them as a Parquet file whose column `label` holds numbers or lists of numbers"
        )
    if targets:
        return {"name": "table", "path": data, "targets": list(targets)}
    named = {} if label is None else {"label_column": label}
    if label is None and text is None and image_masks.is_given(path):
        return {"name": "image_masks", "root": data} | resized
    if path.is_dir() and hugging_face.splits(path):
        return {"name": "hugging_face", "root": data} | named | resized
    if tables := tables_of_images(path):
        return {"name": "image_table", **_splits(data, tables)} | named | resized
    columns = column_names(path) if _is_table(data, path) else []
    if path.is_file() and is_parquet(path) and not columns:
        return {"name": "parquet", "train": data} | named | resized
    if column := text or text_column(columns):
        return {"name": "text_table", "path": data, "text_column": column} | named
    if label is not None:
        return {"name": "table", "path": data, "label": label}
    if columns:
        raise UserError(
            f"--data {data} is a table: name the column of classes with --label, or columns of numbers to predict with "
            f"--target; for a text model, name the column of texts with --text. Columns: {', '.join(columns)}"
        )
    if path.suffix != ".parquet":  # its reader reports errors itself
        check_given(data)
    if path.suffix == ".parquet":
        return {"name": "parquet", "train": data} | resized
    if files := sorted(file for file in path.glob("*.parquet") if is_sample(file, path)):
        if any(map(_split_of, files)):  # reading them as one split would train on test images
            return {"name": "parquet", **_splits(data, files, "train")} | resized
        return {"name": "parquet", "train": data} | resized
    if path.is_dir() and _holds_texts(path):
        return {"name": "text", "root": data}
    if path.suffix == ".arrow":
        return {"name": "arrow", "path": data} | resized
    return ({"name": "image_folder", "root": data} if path.is_dir() else {"name": data}) | resized


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
