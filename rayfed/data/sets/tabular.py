"""Rows of tables: scikit-learn's diabetes patients, or the user's own CSV or Parquet file.

Source of `diabetes`: Efron et al. 2004, "Least Angle Regression", section 1: 442 patients, ten measures, and how the
illness progressed within a year; the table on the original scale ships in scikit-learn's wheel. How columns become
numbers between 0 and 1 follows Vero et al. 2023, "TabLeak: Tabular Data Leakage in Federated Learning", section 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq
from pydantic import Field

from rayfed.data.base import Dataset, Split, at_most, local_path, stratified
from rayfed.errors import DataError, nearest
from rayfed.registry import component
from rayfed.samples import Column, Modality, Records

_DIABETES = ("age", "sex", "bmi", "blood_pressure", "s1", "s2", "s3", "s4", "s5", "s6")
_MOST_BYTES = 4096


@component
class Tabular:
    """Base of the data sets of records; a stratified fifth, always the same one, is the test split."""

    holds: ClassVar[Modality] = "records"

    train_samples: Annotated[int, Field(ge=1)] | None = None
    """Use only this many training samples: always the same ones, each class in its share. None uses all."""
    test_samples: Annotated[int, Field(ge=1)] | None = None
    """Use only this many test samples, chosen as those for training. None uses all."""

    def load(self) -> Dataset:
        """Load the data set into memory, with numbers on 256 levels and a byte for each category.

        The levels lie between the smallest and the largest training value. Raises `DataError` for missing or broken
        files.
        """
        values, labels, classes = self.read()
        if len(labels) < 5:
            raise DataError(
                f"a table of {len(labels)} rows: at least 5 are needed to hold out a fifth as the test split"
            )
        tested = stratified(labels, len(labels) // 5)
        trained = np.setdiff1d(np.arange(len(labels)), tested, assume_unique=True)
        columns = tuple(_column(name, found, found[trained]) for name, found in values.items())
        if (width := sum(column.width for column in columns)) > _MOST_BYTES:
            widest = max(columns, key=lambda column: column.width)
            raise DataError(
                f"a row takes {width} numbers, at most {_MOST_BYTES} fit: leave out columns of text, as "
                f"'{widest.name}' with {widest.width} values"
            )
        codes = np.concatenate([_encoded(c, found) for c, found in zip(columns, values.values(), strict=True)], axis=1)
        images = codes[:, None, None, :]
        train = at_most(self.train_samples, Split(images[trained], labels[trained]), "train_samples")
        test = at_most(self.test_samples, Split(images[tested], labels[tested]), "test_samples")
        assert isinstance(train.images, np.ndarray)
        assert isinstance(test.images, np.ndarray)
        return Dataset(train.images, train.labels, test.images, test.labels, classes, sample=Records(columns))

    def read(self) -> tuple[Mapping[str, np.ndarray], np.ndarray, tuple[str, ...]]:
        """Return columns (N,) by name, text where they are categorical; labels (N,) int64; names of the classes."""
        raise NotImplementedError


@component
class Diabetes(Tabular):
    """Records of 442 patients, nine measures and the sex; the class: whether the illness progressed beyond the median.

    Needs no files.
    """

    def read(self) -> tuple[Mapping[str, np.ndarray], np.ndarray, tuple[str, ...]]:
        """Read the table of scikit-learn's wheel; its codes for the sex, 1 and 2, are the categories."""
        table, target = np.loadtxt(_shipped("diabetes_data_raw.csv.gz")), np.loadtxt(_shipped("diabetes_target.csv.gz"))
        columns = dict(zip(_DIABETES, table.T, strict=True))
        columns["sex"] = columns["sex"].astype(int).astype(str)
        return columns, (target > np.median(target)).astype(np.int64), ("slow", "fast")


@component
class Table(Tabular):
    """Records of the user's own file: numeric columns are continuous, all others categorical."""

    path: str
    """A `.csv` file with names in its first line, or a `.parquet` file; `~` and environment variables are expanded."""
    label: str
    """Name of the column of the classes."""

    def read(self) -> tuple[Mapping[str, np.ndarray], np.ndarray, tuple[str, ...]]:
        """Read all columns in the order of the file; classes and categories in that of their values."""
        path = local_path(self.path)
        table = _table(path)
        if self.label not in table.column_names:
            raise DataError(
                f"data.label: {path} has no column '{self.label}': {nearest(self.label, table.column_names)}"
            )
        columns = {name: _values(path, name, table[name]) for name in table.column_names}
        classes, labels = np.unique(columns.pop(self.label), return_inverse=True)
        if len(classes) < 2 or not columns:
            raise DataError(f"{path}: expected two or more classes in '{self.label}', and another column beside it")
        return columns, labels.astype(np.int64), tuple(map(_name, classes.tolist()))


def _name(value: str | float) -> str:
    """Return the name of a class: whole numbers without a point, however large."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _column(name: str, every: np.ndarray, trained: np.ndarray) -> Column:
    """Describe a column: categories of all rows, bounds and deviation of the training rows."""
    if every.dtype.kind != "f":
        return Column(name, tuple(map(str, np.unique(every))))
    low, high = float(trained.min()), float(trained.max())
    return Column(name, (), low, high if high > low else low + 1, float(trained.std()))


def _encoded(column: Column, values: np.ndarray) -> np.ndarray:
    if not column.categories:
        return column.encode(values)
    return column.encode(np.searchsorted(np.array(column.categories), values))


def _table(path: Path) -> pa.Table:
    absent = pyarrow.csv.ConvertOptions(strings_can_be_null=True)
    try:
        table = pq.read_table(path) if path.suffix == ".parquet" else pyarrow.csv.read_csv(path, convert_options=absent)
        names = table.column_names
    except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
        raise DataError(
            f"{path} cannot be read: {error}; expected a .csv with names in line 1, or a .parquet"
        ) from error
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise DataError(f"{path}: two columns are called '{twice[0]}': rename one")
    return table


def _values(path: Path, name: str, column: pa.ChunkedArray) -> np.ndarray:
    """Return a column's values, (N,) float64, or text for what is not numeric."""
    numeric = pa.types.is_integer(column.type) or pa.types.is_floating(column.type)
    if pa.types.is_binary(column.type):
        raise DataError(f"{path}: '{name}' has text that is not UTF-8: save the file in that encoding")
    if column.null_count:
        row = pc.index(column.is_null(), True).as_py()
        raise DataError(
            f"{path}, row {row} (from 0): '{name}' is empty ({column.null_count} such rows in all); fill it in"
        )
    if not numeric:
        return np.array([str(value) for value in column.to_pylist()])
    values: np.ndarray = column.to_numpy().astype(np.float64)
    if not np.isfinite(values).all():
        row = int(np.flatnonzero(~np.isfinite(values))[0])
        raise DataError(f"{path}, row {row} (from 0): '{name}' is {values[row]}, expected a number; fill it in")
    return values


def _shipped(name: str) -> Path:
    """Return the path of scikit-learn's table without importing its `datasets`, which takes three seconds."""
    package = find_spec("sklearn")
    assert package is not None
    assert package.origin is not None
    path = Path(package.origin).parent / "datasets" / "data" / name
    if not path.is_file():
        raise DataError(f"{path} is missing: the wheel of scikit-learn ships it; install that again")
    return path
