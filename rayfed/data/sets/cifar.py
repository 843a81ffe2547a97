"""CIFAR-10 and CIFAR-100, in torchvision's layout or as Parquet files in the Hugging Face layout.

Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image
from torchvision import datasets

from rayfed.data.base import Dataset, StoredSplit
from rayfed.data.sets.parquet import read_parquet
from rayfed.data.sets.torchvision_sets import TorchvisionSource
from rayfed.registry import component

_SHARDS = "Parquet files *train*.parquet and *test*.parquet (or *val*.parquet) in root or one folder below"


@component
class CIFAR10(TorchvisionSource):
    """60,000 colour images of 32x32 pixels in 10 classes (or as many images as the Parquet files contain)."""

    is_public: ClassVar[bool] = True

    original: ClassVar[Any] = datasets.CIFAR10
    layout: ClassVar[str] = f"torchvision's folder cifar-10-batches-py in root, or {_SHARDS}"
    label_columns: ClassVar[tuple[str, ...]] = ("label",)

    def read(self) -> tuple[StoredSplit, StoredSplit, tuple[str, ...]]:
        """Read torchvision's batch files if their folder exists, else all Parquet files, in stored order."""
        train, test = self._shards("train"), self._shards("test", "val")
        if (train or test) and not self._batches.is_dir():
            return self._read_parquet(train, test)
        return self._read_batches()

    def load(self) -> Dataset:
        """Load the data set into memory, with a note if the Parquet files have different image encodings."""
        data = super().load()
        shards = [] if self._batches.is_dir() else self._shards("train")
        kinds = {path.name: kind for path in shards if (kind := self._encoding(path))}
        if len(set(kinds.values())) < 2:
            return data
        named = ", ".join(f"{name} ({kind})" for name, kind in kinds.items())
        said = (
            f"data: the training images are from {named}, and JPEG loses detail: to use only one file, give that file "
            f"(`data: {{name: parquet, train: FILE}}`)"
        )
        return replace(data, remarks=(*data.remarks, said))

    def _encoding(self, path: Path) -> str | None:
        """Return the encoding of the first image of a Parquet file, such as PNG; None if unknown."""
        with suppress(StopIteration, KeyError, TypeError, OSError, pa.ArrowException):
            file = pq.ParquetFile(path)
            column = next(name for name in ("image", "img") if name in file.schema_arrow.names)
            [first] = next(file.iter_batches(1, columns=[column])).to_pylist()
            return Image.open(BytesIO(first[column]["bytes"])).format
        return None

    @property
    def _batches(self) -> Path:
        return Path(self.folder, self.original.base_folder)

    def _shards(self, *splits: str) -> list[Path]:
        patterns = [f"{below}*{split}*.parquet" for split in splits for below in ("", "*/")]
        return sorted({path for pattern in patterns for path in self.folder.glob(pattern)})

    def _read_parquet(self, train: list[Path], test: list[Path]) -> tuple[StoredSplit, StoredSplit, tuple[str, ...]]:
        for split, files in (("train", train), ("test", test)):
            if not files:
                raise self.missing(f"{self.folder} has Parquet files, but no file for the {split} split")
        return read_parquet(train, test, ("image", "img"), self.label_columns)

    def _read_batches(self) -> tuple[StoredSplit, StoredSplit, tuple[str, ...]]:
        if self.download:
            with self.downloading():
                self.original(self.folder, download=True)
        meta = (self.original.meta["filename"], self.original.meta["md5"])
        for name, md5 in (*self.original.train_list, *self.original.test_list, meta):
            self.check_md5(self._batches / name, md5)
        train, test = self.original(self.folder, train=True), self.original(self.folder, train=False)
        return _split(train), _split(test), tuple(train.classes)


@component
class CIFAR100(CIFAR10):
    """60,000 colour images of 32x32 pixels in 100 classes (the fine labels)."""

    original: ClassVar[Any] = datasets.CIFAR100
    layout: ClassVar[str] = f"torchvision's folder cifar-100-python in root, or {_SHARDS}"
    label_columns: ClassVar[tuple[str, ...]] = ("fine_label", "label")


def _split(data: Any) -> StoredSplit:
    images = np.ascontiguousarray(data.data.transpose(0, 3, 1, 2))
    return StoredSplit(images, np.array(data.targets, dtype=np.int64))
