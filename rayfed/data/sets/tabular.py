"""Data sets of records: scikit-learn's diabetes data, or the user's separated text or Parquet file.

Source of `diabetes`: Efron et al. 2004, "Least Angle Regression", section 1. It has 442 patients, ten measures, and the
disease progression after one year; the table in original units is part of scikit-learn's wheel. Columns are scaled to
[0, 1] as in Vero et al. 2023, "TabLeak: Tabular Data Leakage in Federated Learning", section 2.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from typing import Annotated, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import Field

from rayfed.core.documents import yaml_flow
from rayfed.core.files import local_path
from rayfed.data.base import Dataset, StoredSplit, check_numbers, choose_stratified, limit_split, scale_numbers
from rayfed.data.kinds import is_parquet
from rayfed.data.layouts import DATE
from rayfed.data.tables import Read, read_table
from rayfed.errors import DataError
from rayfed.registry import component
from rayfed.samples import Column, Modality, Records

_DIABETES = ("age", "sex", "bmi", "blood_pressure", "s1", "s2", "s3", "s4", "s5", "s6")
_MOST_BYTES = 4096
_FEWEST_NAMED = 20
"""Minimum number of rows at which a column with distinct values in all rows is reported."""
_MISSING = "(missing)"
_CODE = re.compile(r"\s*0\d+\s*")
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


@component
class Tabular:
    """Base of the data sets of records; a deterministic stratified fifth is the test split."""

    holds: ClassVar[Modality] = "records"

    train_samples: Annotated[int, Field(ge=1)] | None = None
    """Number of training samples to use, a deterministic stratified subset. Default: all."""
    test_samples: Annotated[int, Field(ge=1)] | None = None
    """Number of test samples to use, a deterministic stratified subset. Default: all."""

    def load(self) -> Dataset:
        """Load the data set into memory, with numbers in 256 levels and one byte per category.

        The levels are between the minimum and maximum training value. Raises `DataError` for missing or broken files.
        """
        values, labels, classes = self.read()
        if len(labels) < 5:
            raise DataError(
                f"the table has {len(labels)} rows; at least 5 are needed to hold out a fifth as the test split"
            )
        tested = choose_stratified(labels, len(labels) // 5)
        trained = np.setdiff1d(np.arange(len(labels)), tested, assume_unique=True)
        filled = {name: _filled(name, found, trained) for name, found in values.items()}
        values = {name: found for name, (found, _) in filled.items()}
        columns = tuple(_column(name, found, found[trained]) for name, found in values.items())
        if (width := sum(column.width for column in columns)) > _MOST_BYTES:
            widest = max(columns, key=lambda column: column.width)
            beside = _among_numbers(widest.categories)[:1]
            raise DataError(
                f"a row needs {width} numbers, but the maximum is {_MOST_BYTES}: remove columns of text, such as "
                f"'{widest.name}' with {widest.width} values"
                + "".join(f"; the column has numbers and '{t}': write missing values as empty fields" for t in beside)
            )
        codes = np.concatenate([_encoded(c, found) for c, found in zip(columns, values.values(), strict=True)], axis=1)
        images = codes[:, None, None, :]
        if labels.dtype.kind == "f":
            labels = _scaled(labels, trained, classes)
        train = limit_split(self.train_samples, StoredSplit(images[trained], labels[trained]), "train_samples")
        test = limit_split(self.test_samples, StoredSplit(images[tested], labels[tested]), "test_samples")
        assert isinstance(train.images, np.ndarray)
        assert isinstance(test.images, np.ndarray)
        remarks = (*self.notes(), *(said for _, said in filled.values() if said), *_numbering(values))
        sample = Records(columns)
        return Dataset(train.images, train.labels, test.images, test.labels, classes, sample=sample, remarks=remarks)

    def notes(self) -> Iterable[str]:
        """Return notes for users on how the table was read."""
        return ()

    def read(self) -> tuple[Mapping[str, np.ndarray], np.ndarray, tuple[str, ...]]:
        """Read columns (N,) by name (text if categorical), labels (N,) int64, and class names.

        Missing values are NaN, or None in text. Labels may be numbers (N, k) float64, with the names of their columns.
        """
        raise NotImplementedError


@component
class Diabetes(Tabular):
    """Records of 442 patients with nine measures and the sex; the class is whether progression exceeds the median.

    Needs no files.
    """

    is_public: ClassVar[bool] = True

    regression: bool = False
    """Whether to predict the progression (a number) instead of the class."""

    def read(self) -> tuple[Mapping[str, np.ndarray], np.ndarray, tuple[str, ...]]:
        """Read the table from scikit-learn's wheel; the codes 1 and 2 for the sex are categories."""
        table, target = np.loadtxt(_shipped("diabetes_data_raw.csv.gz")), np.loadtxt(_shipped("diabetes_target.csv.gz"))
        columns = dict(zip(_DIABETES, table.T, strict=True))
        columns["sex"] = columns["sex"].astype(int).astype(str)
        if self.regression:
            return columns, target[:, None], ("progression",)
        return columns, (target > np.median(target)).astype(np.int64), ("slow", "fast")


def _numbering(columns: Mapping[str, np.ndarray]) -> Iterator[str]:
    """Yield a note on each column (N,) that may be encoded in an unintended way.

    These are dates, codes and numbers mixed with text, whose values become categories. Columns with distinct values in
    all rows may be row numbers or names: text, or whole numbers that increase or are named like an id.
    """
    for name, found in columns.items():
        if found.dtype.kind != "f" and all(value == _MISSING or DATE.fullmatch(value) for value in found):
            yield (
                f"column '{name}' has dates, which are read as {len(np.unique(found))} unordered categories: write "
                f"them as numbers, such as days since the first date, or remove the column with {_left_out(name)}"
            )
            continue
        if found.dtype.kind != "f" and any(_CODE.fullmatch(value) for value in found):
            yield (
                f"column '{name}' has whole numbers that start with 0, so it is read as {len(np.unique(found))} "
                f"unordered categories; if they are numbers, write them without leading zeros"
            )
            continue
        if found.dtype.kind != "f" and (others := _among_numbers(found.tolist())):
            examples = " and ".join(f"'{text}'" for text in list(dict.fromkeys(others))[:2])
            yield (
                f"column '{name}' looks numeric, but {len(others)} of {len(found)} values are texts, such as "
                f"{examples}, so it is read as {len(np.unique(found))} unordered categories. If the texts mean missing "
                f"numbers (the first is in row {found.tolist().index(others[0])}, from 0), leave these fields empty, "
                f"or remove the column with {_left_out(name)}"
            )
            continue
        if len(found) < _FEWEST_NAMED or len(np.unique(found)) < len(found):
            continue
        called = name.lower() in ("id", "index") or name.lower().endswith(("_id", " id", "-id"))
        numbered = found.dtype.kind == "f" and bool((found == found.round()).all())
        if found.dtype.kind != "f" or (numbered and (called or bool((np.diff(found) > 0).all()))):
            yield (
                f"column '{name}' has a different value in every row, like a row number or name, but is used as a "
                f"feature: unless the model needs it, remove it with {_left_out(name)}"
            )


def _left_out(name: str) -> str:
    """Return the command-line option that excludes a column, quoted for a shell."""
    return f"--set {quote(f'data.without={yaml_flow([name])}')}"


@component
class Table(Tabular):
    """Records from the user's file, with numeric columns continuous and all others categorical.

    Missing numbers are replaced by the median of the training rows, missing text is a separate category; a note reports
    both. Rows without a label and infinite numbers are errors. Columns in `targets` are scaled to [0, 1] like
    continuous columns, but not rounded to levels.
    """

    path: Path
    """Separated text, such as `.csv`, `.tsv` or `.csv.gz`, or a `.parquet` file; `~` and environment variables are
    expanded. Without a header row, columns are named `column_1` and so on."""
    label: str | None = None
    """Name of the column of classes; give either this or `targets`."""
    targets: list[str] | None = None
    """Names of numeric columns to predict instead of a class, one output each."""
    without: tuple[str, ...] = ()
    """Names of columns to exclude, such as a patient number."""

    def read(self) -> tuple[Mapping[str, np.ndarray], np.ndarray, tuple[str, ...]]:
        """Read all columns in the order of the file; classes and categories are sorted by value."""
        path = local_path(self.path)
        found = read_table(path)
        table = found.table
        if (self.label is None) == (not self.targets):
            raise DataError(
                f"{path} needs either `data.label` (column of classes) or `data.targets` (columns of numbers); its "
                f"columns are {', '.join(table.column_names)}"
            )
        label = self.label.strip() if self.label else None
        targets = [name.strip() for name in self.targets or []]
        without = [name.strip() for name in self.without]
        for name in [label] if label else targets:
            _check_target(path, found, "label" if label else "targets", name)
        for name in without:
            _check_column(path, found, "without", name)
            if name in (label, *targets):
                raise DataError(
                    f"data.without: column '{name}' is predicted by the model, so it cannot be excluded; remove the "
                    "name from the list"
                )
        columns = {name: _values(path, name, table[name]) for name in table.column_names if name not in without}
        if label is None:
            return _of_numbers(path, columns, list(dict.fromkeys(targets)))
        classes, labels = np.unique(columns.pop(label), return_inverse=True)
        if len(classes) < 2 or not columns:
            raise DataError(f"{path}: expected at least two classes in '{label}', and another column")
        return columns, labels.astype(np.int64), tuple(map(_name, classes.tolist()))

    def notes(self) -> Iterator[str]:
        """Yield notes on the layout of the file, and on classes that look like missing values."""
        found = read_table(local_path(self.path))
        yield from found.notes
        if self.label is not None:
            yield from _missing_classes(self.label.strip(), found.table[self.label.strip()].to_pylist())


def _missing_classes(label: str, values: Sequence[object]) -> Iterator[str]:
    """Yield a note on each class that looks like a missing value: `?`, and `-` unless there is a class `+`."""
    known = {str(value).strip() for value in values}
    for mark in ("?", "-"):
        rows = [row for row, value in enumerate(values) if str(value).strip() == mark]
        if rows and not (mark == "-" and "+" in known):
            yield (
                f"column '{label}' is '{mark}' in {len(rows)} of {len(values)} rows (first: row {rows[0]}, from 0), "
                f"which is used as a class; remove these rows if their class is missing"
            )


def _of_numbers(
    path: Path, columns: dict[str, np.ndarray], targets: list[str]
) -> tuple[Mapping[str, np.ndarray], np.ndarray, tuple[str, ...]]:
    """Return the result of `Tabular.read` for a table whose labels are columns of numbers."""
    found = {name: columns.pop(name) for name in targets}
    if text := [name for name, values in found.items() if values.dtype.kind != "f"]:
        raise DataError(
            f"{path}: the target '{text[0]}' is text, expected numbers; for a column of classes, use `data.label`"
        )
    if not columns:
        raise DataError(f"{path} has no column except the targets: add at least one column of features")
    labels = np.stack(list(found.values()), axis=1)
    check_numbers(str(path), labels)
    return columns, labels, tuple(targets)


def _check_column(path: Path, found: Read, field: str, name: str) -> None:
    """Raise `DataError` unless the table has a column of this name."""
    if name not in found.table.column_names:
        raise DataError(f"data.{field}: {path} has {found.missing(name)}")


def _check_target(path: Path, found: Read, field: str, name: str) -> None:
    """Raise `DataError` unless the table has a column of this name without missing values."""
    _check_column(path, found, field, name)
    table = found.table
    if absent := table[name].null_count:
        row = pc.index(table[name].is_null(), True).as_py()
        raise DataError(
            f"{path}, row {row} (from 0): '{name}' is empty ({absent} such rows in all); add the values, or remove the "
            f"rows"
        )


def _scaled(labels: np.ndarray, trained: np.ndarray, names: tuple[str, ...]) -> np.ndarray:
    """Return numbers (N, k) scaled by the range of the training rows; raises `DataError` for a constant column."""
    if len(same := np.flatnonzero(np.ptp(labels[trained], axis=0) == 0)):
        raise DataError(f"the target '{names[same[0]]}' has the same value in all training rows: use another target")
    return scale_numbers(labels[trained], labels)[1]


def column_names(path: Path) -> list[str]:
    """Return the column names of a table, empty for a table of images.

    Raises `DataError` for another kind of file.
    """
    if not is_parquet(path):
        return list(read_table(path).table.column_names)
    try:
        schema = pq.read_schema(path)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path} cannot be read: {error}; expected a complete Parquet file") from error
    images = any(pa.types.is_struct(kind) or pa.types.is_binary(kind) for kind in schema.types)
    return [] if images else list(schema.names)


def _name(value: str | float) -> str:
    """Return the name of a class, whole numbers without a decimal point."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _column(name: str, every: np.ndarray, trained: np.ndarray) -> Column:
    """Return the description of a column: categories in all rows, or range and deviation in the training rows."""
    if every.dtype.kind != "f":
        return Column(name, tuple(map(str, np.unique(every))))
    low, high = float(trained.min()), float(trained.max())
    return Column(name, (), low, high if high > low else low + 1, float(trained.std()))


def _encoded(column: Column, values: np.ndarray) -> np.ndarray:
    if not column.categories:
        return column.encode(values)
    return column.encode(np.searchsorted(np.array(column.categories), values))


def _values(path: Path, name: str, column: pa.ChunkedArray) -> np.ndarray:
    """Return a column's values (N,), as float64 if numeric, else as text."""
    numeric = pa.types.is_integer(column.type) or pa.types.is_floating(column.type)
    if pa.types.is_binary(column.type):
        raise DataError(f"{path}: '{name}' has text that is not UTF-8: save the file as UTF-8")
    if not numeric:
        text = [None if value is None else str(value) for value in column.to_pylist()]
        return np.array(text, dtype=object if None in text else None)
    values: np.ndarray = column.to_numpy().astype(np.float64)
    if np.isinf(values).any():
        row = int(np.flatnonzero(np.isinf(values))[0])
        raise DataError(
            f"{path}, row {row} (from 0): '{name}' is {values[row]}, expected a finite number; correct the value"
        )
    return values


def _filled(name: str, values: np.ndarray, trained: np.ndarray) -> tuple[np.ndarray, str]:
    """Return a column (N,) with missing values replaced, and a note on it; the note is empty if none was missing.

    Raises `DataError` for a continuous column without a value in the training rows.
    """
    missing = np.isnan(values) if values.dtype.kind == "f" else np.array([value is None for value in values])
    if not missing.any():
        return values, ""
    said = f"column '{name}': {int(missing.sum())} of {len(values)} values are missing"
    if values.dtype.kind != "f":
        return np.where(missing, _MISSING, values).astype(str), f"{said}: missing values become the category {_MISSING}"
    known = values[trained][~missing[trained]]
    if not len(known):
        raise DataError(f"{said}, including all training rows: remove the column")
    middle = float(np.median(known))
    return np.where(
        missing, middle, values
    ), f"{said}: missing values are replaced by the median of the training rows, {middle:.4g}"


def _among_numbers(values: Iterable[str]) -> list[str]:
    """Return the texts mixed with numbers; empty if there are more distinct texts than distinct numbers."""
    known = [value for value in values if value != _MISSING]
    others = [value for value in known if not _NUMBER.fullmatch(value.strip())]
    return others if 2 * len(set(others)) <= len(set(known)) else []


def _shipped(name: str) -> Path:
    """Return the path of scikit-learn's table without importing its `datasets`, which takes three seconds."""
    package = find_spec("sklearn")
    assert package is not None
    assert package.origin is not None
    path = Path(package.origin).parent / "datasets" / "data" / name
    if not path.is_file():
        raise DataError(f"{path} is missing, but it is part of scikit-learn: reinstall scikit-learn")
    return path
