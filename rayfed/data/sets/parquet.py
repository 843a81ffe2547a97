"""Parquet files in the Hugging Face image layout.

Column `image`: struct of `bytes` (an encoded image) and `path`; column `label`: integer; the names of the classes
in the schema's metadata under `huggingface` (feature type `ClassLabel`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rayfed.data.base import Source, Split, check_labels, hold_out_fifth
from rayfed.data.images import Encoded
from rayfed.errors import DataError
from rayfed.files import local_path
from rayfed.registry import component

_MOST_CLASSES = 100_000
"""Beyond that a label is no class's number but a damaged one: names are made for all below it."""


@component
class Parquet(Source):
    """Any data set in the Hugging Face image layout; without `test` a stratified fifth of `train` is held out."""

    train: Path
    """A Parquet file, or a folder of which all *.parquet are read; `~` and environment variables are expanded."""
    test: Path | None = None
    """Parquet file, or folder, of the test split."""
    image_column: str = "image"
    """Column of the images."""
    label_column: str = "label"
    """Column of the labels."""

    def read(self) -> tuple[Split, Split, tuple[str, ...]]:
        """Read both splits in the order stored; several files are read in the order of their names."""
        train = _files(self.train)
        test = _files(self.test) if self.test is not None else []
        return read_parquet(train, test, (self.image_column,), (self.label_column,))


def read_parquet(
    train: Sequence[Path], test: Sequence[Path], image_columns: Sequence[str], label_columns: Sequence[str]
) -> tuple[Split, Split, tuple[str, ...]]:
    """Read train split, test split and class names; of the columns named, the first that a file has is read.

    Without test files a stratified fifth of the training split is held out. Where the files name no classes, these
    are numbered up to the largest label of the training files. Raises `DataError`, naming file and row.
    """
    for path in test:
        if path in train:
            raise DataError(f"{path} is in the training and in the test split; every file may be in one only")
    shards = [_read_file(path, image_columns, label_columns) for path in (*train, *test)]
    classes = _classes(shards, len(train))
    for shard in shards:
        check_labels(str(shard.path), shard.labels, len(classes))
    if not test:
        return *hold_out_fifth(_join(shards), ", ".join(map(str, train))), classes
    return _join(shards[: len(train)]), _join(shards[len(train) :]), classes


class _Shard(NamedTuple):
    """Content of one file, labels not yet checked against the classes."""

    path: Path
    images: list[Encoded]
    labels: np.ndarray
    classes: tuple[str, ...] | None


def _files(path: Path) -> list[Path]:
    local = local_path(path).resolve()
    if local.is_file():
        return [local]
    found = sorted(local.glob("*.parquet"))
    if not found:
        raise DataError(f"{local} is neither a file nor a folder with *.parquet files in it")
    return found


def _read_file(path: Path, image_columns: Sequence[str], label_columns: Sequence[str]) -> _Shard:
    try:
        with pq.ParquetFile(path) as file:
            schema = file.schema_arrow
            image_column = _column(path, schema, image_columns)
            label_column = _column(path, schema, label_columns)
            table = file.read([image_column, label_column])
    except (pa.ArrowException, OSError, ValueError) as error:  # names that are no UTF-8 are a ValueError
        raise DataError(f"{path} cannot be read: {error}; expected a whole Parquet file; fetch it again") from error
    if not table.num_rows:
        raise DataError(f"{path} has no rows; expected one a sample")
    content, labels = _bytes(path, table, image_column), table[label_column]
    if not pa.types.is_integer(labels.type):
        raise DataError(f"{path}: column '{label_column}' is {labels.type}, expected whole numbers (int64)")
    _refuse_null(path, content, f"no bytes in column '{image_column}', expected an encoded image")
    _refuse_null(path, labels, f"no label in column '{label_column}', expected a whole number")
    encoded = [Encoded(f"{path}, row {row} (from 0)", data) for row, data in enumerate(content.to_pylist())]
    return _Shard(path, encoded, labels.to_numpy().astype(np.int64), _class_names(path, schema, label_column))


def _column(path: Path, schema: pa.Schema, names: Sequence[str]) -> str:
    for name in names:
        if name in schema.names:
            return name
    raise DataError(f"{path} has no column '{names[0]}'; its columns are {', '.join(schema.names)}")


def _bytes(path: Path, table: pa.Table, image_column: str) -> pa.ChunkedArray:
    kind = table.schema.field(image_column).type
    fields = {field.name: field.type for field in kind} if pa.types.is_struct(kind) else {}
    if fields.get("bytes") != pa.binary():
        raise DataError(f"{path}: column '{image_column}' is {kind}, expected struct<bytes: binary, path: string>")
    return pc.struct_field(table[image_column], "bytes")


def _refuse_null(path: Path, column: pa.ChunkedArray, problem: str) -> None:
    if column.null_count:
        row = pc.index(column.is_null(), True).as_py()
        raise DataError(f"{path}, row {row} (from 0): {problem} ({column.null_count} such rows in all)")


def _class_names(path: Path, schema: pa.Schema, label_column: str) -> tuple[str, ...] | None:
    written = (schema.metadata or {}).get(b"huggingface")
    if written is None:
        return None
    try:
        names = json.loads(written)["info"]["features"][label_column].get("names")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path}: the schema's `huggingface` metadata does not describe column '{label_column}' "
            f"({type(error).__name__}: {error}); expected info.features.{label_column}.names"
        ) from error
    return tuple(map(str, names)) if names is not None else None


def _classes(shards: Sequence[_Shard], train: int) -> tuple[str, ...]:
    """Return the names that all files agree on, or numbers where none has names."""
    named = [shard for shard in shards if shard.classes is not None]
    for shard in named:
        if shard.classes != named[0].classes:
            raise DataError(f"{shard.path} and {named[0].path} have different class names in their metadata")
    if named and named[0].classes is not None:
        return named[0].classes
    shard = max(shards[:train], key=lambda shard: int(shard.labels.max()))
    if (largest := int(shard.labels.max())) >= _MOST_CLASSES:
        raise DataError(
            f"{shard.path}: label {largest}, expected less than {_MOST_CLASSES:,}: labels count classes from 0"
        )
    return tuple(map(str, range(largest + 1)))


def _join(shards: Sequence[_Shard]) -> Split:
    images = [image for shard in shards for image in shard.images]
    return Split(images, np.concatenate([shard.labels for shard in shards]))
