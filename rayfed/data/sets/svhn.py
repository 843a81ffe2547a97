"""SVHN: photographs of house numbers, cropped to single digits.

Netzer et al., "Reading Digits in Natural Images with Unsupervised Feature Learning", NIPS workshop, 2011.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from torchvision import datasets

from rayfed.data.base import StoredSplit
from rayfed.data.sets.torchvision_sets import TorchvisionSource
from rayfed.registry import component


@component
class SVHN(TorchvisionSource):
    """99,289 colour images of 32x32, ten digits: `train_32x32.mat` and `test_32x32.mat` in root."""

    is_public: ClassVar[bool] = True

    original: ClassVar[Any] = datasets.SVHN
    layout: ClassVar[str] = "train_32x32.mat and test_32x32.mat in root"

    def read(self) -> tuple[StoredSplit, StoredSplit, tuple[str, ...]]:
        """Read 73,257 training and 26,032 test images; the digit 0, stored as 10, has label 0."""
        return self._split("train"), self._split("test"), tuple("0123456789")

    def _split(self, split: str) -> StoredSplit:
        if self.download:
            with self.downloading():
                self.original(self.folder, split=split, download=True)
        _, name, md5 = self.original.split_list[split]
        self.check_md5(self.folder / name, md5)
        data = self.original(self.folder, split=split)
        return StoredSplit(np.ascontiguousarray(data.data), data.labels)
