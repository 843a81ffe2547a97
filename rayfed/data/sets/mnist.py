"""MNIST and Fashion-MNIST, read from four idx files each.

LeCun, Cortes and Burges, "The MNIST database of handwritten digits", 1998; Xiao, Rasul and Vollgraf, "Fashion-MNIST",
arXiv:1708.07747, 2017.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from torchvision import datasets

from rayfed.data.base import StoredSplit, check_labels
from rayfed.data.idx import read_idx
from rayfed.data.sets.torchvision_sets import TorchvisionSource
from rayfed.errors import DataError
from rayfed.registry import component

_TRAIN = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte")
_TEST = ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
_FILES = "the four files {train,t10k}-{images-idx3,labels-idx1}-ubyte, with or without .gz,"


@component
class MNIST(TorchvisionSource):
    """70,000 handwritten digits, 28x28 grey: four idx files, `.gz` or unpacked."""

    is_public: ClassVar[bool] = True

    original: ClassVar[Any] = datasets.MNIST
    layout: ClassVar[str] = f"{_FILES} in root, root/mnist or root/MNIST/raw"
    folders: ClassVar[tuple[str, ...]] = ("MNIST/raw", "mnist", "")
    classes: ClassVar[tuple[str, ...]] = tuple("0123456789")

    def read(self) -> tuple[StoredSplit, StoredSplit, tuple[str, ...]]:
        """Read 60,000 training and 10,000 test images, and the class names."""
        if self.download and not all(self._find(name) for name in (*_TRAIN, *_TEST)):
            with self.downloading():
                self.original(self.folder, download=True)
        return self._split(*_TRAIN), self._split(*_TEST), self.classes

    def _find(self, name: str) -> Path | None:
        # The data set's own folders come first, as root itself may have files of the other data set.
        folders = [self.folder / folder for folder in self.folders]
        paths = [folder / f"{name}{ending}" for folder in folders for ending in ("", ".gz")]
        return next((path for path in paths if path.is_file()), None)

    def _split(self, images_name: str, labels_name: str) -> StoredSplit:
        images_path, labels_path = self._find(images_name), self._find(labels_name)
        if images_path is None or labels_path is None:
            name = labels_name if images_path else images_name
            raise self.missing(f"{name} is missing from {self.folder}")
        images, labels = read_idx(images_path, 3), read_idx(labels_path, 1).astype(np.int64)
        if len(images) != len(labels):
            raise DataError(f"{images_path} has {len(images)} images, but {labels_path} has {len(labels)} labels")
        check_labels(str(labels_path), labels, len(self.classes))
        return StoredSplit(images[:, None], labels)


@component
class FashionMNIST(MNIST):
    """70,000 images of clothes, 28x28 grey, in the same files as MNIST."""

    original: ClassVar[Any] = datasets.FashionMNIST
    layout: ClassVar[str] = f"{_FILES} in root, root/fashion_mnist or root/FashionMNIST/raw"
    folders: ClassVar[tuple[str, ...]] = ("FashionMNIST/raw", "fashion_mnist", "fashion-mnist", "")
    classes: ClassVar[tuple[str, ...]] = tuple(datasets.FashionMNIST.classes)
