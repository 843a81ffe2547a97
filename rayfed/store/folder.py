"""Folder of one run: its creation, and its tables with a part for each round."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from io import BytesIO
from itertools import count
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from rayfed.documents import dump_yaml
from rayfed.errors import RunError, nearest
from rayfed.store import history
from rayfed.store.files import Files, explained, located, tag
from rayfed.store.lease import CLAIM
from rayfed.store.schemas import TABLES

SCENARIO = "scenario.yaml"
REPORT = "report.html"
"""The file that makes a folder a run folder."""
BY_ROUND = frozenset(name for name, schema in TABLES.items() if "round" in schema.names)
"""Tables with a part for each round that gave rows; the others have one, which every driver writes as it begins."""
_PART = re.compile(r"part-(\d{5,})(?:-(\d+))?\.parquet")


def table_of(content: bytes) -> pa.Table:
    """Return the table of a Parquet file.

    It is read in this thread. Threads of Arrow's pool that read from an object of Python's ask for the interpreter when
    they are done, and abort the process where it is ending by then (apache/arrow issues 34314 and 50482).
    """
    return pq.ParquetFile(pa.BufferReader(content)).read(use_threads=False)


@dataclass(frozen=True)
class RunFolder(Files):
    """Folder of one run."""

    @classmethod
    def create(cls, out: str, name: str, time: datetime | None = None) -> RunFolder:
        """Create `<out>/<name>-<YYYYmmdd-HHMMSS>`, or `...-2`, `...-3` and so on if that exists.

        `out` is a local path or an fsspec URL (`s3://bucket/runs`), `time` is now unless given. Of two that ask at a
        time each has its own: an object store has no folders to make, so the first file in it decides. Raises
        `RunError` where no folder can be made.
        """
        fs, parent = located(out)
        stem = f"{parent.rstrip('/')}/{name}-{time or datetime.now():%Y%m%d-%H%M%S}"
        for number in count(1):
            folder = cls(fs, stem if number == 1 else f"{stem}-{number}")
            with explained("make the run folder", folder.url, "choose another place with --out"):
                _check_bucket(fs, folder.root)
                if fs.exists(folder.root) or not folder.claim(CLAIM, uuid4().hex.encode()):
                    continue
                return folder
        raise AssertionError("unreachable: count() does not end")

    @classmethod
    def open(cls, path: str) -> RunFolder:
        """Return the run folder at a local path or fsspec URL; raises `RunError`, with nearby names, without one."""
        fs, root = located(path)
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
        """Return the folder at a local path or fsspec URL, which need not contain a run yet."""
        fs, root = located(path)
        return cls(fs, root.rstrip("/") or "/")

    def scenario(self) -> dict[str, Any]:
        """Return the scenario of the run with every default written out.

        It is that of the folder's file, but what determines results is as the finished rounds have followed it, which
        the checkpoint keeps, whatever became of the file. Raises `RunError` where the file is damaged.
        """
        written, finished = self.read_mapping(SCENARIO), history.read(self)
        followed = {} if finished is None else {k: v for k, v in finished.scenario.items() if k != "resources"}
        partly: dict[str, Any] = {
            k: {**(written.get(k) or {}), **followed[k]} for k in ("federation", "metrics") if k in followed
        }
        return {**written, **followed, **partly}

    def scenario_text(self) -> str:
        """Return `scenario` as text: the file's, if it was not edited since."""
        played = self.scenario()
        if played == self.read_mapping(SCENARIO):
            return self.read_text(SCENARIO)
        return f"# {SCENARIO} was edited since: this is what was played\n{dump_yaml(played)}"

    def write_part(self, table: str, round: int, rows: Sequence[Mapping[str, Any]] | pa.Table) -> None:
        """Write a round's rows as `<table>/part-<round>.parquet`, replacing that part.

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
        mine = _part(table, round, self.token)
        self.write_bytes(mine, buffer.getvalue())
        if table not in BY_ROUND:
            for number, _, name in self._parts(table):
                if number == round and name != mine:
                    self.remove(name)

    def read_table(self, table: str) -> pa.Table:
        """Read the valid parts of a table in the order of their rounds; no rows without parts.

        Raises `RunError` for a part that is missing, damaged or of another schema.
        """
        schema = TABLES[table]
        parts = [self._read_part(name, schema) for name in self.parts(table)]
        return pa.concat_tables([schema.empty_table(), *parts])

    def parts(self, table: str) -> list[str]:
        """Return the names of a table's valid parts in the order of their rounds.

        They are those of the checkpoint's rounds, by the driver that finished the round; the latest of each round
        where no checkpoint says. Raises `RunError` naming one that is missing.
        """
        there = self._parts(table)
        finished = history.read(self) if table in BY_ROUND else None
        if finished is None or finished.parts is None:
            return list({round: name for round, _, name in there}.values())
        names = [_part(table, round, finished.driver_of(round)) for round in finished.parts.get(table, [])]
        for lost in sorted(set(names) - {name for *_, name in there}):
            raise RunError(
                f"'{self._url(lost)}' is missing: the checkpoint has that round, so the table '{table}' has a hole; "
                f"restore it from a copy, or launch the scenario anew"
            )
        return names

    def tidy(self) -> None:
        """Remove invalid parts: of unfinished rounds, or of a driver that was taken over."""
        for table in TABLES:
            counted = set(self.parts(table))
            for *_, name in self._parts(table):
                if name not in counted:
                    self.remove(name)

    def _read_part(self, name: str, schema: pa.Schema) -> pa.Table:
        try:
            return checked(completed(table_of(self.read_bytes(name)), schema).cast(schema))
        except (pa.ArrowException, OSError, ValueError) as error:
            raise RunError(
                f"cannot read '{self._url(name)}': {error}; it is damaged or of another version of rayfed: "
                f"restore it from a copy"
            ) from error

    def _parts(self, table: str) -> list[tuple[int, int, str]]:
        """Return (round, driver, name) of a table's parts in order, without temporary files."""
        matches = [match for name in self.files(table) if (match := _PART.fullmatch(name))]
        return sorted((int(match[1]), int(match[2] or 1), f"{table}/{match[0]}") for match in matches)


def _part(table: str, round: int, driver: int) -> str:
    return f"{table}/part-{round:05d}{tag(driver)}.parquet"


def completed(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return a table with the schema's columns in order, null for those added after it was written."""
    for field in schema:
        if field.nullable and field.name not in table.column_names:
            table = table.append_column(field, pa.nulls(len(table), field.type))
    return table.select(schema.names) if set(table.column_names) == set(schema.names) else table


def checked(table: pa.Table) -> pa.Table:
    """Return a table read from a file; raises `ValueError` for invalid text and forbidden nulls."""
    table.validate(full=True)
    for field in table.schema:
        if not field.nullable and table[field.name].null_count:
            raise ValueError(f"column '{field.name}' has nulls")
    return table


def _check_bucket(fs: AbstractFileSystem, root: str) -> None:
    """Raise any error of listing a bucket, since s3fs would create a missing one."""
    bucket = root.partition("/")[0]  # empty where paths begin at a root
    if bucket and not isinstance(fs, LocalFileSystem):
        with suppress(PermissionError):  # rights may end at a part of it
            fs.ls(bucket, detail=False)


def _runs_in(fs: AbstractFileSystem, folder: str) -> list[str]:
    """Return the names of the run folders directly in a folder; empty if there is no such folder."""
    if not fs.isdir(folder):
        return []
    folders = [entry["name"] for entry in fs.ls(folder, detail=True) if entry["type"] == "directory"]
    return sorted(path.rpartition("/")[2] for path in folders if fs.exists(f"{path}/{SCENARIO}"))
