"""Files of a folder, read and replaced as a whole, on a local disk or any fsspec file system.

A local file is written to a temporary file in the same folder, flushed to disk and renamed. Other file systems store
one object per write. A reader therefore sees the old or the new content, never a part, even if a process dies.

Each write and removal first checks the folder's lease, if it has one (`rayfed.store.lease`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from fsspec.utils import get_protocol

from rayfed.core.documents import read_json, read_yaml
from rayfed.errors import RunError, require_extra
from rayfed.store.shapes import check_document_shape

_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{32}\.tmp", re.ASCII)


class Fence(Protocol):
    """Protocol of a lease that is checked before each change of a file in a folder."""

    @property
    def token(self) -> int:
        """Return the number of the driver that holds the folder, from 1, increasing with each driver."""

    @property
    def taken_from(self) -> str:
        """Return the description of the previous driver if that driver had not ended, else an empty string."""

    def check(self) -> None:
        """Raise `LeaseError` if another driver has taken over the folder."""


@dataclass(frozen=True)
class Files:
    """Access to the files of one folder.

    Names in all methods are relative to the folder (`status.json`, `checkpoint/latest.json`). Names in all methods are
    relative to the folder (`status.json`, `checkpoint/latest.json`).
    """

    fs: AbstractFileSystem
    root: str
    """Path of the folder, as `fs` writes paths."""
    lease: Fence | None = field(default=None, compare=False)
    """Lease that a writer holds; None for readers, and for the writer of a folder that no other process uses."""

    @property
    def token(self) -> int:
        """Return the number of the driver that writes to the folder, 1 for the first driver."""
        return self.lease.token if self.lease else 1

    @property
    def tag(self) -> str:
        """Return the suffix in the names of the driver's files, such as `-2`; empty for the first driver.

        The files of two drivers may differ. With it, a delayed request of an earlier driver cannot replace or remove a
        file of a later driver.
        """
        return tag(self.token)

    def check(self) -> None:
        """Raise `LeaseError` if another driver has taken over the folder."""
        if self.lease:
            self.lease.check()

    @property
    def url(self) -> str:
        """Return the address of the folder: a path if the folder is local, else a URL."""
        return self.root if isinstance(self.fs, LocalFileSystem) else str(self.fs.unstrip_protocol(self.root))

    @property
    def name(self) -> str:
        """Return the name of the folder, `<name>-<time>`."""
        return self.root.rpartition("/")[2]

    def exists(self, name: str) -> bool:
        """Return whether a file exists in the folder."""
        with explain_errors("look into", self._url(name), "check the address and your access rights"):
            self.fs.invalidate_cache()  # object stores remember listings; another process may have written since
            return bool(self.fs.exists(self._path(name)))

    def read_bytes(self, name: str) -> bytes:
        """Read a whole file as bytes; raise `RunError` if that fails."""
        with explain_errors("read", self._url(name), "check that the run folder is complete and that you can read it"):
            return bytes(self.fs.cat_file(self._path(name)))

    def write_bytes(self, name: str, data: bytes, private: bool = False) -> None:
        """Write a whole file atomically, replacing an older file; raise `RunError` if that fails.

        On a local disk only the owner can read a `private` file.
        """
        self.check()
        path = self._path(name)
        with explain_errors("write", self._url(name), "check whether the disk is full or read-only"):
            self.fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            if isinstance(self.fs, LocalFileSystem):
                _replace(Path(path), data, 0o600 if private else 0o666)
            else:
                self.fs.pipe_file(path, data)

    def remove_unfinished(self) -> None:
        """Remove temporary files that interrupted writes left on a local disk, in all subfolders."""
        if isinstance(self.fs, LocalFileSystem):
            for path in sorted(Path(self.root).rglob(".*.tmp")):
                if _TEMPORARY.fullmatch(path.name):
                    self.remove(path.relative_to(self.root).as_posix())

    def claim(self, name: str, data: bytes) -> bool:
        """Create a file atomically unless the file exists, and return whether this call created it.

        `data` must be unique to the caller. This step is atomic on local disks, S3, Google Cloud and Azure. On other
        stores fsspec checks and then writes, so the last of several simultaneous writers wins. Raises `RunError` if the
        file cannot be written.
        """
        self.check()
        path = self._path(name)
        with explain_errors("write", self._url(name), "check whether the disk is full or read-only"):
            self.fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            try:
                if isinstance(self.fs, LocalFileSystem):
                    _new(path, data)
                else:
                    self.fs.pipe_file(path, data, mode="create")
            except Exception:  # each file system raises its own error; a retried put may find its own first attempt
                self.fs.invalidate_cache()
                if not self.fs.exists(path):
                    raise
            return bool(self.fs.cat_file(path) == data)

    def make_private(self, folder: str) -> None:
        """Create a subfolder that only its owner can open, if the file system is local.

        Raises `RunError` if it cannot be created.
        """
        self.check()
        with explain_errors("create the folder", self._url(folder), "check whether the disk is full or read-only"):
            self.fs.makedirs(self._path(folder), exist_ok=True)
            if isinstance(self.fs, LocalFileSystem):
                Path(self._path(folder)).chmod(0o700)

    def read_text(self, name: str) -> str:
        """Read a whole UTF-8 file as text; raise `RunError` for other encodings."""
        try:
            return self.read_bytes(name).decode()
        except UnicodeDecodeError as error:
            raise RunError(f"'{self._url(name)}' cannot be read: {error}; restore the file from a copy") from error

    def read_mapping(self, name: str) -> dict[str, Any]:
        """Read the `key: value` pairs of a YAML or JSON file; raise `RunError` for other content."""
        try:
            text = self.read_text(name)
            value = read_json(text) if name.endswith(".json") else read_yaml(text)[0]
            if isinstance(value, dict):
                check_document_shape(name, value)
        except ValueError as error:
            raise RunError(f"'{self._url(name)}' cannot be read: {error}; restore the file from a copy") from error
        if not isinstance(value, dict):
            kind = type(value).__name__
            raise RunError(
                f"'{self._url(name)}' should contain `key: value` pairs, not {kind}; restore the file from a copy"
            )
        return value

    def write_text(self, name: str, text: str) -> None:
        """Write a text to a UTF-8 file atomically."""
        self.write_bytes(name, text.encode())

    def remove(self, name: str) -> None:
        """Delete a file if it exists; raise `RunError` if that fails."""
        self.check()
        with explain_errors("remove", self._url(name), "check your access rights"), suppress(FileNotFoundError):
            self.fs.rm_file(self._path(name))

    def files(self, folder: str) -> list[str]:
        """Return the sorted names of the files in a subfolder; empty if there is no such subfolder."""
        return self._names(folder, "file")

    def folders(self, folder: str) -> list[str]:
        """Return the sorted names of the folders in a subfolder; empty if there is no such subfolder."""
        return self._names(folder, "directory")

    def _names(self, folder: str, type: str) -> list[str]:
        with explain_errors("list", self._url(folder), "check the address and your access rights"):
            self.fs.invalidate_cache()
            try:
                entries = self.fs.ls(self._path(folder), detail=True)
            except FileNotFoundError:
                return []
        return sorted(entry["name"].rpartition("/")[2] for entry in entries if entry["type"] == type)

    def _path(self, name: str) -> str:
        return f"{self.root}/{name}"

    def _url(self, name: str) -> str:
        return f"{self.url}/{name}"


def tag(token: int) -> str:
    """Return the suffix in the names of a driver's files, such as `-2`; empty for the first driver."""
    return f"-{token}" if token > 1 else ""


def locate(path: str) -> tuple[AbstractFileSystem, str]:
    """Return the fsspec file system of a local path or URL, and the path on that file system."""
    if get_protocol(path) in ("s3", "s3a"):
        require_extra("aws", path, "s3fs")
    with explain_errors("use", path, "give a local folder, or an fsspec URL whose package is installed"):
        fs, root = url_to_fs(os.path.expanduser(path))
        return fs, root


def _new(path: str, data: bytes) -> None:
    """Write a local file that must not exist yet; a crash leaves it empty."""
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _replace(path: Path, data: bytes, mode: int) -> None:
    """Write `data` to a local path atomically, safe against crashes and power cuts; umask applies to `mode`."""
    temporary = path.with_name(f".{path.name}.{uuid4().hex}.tmp")  # matches `_TEMPORARY`
    try:
        with open(temporary, "xb", opener=partial(os.open, mode=mode)) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
    if hasattr(os, "O_DIRECTORY"):  # flush the rename, too; Windows has no such call
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


@contextmanager
def explain_errors(action: str, path: str, advice: str) -> Iterator[None]:
    """Convert file-system errors in the block to `RunError` with advice.

    Catches every exception, as the errors of object stores (missing credentials, unknown bucket) share no base class.
    """
    try:
        yield
    except Exception as error:
        raise RunError(f"cannot {action} '{path}': {type(error).__name__}: {error}; {advice}") from error
