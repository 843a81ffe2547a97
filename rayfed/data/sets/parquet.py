"""Images in Parquet or Arrow files: encoded bytes in one column and labels in another column.

In the Hugging Face layout, images are structs of `bytes` and `path`, labels are integers, and the schema's metadata has
the names of the classes under `huggingface` (feature type `ClassLabel`). Floating-point labels, and lists of numbers of
equal length, are numeric targets, which are scaled like those of tables.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rayfed.core.files import local_path
from rayfed.data.base import Source, StoredSplit, check_labels, check_numbers, hold_out_fifth, scale_numbers
from rayfed.data.files import LABEL_COLUMNS, is_sample, sort_class_names
from rayfed.data.images import Encoded
from rayfed.errors import DataError
from rayfed.registry import component

_NAMED = 4
"""Maximum number of files that a note names."""
_MOST_CLASSES = 100_000
"""Maximum number of classes; larger labels are assumed to be damaged."""


@component
class Parquet(Source):
    """Images as encoded bytes in Parquet files; without `test`, a stratified fifth of `train` is held out."""

    train: Path
    """Parquet file, or folder of *.parquet files; `~` and environment variables are expanded."""
    test: Path | None = None
    """Parquet file or folder of the test split."""
    image_column: str | None = None
    """Column of the images, as bytes or as structs of `bytes` and `path`. Default: the only column of images."""
    label_column: str | None = None
    """Column of the classes, whole numbers or names. Default: the class column in the metadata, or `label`, `class`,
    `target`, `diagnosis` or similar."""

    def notes(self) -> Iterator[str]:
        """Yield a note if the training images are in several files."""
        files = parquet_files(self.train)
        if len(files) > 1:
            named = ", ".join(path.name for path in files[:_NAMED]) + ", ..." * (len(files) > _NAMED)
            yield (
                f"data: {len(files)} files in {self.train} are read as one training split: {named}. Check that none of "
                f"these files is a test split"
            )

    def read(self) -> tuple[StoredSplit, StoredSplit, tuple[str, ...]]:
        """Read the train and test split in stored order; files are sorted by name."""
        train = parquet_files(self.train)
        test = parquet_files(self.test) if self.test is not None else []
        return read_parquet(train, test, as_columns(self.image_column), as_columns(self.label_column))


def as_columns(column: str | None) -> tuple[str, ...]:
    """Return the requested column name as a tuple; empty if no column was requested."""
    return () if column is None else (column,)


def read_parquet(
    train: Sequence[Path], test: Sequence[Path], image_columns: Sequence[str], label_columns: Sequence[str]
) -> tuple[StoredSplit, StoredSplit, tuple[str, ...]]:
    """Read train split, test split and class names from Parquet files.

    The columns are the first of the given column names that a file has. If no column is named, it is found by metadata,
    name or type. Without test files a stratified fifth of the training split is held out. Names of classes are from the
    metadata or from text labels, else the numbers up to the maximum training label. Raises `DataError`, naming file and
    row.
    """
    for path in test:
        if path in train:
            raise DataError(f"{path} is in both the training and the test split; use each file in only one split")
    shards = [_read_file(path, image_columns, label_columns) for path in (*train, *test)]
    numbers = any(shard.labels.dtype.kind == "f" for shard in shards)
    shards = shards if numbers else _numbered(shards)
    classes = _outputs(shards) if numbers else _classes(shards, len(train))
    for shard in shards:
        if numbers:
            check_numbers(str(shard.path), shard.labels)
        else:
            check_labels(str(shard.path), shard.labels, len(classes))
    if not test:
        trained, tested = hold_out_fifth(_join(shards), ", ".join(map(str, train)))
    else:
        trained, tested = _join(shards[: len(train)]), _join(shards[len(train) :])
    if numbers:
        scaled = scale_numbers(trained.labels, tested.labels)
        trained, tested = (part._replace(labels=y) for part, y in zip((trained, tested), scaled, strict=True))
    return trained, tested, classes


class _Shard(NamedTuple):
    """Content of one file, with labels not yet checked or still text."""

    path: Path
    images: list[Encoded]
    labels: np.ndarray
    classes: tuple[str, ...] | None


def parquet_files(path: Path) -> list[Path]:
    """Return a Parquet file, or all Parquet files in a folder sorted by name; raise `DataError` if there are none."""
    local = local_path(path).resolve()
    if local.is_file():
        return [local]
    found = sorted(path for path in local.glob("*.parquet") if is_sample(path, local))
    if not found:
        raise DataError(f"{local} is not a Parquet file or a folder with *.parquet files")
    return found


def _read_file(path: Path, image_columns: Sequence[str], label_columns: Sequence[str]) -> _Shard:
    with _read(path):
        schema = read_schema(path)
        features = _features(path, schema)
        image_column = _column(path, schema, image_columns, lambda: _image_columns(schema, features))
        label_column = _column(path, schema, label_columns, lambda: _label_columns(schema, features), "label")
        table = _table(path, [image_column, label_column])
        table[label_column].validate(full=True)
    if not table.num_rows:
        raise DataError(f"{path} has no rows; expected one row per sample")
    labels = table[label_column]
    kind = labels.type
    text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    several = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    of = kind.value_type if several else kind
    if not text and not pa.types.is_integer(of) and not pa.types.is_floating(of):
        raise DataError(
            f"{path}: column '{label_column}' is {kind}, expected numbers, lists of numbers, or class names"
        )
    encoded = _encoded(path, table, image_column)
    _refuse_null(path, labels, f"no label in column '{label_column}', expected a whole number or a name")
    if several or pa.types.is_floating(of):
        return _Shard(path, encoded, _numbers(path, label_column, labels.to_pylist()), None)
    values = labels.to_numpy().astype(str if text else np.int64)
    return _Shard(path, encoded, values, None if text else _class_names(path, features, label_column))


@contextmanager
def _read(path: Path) -> Iterator[None]:
    """Convert errors of a reader to `DataError` with the name of the file."""
    try:
        yield
    except (pa.ArrowException, OSError, ValueError) as error:  # names that are not UTF-8 raise ValueError
        kind = "Arrow" if path.suffix == ".arrow" else "Parquet"
        raise DataError(
            f"{path} cannot be read: {error}; expected a complete {kind} file; download the file again"
        ) from error


def read_columns(path: Path, columns: Sequence[str]) -> list[list[Encoded]]:
    """Read columns of encoded images, one list per column; raise `DataError`, naming file and row."""
    with _read(path):
        table = _table(path, list(columns))
    if not table.num_rows:
        raise DataError(f"{path} has no rows; expected one row per sample")
    return [_encoded(path, table, column) for column in columns]


def _encoded(path: Path, table: pa.Table, column: str) -> list[Encoded]:
    content = _bytes(path, table, column)
    _refuse_null(path, content, f"no bytes in column '{column}', expected an encoded image")
    return [Encoded(f"{path}, row {row} (from 0)", data) for row, data in enumerate(content.to_pylist())]


def _numbers(path: Path, column: str, rows: Sequence[float | Sequence[float | None]]) -> np.ndarray:
    """Return numeric labels (N, k) float64; raises `DataError` for lists of different lengths."""
    lists = [row if isinstance(row, list) else [row] for row in rows]
    row = next((i for i, one in enumerate(lists) if len(one) != len(lists[0]) or None in one or not one), None)
    if row is not None:
        raise DataError(
            f"{path}, row {row} (from 0): '{column}' is {lists[row]}, expected {len(lists[0]) or 'some'} numbers, as "
            f"many in every row; for several labels per sample, write a 0 or 1 for each label"
        )
    return np.array(lists, dtype=np.float64)


def _outputs(shards: Sequence[_Shard]) -> tuple[str, ...]:
    """Return names of the outputs, numbered from 0; raises `DataError` if files have different numbers of outputs."""
    for shard in shards:
        if shard.labels.shape[1:] != shards[0].labels.shape[1:]:
            raise DataError(
                f"{shard.path} and {shards[0].path} have labels of different kinds or lengths; use the same kind of "
                "labels in all files"
            )
    return tuple(map(str, range(shards[0].labels.shape[1])))


def read_schema(path: Path) -> pa.Schema:
    """Return the Arrow schema of a Parquet or Arrow file."""
    if path.suffix != ".arrow":
        return pq.read_schema(path)
    with pa.memory_map(str(path)) as file, pa.ipc.open_stream(file) as reader:
        return reader.schema


def _table(path: Path, columns: list[str]) -> pa.Table:
    if path.suffix != ".arrow":
        with pq.ParquetFile(path) as file:
            return file.read(columns)
    with pa.memory_map(str(path)) as file, pa.ipc.open_stream(file) as reader:
        return reader.read_all().select(columns)


def _column(
    path: Path, schema: pa.Schema, names: Sequence[str], found: Callable[[], Sequence[str]], what: str = "image"
) -> str:
    """Return the first of the named columns that a file has, or the only candidate if none is named."""
    for name in names:
        if name in schema.names:
            return name
    fitting = [] if names else found()
    if len(fitting) != 1:
        problem = f"has several possible columns ({', '.join(fitting)}): choose a column with `{what}_column`"
        missing = f"has no column '{names[0] if names else what}'; the columns are {', '.join(schema.names)}"
        raise DataError(f"{path} {problem if fitting else missing}")
    return fitting[0]


def _image_columns(schema: pa.Schema, features: Mapping[str, Any]) -> list[str]:
    """Return the columns of images, by metadata, name or type."""
    told = _of_kind(features, "Image")
    binary = [field.name for field in schema if pa.types.is_struct(field.type) or pa.types.is_binary(field.type)]
    return told or [name for name in binary if name.lower() == "image"] or binary


def _label_columns(schema: pa.Schema, features: Mapping[str, Any]) -> list[str]:
    """Return the columns of classes, by metadata or name."""
    told = _of_kind(features, "ClassLabel")
    return told or [name for name in schema.names if name.lower() in LABEL_COLUMNS]


def _of_kind(features: Mapping[str, Any], kind: str) -> list[str]:
    return [name for name, said in features.items() if isinstance(said, dict) and said.get("_type") == kind]


def _bytes(path: Path, table: pa.Table, image_column: str) -> pa.ChunkedArray:
    kind = table.schema.field(image_column).type
    if pa.types.is_binary(kind):
        return table[image_column]
    fields = {field.name: field.type for field in kind} if pa.types.is_struct(kind) else {}
    if fields.get("bytes") != pa.binary():
        raise DataError(
            f"{path}: column '{image_column}' is {kind}, expected binary or struct<bytes: binary, path: string>"
        )
    return pc.struct_field(table[image_column], "bytes")


def _refuse_null(path: Path, column: pa.ChunkedArray, problem: str) -> None:
    if column.null_count:
        row = pc.index(column.is_null(), True).as_py()
        raise DataError(f"{path}, row {row} (from 0): {problem} ({column.null_count} such rows in all)")


def _features(path: Path, schema: pa.Schema) -> Mapping[str, Any]:
    """Return the metadata of each column; empty without metadata."""
    written = (schema.metadata or {}).get(b"huggingface")
    if written is None:
        return {}
    try:
        features = json.loads(written)["info"]["features"]
        return {str(name): said for name, said in features.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path}: the schema's `huggingface` metadata describes no columns ({type(error).__name__}: {error}); "
            f"expected info.features"
        ) from error


def _class_names(path: Path, features: Mapping[str, Any], label_column: str) -> tuple[str, ...] | None:
    if not features:
        return None
    try:
        names = features[label_column].get("names")
    except (KeyError, AttributeError) as error:
        raise DataError(
            f"{path}: the schema's `huggingface` metadata does not describe column '{label_column}' "
            f"({type(error).__name__}: {error}); expected info.features.{label_column}.names"
        ) from error
    return tuple(map(str, names)) if names is not None else None


def _numbered(shards: list[_Shard]) -> list[_Shard]:
    """Return shards with text labels replaced by numbers, in the order of the names."""
    text = [shard.labels.dtype.kind == "U" for shard in shards]
    if not any(text):
        return shards
    if not all(text):
        raise DataError(
            f"{shards[text.index(False)].path} has numbers as labels, but {shards[text.index(True)].path} has text; "
            "use one type for all labels"
        )
    classes = sort_class_names({label for shard in shards for label in shard.labels.tolist()})
    number = {name: place for place, name in enumerate(classes)}
    return [
        shard._replace(labels=np.array([number[name] for name in shard.labels.tolist()], np.int64), classes=classes)
        for shard in shards
    ]


def _classes(shards: Sequence[_Shard], train: int) -> tuple[str, ...]:
    """Return the class names, which must be equal in all files, or numbers if no file has names."""
    named = [shard for shard in shards if shard.classes is not None]
    for shard in named:
        if shard.classes != named[0].classes:
            raise DataError(
                f"{shard.path} and {named[0].path} have different class names in their metadata; use files of the same "
                "data set"
            )
    if named and named[0].classes is not None:
        return named[0].classes
    shard = max(shards[:train], key=lambda shard: int(shard.labels.max()))
    if (largest := int(shard.labels.max())) >= _MOST_CLASSES:
        raise DataError(f"{shard.path}: label {largest}, expected class numbers from 0, below {_MOST_CLASSES:,}")
    return tuple(map(str, range(largest + 1)))


def _join(shards: Sequence[_Shard]) -> StoredSplit:
    images = [image for shard in shards for image in shard.images]
    return StoredSplit(images, np.concatenate([shard.labels for shard in shards]))
