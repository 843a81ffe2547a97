"""Memory-mapped data sets, from a packed file written by `rayfed pack`."""

from __future__ import annotations

from pathlib import Path

from rayfed.core.files import local_path
from rayfed.data.base import Dataset, Source
from rayfed.data.mapped import open_mapped
from rayfed.errors import DataError
from rayfed.registry import component


@component
class Arrow(Source):
    """Packed file from `rayfed pack`, memory-mapped; all nodes of a cluster need the file at the same path."""

    path: Path
    """Path of the file; `~` and environment variables are expanded."""

    def load(self) -> Dataset:
        """Open the data set without reading the images; raise `DataError` if `size` differs from the images' size."""
        data = open_mapped(str(local_path(self.path).resolve()), self.train_samples, self.test_samples)
        if self.size is not None and data.sample.shape[1:] != (self.size, self.size):
            raise DataError(
                f"data.size: the images in {self.path} are {data.sample.shape[1]}x{data.sample.shape[2]} (height x "
                f"width) and cannot be resized; pack the data set again at size {self.size}"
            )
        return data
