"""Memory-mapped data sets: an Arrow file whose pixels are read page by page on access.

The file is in Arrow's IPC file format, uncompressed. It has a column `image` with C * H * W values per row (8 or 16
bits each) and a column `label` (int64), training samples first. The schema's metadata contain the `PackedLayout`. Other
processes receive the file's path, so every node needs the file at the same path.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from socket import gethostname
from typing import Any

import numpy as np
import pyarrow as pa

from rayfed.core.documents import read_json
from rayfed.data.base import Dataset, choose_stratified
from rayfed.errors import DataError

_METADATA = b"rayfed"


@dataclass(frozen=True)
class PackedLayout:
    """Layout of a packed data set file, stored in the file's metadata."""

    shape: tuple[int, int, int]
    """Shape of an image, (C, H, W)."""
    train: int
    """Number of training samples; the other rows are the test split."""
    classes: tuple[str, ...]
    identity: str
    """Random identifier of the packed file, which processes that share a data set compare."""

    bits: int = 8
    """Bits per value, 8 or 16."""

    @property
    def depth(self) -> np.dtype:
        """Return the NumPy type of a stored pixel value."""
        return np.dtype(np.uint8 if self.bits == 8 else np.uint16)

    @property
    def row_bytes(self) -> int:
        """Return the size of one image in bytes."""
        return math.prod(self.shape) * self.depth.itemsize

    def schema(self) -> pa.Schema:
        """Return the Arrow schema of the packed file, with the layout in its metadata."""
        columns = [("image", pa.binary(self.row_bytes)), ("label", pa.int64())]
        return pa.schema(columns, metadata={_METADATA: json.dumps(asdict(self))})

    @classmethod
    def from_schema(cls, schema: pa.Schema) -> PackedLayout:
        """Return the layout stored in the Arrow schema of a packed file.

        Raises `ValueError`, `KeyError`, `TypeError` or `OverflowError` if the schema is not from a packed file.
        """
        if _METADATA not in (schema.metadata or {}):
            raise ValueError("the file's schema has no metadata from rayfed")
        said: dict[str, Any] = read_json(schema.metadata[_METADATA].decode())
        channels, height, width = map(int, said["shape"])
        if min(channels, height, width) < 1:
            raise ValueError(f"the metadata describe images of the invalid shape {channels}x{height}x{width}")
        classes = tuple(map(str, said["classes"]))
        if (bits := int(said.get("bits", 8))) not in (8, 16):
            raise ValueError(f"the metadata describe images of {bits} bits per value, expected 8 or 16")
        layout = cls((channels, height, width), int(said["train"]), classes, str(said["identity"]), bits)
        if not schema.equals(layout.schema()):
            raise ValueError("the columns are not those of a packed file")
        return layout

    def check(self, batches: Sequence[pa.RecordBatch]) -> None:
        """Raise `ValueError` or `ArrowException` if the rows of the file do not match the schema."""
        for batch in batches:
            batch.validate()
            if any(column.null_count for column in batch.columns):
                raise ValueError("the file contains nulls")
        rows = sum(len(batch) for batch in batches)
        if not 0 < self.train < rows:
            raise ValueError(f"{self.train} of the {rows} rows are for training, so one split is empty")


@dataclass(frozen=True, eq=False)
class Mapped:
    """Images (N, C, H, W) in a memory-mapped file (`rayfed.data.base.Images`)."""

    batches: Sequence[np.ndarray]
    """Batches of images in the file, (n, C, H, W) each."""
    ends: np.ndarray
    """Ends of the batches, in rows of the file."""
    rows: np.ndarray
    """Rows of the file, (N,) int64."""

    @property
    def dtype(self) -> np.dtype:
        """Return the NumPy type of a pixel value, uint8 or uint16."""
        return self.batches[0].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the images, (N, C, H, W)."""
        return len(self.rows), *self.batches[0].shape[1:]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, chosen: np.ndarray) -> np.ndarray:
        """Return the images at these indices, in memory."""
        rows = self.rows[chosen]
        found = np.empty((len(rows), *self.shape[1:]), self.dtype)
        batches = np.searchsorted(self.ends, rows, side="right")
        for place, (row, batch) in enumerate(zip(rows, batches, strict=True)):
            found[place] = self.batches[batch][row - self.ends[batch]]  # counted from the batch's end
        return found

    def only(self, chosen: np.ndarray) -> Mapped:
        """Return the images at the indices `chosen`, without reading them."""
        return replace(self, rows=self.rows[chosen])


@dataclass(frozen=True, eq=False)
class MappedDataset(Dataset):
    """Data set with labels in memory and images in a memory-mapped file."""

    origin: tuple[Any, ...] = ()
    """Arguments with which `open_mapped` opens the data set again."""

    def with_public(self, share: float) -> Dataset:
        """Return a copy with public samples (see `Dataset.with_public`); the images stay in the file."""
        found = super().with_public(share)
        assert isinstance(found, MappedDataset)
        return replace(found, origin=(*self.origin[:-1], share))

    def as_numbers(self) -> Dataset:
        """Raise `DataError`, because other processes would read classes instead of numbers from the file."""
        raise DataError("a packed file contains classes, but the loss needs numeric labels: use the original data set")

    def _images(self, rows: np.ndarray) -> Mapped:
        assert isinstance(self.train_images, Mapped)
        return self.train_images.only(rows)

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopened, self.origin


class _Missing:
    """Placeholder for a data set that is not on this machine; every access raises an error."""

    def __init__(self, error: DataError) -> None:
        self._error = error

    def __getattr__(self, name: str) -> Any:
        raise self._error


def _reopened(*origin: Any) -> Dataset | _Missing:
    try:
        return open_mapped(*origin)
    except DataError as error:
        return _Missing(error)


def open_mapped(
    path: str,
    train_samples: int | None = None,
    test_samples: int | None = None,
    identity: str | None = None,
    public: float = 0.0,
) -> Dataset:
    """Open a packed data set file, written by `rayfed.data.packing`, by memory-mapping.

    Raises `DataError`, naming the path, if the file is missing, damaged, or has another identity than `identity`.
    """
    try:
        with pa.memory_map(path) as file, pa.ipc.open_file(file) as reader:
            layout = PackedLayout.from_schema(reader.schema)
            batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
            layout.check(batches)
    except FileNotFoundError as error:
        advice = "copy the file there, or use a file system that all nodes share"
        raise DataError(f"{path} is not on the machine {gethostname()}: {advice}") from error
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise DataError(f"{path} cannot be memory-mapped: {error}; create the file again with `rayfed pack`") from error
    if identity not in (None, layout.identity):
        raise DataError(f"{path} on the machine {gethostname()} is not the file of the run: copy that file there")
    pixels = [_pixels(batch.column("image"), layout) for batch in batches]
    labels = np.concatenate([batch.column("label").to_numpy() for batch in batches])
    train = _some("train_samples", labels[: layout.train], train_samples)
    test = _some("test_samples", labels[layout.train :], test_samples) + layout.train
    every = Mapped(pixels, np.cumsum([len(p) for p in pixels]), np.arange(len(labels)))
    data = MappedDataset(
        every.only(train),
        labels[train],
        every.only(test),
        labels[test],
        layout.classes,
        origin=(path, train_samples, test_samples, layout.identity, 0.0),
    )
    return data.with_public(public) if public else data


def _pixels(column: pa.Array, layout: PackedLayout) -> np.ndarray:
    """Return images (n, C, H, W) as a view of the column's memory."""
    flat = np.frombuffer(column.buffers()[1], layout.depth)
    size = math.prod(layout.shape)
    return flat[column.offset * size : (column.offset + len(column)) * size].reshape(-1, *layout.shape)


def _some(field: str, labels: np.ndarray, samples: int | None) -> np.ndarray:
    if samples is None:
        return np.arange(len(labels))
    if samples > len(labels):
        raise DataError(f"{field} is {samples}, but the split has only {len(labels)} samples; lower it or remove it")
    return choose_stratified(labels, samples)
