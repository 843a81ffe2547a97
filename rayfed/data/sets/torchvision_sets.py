"""Base class of torchvision's data sets, with a local root and downloads only on request."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import file_digest
from http.client import HTTPException
from pathlib import Path
from typing import Any, ClassVar

from rayfed.core.files import local_path
from rayfed.data.base import Source
from rayfed.errors import DataError
from rayfed.registry import component


@component
class TorchvisionSource(Source):
    """Base of a data set under `root` in torchvision's layout."""

    original: ClassVar[Any]
    """Class of the data set in torchvision."""
    layout: ClassVar[str]
    """Description of the files under `root`, for errors."""

    root: Path
    """Folder of the files; `~` and environment variables are expanded."""
    download: bool = False
    """Whether torchvision downloads missing files into `root`."""

    @property
    def folder(self) -> Path:
        """Return the path of the folder with the data set's files."""
        return local_path(self.root)

    def missing(self, found: str) -> DataError:
        """Return the error for missing files, with the expected files and advice."""
        return DataError(
            f"{found}; expected {self.layout}: set their folder (--set data.root=FOLDER), or set `download: true`"
        )

    @contextmanager
    def downloading(self) -> Iterator[None]:
        """Convert a failed download by torchvision to `DataError` with the expected files."""
        try:
            yield
        except (OSError, RuntimeError, HTTPException) as error:
            raise DataError(
                f"the download into {self.folder} failed: {' '.join(str(error).split())}; "
                f"download the files yourself and provide {self.layout}"
            ) from error

    def check_md5(self, path: Path, expected: str) -> None:
        """Raise `DataError` unless a file exists and has the MD5 that torchvision expects."""
        if not path.is_file():
            raise self.missing(f"{path} is missing")
        with path.open("rb") as stream:
            found = file_digest(stream, "md5").hexdigest()
        if found != expected:
            raise DataError(
                f"{path} is truncated or altered: expected MD5 {expected}, found {found} "
                f"({path.stat().st_size} bytes); delete the file and download it again"
            )
