"""Data sets larger than memory, from a file of `rayfed pack`."""

from __future__ import annotations

from pathlib import Path

from rayfed.data.base import Dataset, Source
from rayfed.data.mapped import mapped
from rayfed.errors import DataError
from rayfed.files import local_path
from rayfed.registry import component


@component
class Arrow(Source):
    """Arrow file that `rayfed pack` wrote, mapped and not loaded: all nodes of a cluster have it at this path."""

    path: Path
    """The file; `~` and environment variables are expanded."""

    def load(self) -> Dataset:
        """Open the data set, its images in the file. Raises `DataError` for another `size` than that of its images."""
        data = mapped(str(local_path(self.path).resolve()), self.train_samples, self.test_samples)
        if self.size is not None and data.sample.shape[1:] != (self.size, self.size):
            raise DataError(
                f"data.size: the images in {self.path} are {data.sample.shape[1]}x{data.sample.shape[2]} (height x "
                f"width) and are not resized as they are read; pack them again at size {self.size}"
            )
        return data
