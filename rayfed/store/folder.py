"""The folder of one run: whole files, replaced atomically, on a local disk or any fsspec file system.

A local file is written beside its target, forced to the disk and renamed over it; on other file systems one put is
one object. So a reader sees the old content or the new, never half of it, whenever a process dies.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from io import BytesIO
from itertools import count
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq
from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from rayfed.documents import read_json, read_yaml
from rayfed.errors import RunError, nearest
from rayfed.store.schemas import TABLES
from rayfed.store.shapes import check_shape

SCENARIO = "scenario.yaml"
"""The file that makes a folder a run folder."""
_PART = re.compile(r"part-(\d{5,})\.parquet")


@dataclass(frozen=True)
class RunFolder:
    """One run's folder; names in all methods are relative to it (`status.json`, `checkpoint/latest.json`)."""

    fs: AbstractFileSystem
    root: str
    """Path of the folder, as `fs` writes paths."""

    @classmethod
    def create(cls, out: str, name: str, time: datetime | None = None) -> RunFolder:
        """Make `<out>/<name>-<YYYYmmdd-HHMMSS>`; where that exists already, `...-2`, `...-3` and so on.

        `out` is a local path or an fsspec URL (`s3://bucket/runs`), `time` is now unless given. Raises `RunError`
        where no folder can be made.
        """
        fs, parent = _locate(out)
        stem = f"{parent.rstrip('/')}/{name}-{time or datetime.now():%Y%m%d-%H%M%S}"
        for number in count(1):
            folder = cls(fs, stem if number == 1 else f"{stem}-{number}")
            with _explained("make the run folder", folder.url, "choose another place with --out"):
                _check_bucket(fs, folder.root)
                if fs.exists(folder.root):
                    continue
                try:
                    fs.makedirs(folder.root, exist_ok=False)
                except FileExistsError:  # another run took the name since we looked
                    continue
                return folder
        raise AssertionError("unreachable: count() does not end")

    @classmethod
    def open(cls, path: str) -> RunFolder:
        """Return the run folder at a local path or fsspec URL; raises `RunError`, naming those nearby, without one."""
        fs, root = _locate(path)
        folder = cls(fs, root.rstrip("/") or "/")
        if folder.exists(SCENARIO):
            return folder
        inside = _runs_in(fs, folder.root)
        if inside:
            raise RunError(f"'{path}' has no {SCENARIO} but holds run folders: name one of {', '.join(inside)}")
        parent, _, name = folder.root.rpartition("/")
        beside = nearest(name, _runs_in(fs, parent))
        raise RunError(f"'{path}' is no run folder (no {SCENARIO} there); beside it, {beside}")

    @classmethod
    def at(cls, path: str) -> RunFolder:
        """Return the folder at a local path or fsspec URL, whether or not there is a run in it yet."""
        fs, root = _locate(path)
        return cls(fs, root.rstrip("/") or "/")

    @property
    def url(self) -> str:
        """The folder as a user would write it: a plain path where it is local, else a URL."""
        return self.root if isinstance(self.fs, LocalFileSystem) else str(self.fs.unstrip_protocol(self.root))

    @property
    def name(self) -> str:
        """The folder's own name, `<name>-<time>`."""
        return self.root.rpartition("/")[2]

    def exists(self, name: str) -> bool:
        """Return whether the run has this file."""
        with _explained("look into", self._url(name), "check the address and your rights there"):
            return bool(self.fs.exists(self._path(name)))

    def read_bytes(self, name: str) -> bytes:
        """Read a whole file; raises `RunError` where it cannot be read."""
        with _explained("read", self._url(name), "is it a complete run folder, and may you read it?"):
            return bytes(self.fs.cat_file(self._path(name)))

    def write_bytes(self, name: str, data: bytes, private: bool = False) -> None:
        """Write a whole file atomically, replacing an older one; raises `RunError` where it cannot be written.

        On a local disk a `private` file is never readable for anybody but its owner.
        """
        path = self._path(name)
        with _explained("write", self._url(name), "is the disk full or read-only?"):
            self.fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            if isinstance(self.fs, LocalFileSystem):
                _replace(Path(path), data, 0o600 if private else 0o666)
            else:
                self.fs.pipe_file(path, data)

    def make_private(self, folder: str) -> None:
        """Make a subfolder that its owner alone may enter, where the file system is local; others have own rights.

        Raises `RunError` where it cannot be made.
        """
        with _explained("make the folder", self._url(folder), "is the disk full or read-only?"):
            self.fs.makedirs(self._path(folder), exist_ok=True)
            if isinstance(self.fs, LocalFileSystem):
                Path(self._path(folder)).chmod(0o700)

    def read_text(self, name: str) -> str:
        """Read a whole UTF-8 file; raises `RunError` for one that is none."""
        try:
            return self.read_bytes(name).decode()
        except UnicodeDecodeError as error:
            raise RunError(f"'{self._url(name)}' cannot be read: {error}; restore it from a copy") from error

    def read_mapping(self, name: str) -> dict[str, Any]:
        """Read the `key: value` pairs of a YAML or JSON file; raises `RunError` where it holds something else."""
        try:
            text = self.read_text(name)
            value = read_json(text) if name.endswith(".json") else read_yaml(text)[0]
            if isinstance(value, dict):
                check_shape(name, value)
        except ValueError as error:
            raise RunError(f"'{self._url(name)}' cannot be read: {error}; restore it from a copy") from error
        if not isinstance(value, dict):
            kind = type(value).__name__
            raise RunError(f"'{self._url(name)}' should hold `key: value` pairs, not {kind}; restore it from a copy")
        return value

    def write_text(self, name: str, text: str) -> None:
        """Write a whole UTF-8 file atomically."""
        self.write_bytes(name, text.encode())

    def remove(self, name: str) -> None:
        """Delete a file; raises `RunError` where that fails."""
        with _explained("remove", self._url(name), "may you write there?"):
            self.fs.rm_file(self._path(name))

    def files(self, folder: str) -> list[str]:
        """Return the names of the files in a subfolder, sorted; empty where it does not exist."""
        return self._names(folder, "file")

    def folders(self, folder: str) -> list[str]:
        """Return the names of the folders in a subfolder, sorted; empty where it does not exist."""
        return self._names(folder, "directory")

    def _names(self, folder: str, type: str) -> list[str]:
        with _explained("list", self._url(folder), "check the address and your rights there"):
            self.fs.invalidate_cache()  # object stores remember listings; another process may have written since
            try:
                entries = self.fs.ls(self._path(folder), detail=True)
            except FileNotFoundError:
                return []
        return sorted(entry["name"].rpartition("/")[2] for entry in entries if entry["type"] == type)

    def write_part(self, table: str, round: int, rows: Sequence[Mapping[str, Any]] | pa.Table) -> None:
        """Write all rows of one round as `<table>/part-<round>.parquet`, replacing that part where it exists.

        A column left out is null; many rows come as a table of the schema. Raises `ValueError` for a column that the
        table does not have and for a null in one that every row must have.
        """
        schema = TABLES[table]
        if not isinstance(rows, pa.Table):
            for unknown in sorted({column for row in rows for column in row} - set(schema.names)):
                raise ValueError(f"table '{table}' has no column '{unknown}': {nearest(unknown, schema.names)}")
            rows = pa.Table.from_pylist(list(rows), schema=schema)
        buffer = BytesIO()
        pq.write_table(rows, buffer, compression="zstd")
        self.write_bytes(f"{table}/part-{round:05d}.parquet", buffer.getvalue())

    def read_table(self, table: str) -> pa.Table:
        """Read all parts of a table in the order of their rounds; no rows where there are no parts.

        Raises `RunError` for a part that is damaged or of another schema.
        """
        schema = TABLES[table]
        parts = [self._read_part(name, schema) for _, name in self._parts(table)]
        return pa.concat_tables([schema.empty_table(), *parts])

    def drop_after(self, round: int) -> None:
        """Remove the parts of later rounds from all tables, so that a resumed run can write them again."""
        for table in TABLES:
            for number, name in self._parts(table):
                if number > round:
                    self.remove(name)

    def _read_part(self, name: str, schema: pa.Schema) -> pa.Table:
        try:
            return checked(completed(pq.read_table(BytesIO(self.read_bytes(name))), schema).cast(schema))
        except (pa.ArrowException, OSError, ValueError) as error:
            raise RunError(
                f"cannot read '{self._url(name)}': {error}; it is damaged or of another version of rayfed: "
                f"restore it from a copy, or move it away and do without that round"
            ) from error

    def _parts(self, table: str) -> list[tuple[int, str]]:
        """Return (round, name) of a table's parts in order; temporary files that a crash left do not match."""
        matches = [match for name in self.files(table) if (match := _PART.fullmatch(name))]
        return sorted((int(match[1]), f"{table}/{match[0]}") for match in matches)

    def _path(self, name: str) -> str:
        return f"{self.root}/{name}"

    def _url(self, name: str) -> str:
        return f"{self.url}/{name}"


def completed(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return a table in the schema's order, with nulls for columns that are younger than the table."""
    for field in schema:
        if field.nullable and field.name not in table.column_names:
            table = table.append_column(field, pa.nulls(len(table), field.type))
    return table.select(schema.names) if set(table.column_names) == set(schema.names) else table


def checked(table: pa.Table) -> pa.Table:
    """Return a table that was read from a file; raises `ValueError` for invalid text and for forbidden nulls."""
    table.validate(full=True)
    for field in table.schema:
        if not field.nullable and table[field.name].null_count:
            raise ValueError(f"column '{field.name}' has nulls")
    return table


def _locate(path: str) -> tuple[AbstractFileSystem, str]:
    """Return the file system behind a local path or URL, and the path on it."""
    with _explained("use", path, "give a local folder, or an fsspec URL whose package is installed (s3:// needs s3fs)"):
        fs, root = url_to_fs(os.path.expanduser(path))
        return fs, root


def _check_bucket(fs: AbstractFileSystem, root: str) -> None:
    """Raise what listing a bucket raises, for s3fs would create a missing one, mistyped or not."""
    bucket = root.partition("/")[0]  # empty where paths begin at a root
    if bucket and not isinstance(fs, LocalFileSystem):
        with suppress(PermissionError):  # rights may end at a part of it
            fs.ls(bucket, detail=False)


def _runs_in(fs: AbstractFileSystem, folder: str) -> list[str]:
    """Return the names of the run folders directly inside a folder; empty where it does not exist."""
    if not fs.isdir(folder):
        return []
    folders = [entry["name"] for entry in fs.ls(folder, detail=True) if entry["type"] == "directory"]
    return sorted(path.rpartition("/")[2] for path in folders if fs.exists(f"{path}/{SCENARIO}"))


def _replace(path: Path, data: bytes, mode: int) -> None:
    """Write `data` to a local path in one step that survives a crash and a power cut; umask takes from its `mode`."""
    temporary = path.with_name(f".{path.name}.{uuid4().hex}.tmp")
    try:
        with open(temporary, "xb", opener=partial(os.open, mode=mode)) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    if hasattr(os, "O_DIRECTORY"):  # the rename itself is on the disk only once the directory is; not so on Windows
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


@contextmanager
def _explained(action: str, path: str, advice: str) -> Iterator[None]:
    """Turn what a file system raises into a `RunError`.

    Any exception counts: those of object stores (missing credentials, unknown bucket) share no base class.
    """
    try:
        yield
    except Exception as error:
        raise RunError(f"cannot {action} '{path}': {type(error).__name__}: {error}; {advice}") from error
