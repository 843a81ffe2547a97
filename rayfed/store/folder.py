"""Folder of one run: creation, scenario, and tables with one file per round."""

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

from rayfed.core.documents import dump_yaml
from rayfed.errors import RunError, nearest
from rayfed.store import history
from rayfed.store.files import Files, explain_errors, locate, tag
from rayfed.store.lease import CLAIM
from rayfed.store.renamed import with_present_names
from rayfed.store.schemas import TABLES

SCENARIO = "scenario.yaml"
REPORT = "report.html"
"""Name of the file that marks a folder as a run folder."""
BY_ROUND = frozenset(name for name, schema in TABLES.items() if "round" in schema.names)
"""Tables with one part per round with rows; other tables have one part, which every driver writes when it starts."""
_PART = re.compile(r"part-(\d{5,})(?:-(\d+))?\.parquet")


def parse_table(content: bytes) -> pa.Table:
    """Return the Arrow table in the content of a Parquet file.

    The file is read in this thread. A thread of Arrow's pool that reads from a Python object aborts the process if the
    interpreter is shutting down (apache/arrow issues 34314 and 50482).
    """
    return pq.ParquetFile(pa.BufferReader(content)).read(use_threads=False)


@dataclass(frozen=True)
class RunFolder(Files):
    """Folder of one run, with the scenario, tables and other files of the run."""

    @classmethod
    def create(cls, out: str, name: str, time: datetime | None = None) -> RunFolder:
        """Create the run folder `<out>/<name>-<YYYYmmdd-HHMMSS>`, or with `-2`, `-3` and so on if that folder exists.

        `out` is a local path or an fsspec URL (`s3://bucket/runs`), `time` is now unless given. Simultaneous calls get
        different folders: object stores have no folders, so creation of the first file decides. Raises `RunError` if no
        folder can be created.
        """
        fs, parent = locate(out)
        stem = f"{parent.rstrip('/')}/{name}-{time or datetime.now():%Y%m%d-%H%M%S}"
        for number in count(1):
            folder = cls(fs, stem if number == 1 else f"{stem}-{number}")
            with explain_errors("create the run folder", folder.url, "choose another folder with --out"):
                _check_bucket(fs, folder.root)
                if fs.exists(folder.root) or not folder.claim(CLAIM, uuid4().hex.encode()):
                    continue
                return folder
        raise AssertionError("unreachable: count() does not end")

    @classmethod
    def open(cls, path: str) -> RunFolder:
        """Return the run folder at a local path or fsspec URL; raise `RunError`, with similar names, without a run."""
        fs, root = locate(path)
        folder = cls(fs, root.rstrip("/") or "/")
        if folder.exists(SCENARIO):
            return folder
        inside = _runs_in(fs, folder.root)
        if inside:
            raise RunError(
                f"'{path}' has no {SCENARIO} but contains run folders: give one of these folders: {', '.join(inside)}"
            )
        parent, _, name = folder.root.rpartition("/")
        beside = nearest(name, _runs_in(fs, parent))
        raise RunError(f"'{path}' is not a run folder, because it has no {SCENARIO}; in {parent}: {beside}")

    @classmethod
    def at(cls, path: str) -> RunFolder:
        """Return the folder at a local path or fsspec URL, which need not contain a run yet."""
        fs, root = locate(path)
        return cls(fs, root.rstrip("/") or "/")

    def scenario(self) -> dict[str, Any]:
        """Return the run's scenario with all default values written out.

        Settings that determine results come from the checkpoint, as the finished rounds used them; other settings come
        from the file, which may have been edited. Raises `RunError` if the file is damaged.
        """
        written, finished = self.read_mapping(SCENARIO), history.read_history(self)
        followed = {} if finished is None else {k: v for k, v in finished.scenario.items() if k != "resources"}
        partly: dict[str, Any] = {
            k: {**(written.get(k) or {}), **followed[k]} for k in ("federation", "metrics") if k in followed
        }
        return {**written, **followed, **partly}

    def scenario_text(self) -> str:
        """Return the run's scenario as text: the file's text, unless the file was edited after the run."""
        played = self.scenario()
        if played == self.read_mapping(SCENARIO):
            return self.read_text(SCENARIO)
        return f"# {SCENARIO} was edited after the run; the run used this scenario\n{dump_yaml(played)}"

    def write_part(self, table: str, round: int, rows: Sequence[Mapping[str, Any]] | pa.Table) -> None:
        """Write a round's rows of a table to `<table>/part-<round>.parquet`, replacing an existing file.

        A missing column is null. Pass many rows as a table with the schema. Raises `ValueError` for an unknown column
        and for a null in a non-nullable column.
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
        """Read the valid parts of a table in the order of their rounds; empty if there are no parts.

        Raises `RunError` for a part that is missing, damaged or has another schema.
        """
        schema = TABLES[table]
        parts = [self._read_part(name, schema) for name in self.parts(table)]
        return pa.concat_tables([schema.empty_table(), *parts])

    def parts(self, table: str) -> list[str]:
        """Return the file names of a table's valid parts, in the order of their rounds.

        Valid are the parts of the checkpoint's rounds, by the driver that finished the round; without a checkpoint, the
        latest part of each round. Raises `RunError` naming a missing part.
        """
        there = self._parts(table)
        finished = history.read_history(self) if table in BY_ROUND else None
        if finished is None or finished.parts is None:
            return list({round: name for round, _, name in there}.values())
        names = [_part(table, round, finished.driver_of(round)) for round in finished.parts.get(table, [])]
        for lost in sorted(set(names) - {name for *_, name in there}):
            raise RunError(
                f"'{self._url(lost)}' is missing: the checkpoint lists that round, so table '{table}' is incomplete; "
                f"restore the file from a copy, or launch the scenario again"
            )
        return names

    def remove_table(self, table: str) -> None:
        """Remove all parts of a table."""
        for *_, name in self._parts(table):
            self.remove(name)

    def tidy(self) -> None:
        """Remove invalid parts of tables, left by unfinished rounds or by a driver that was taken over."""
        for table in TABLES:
            counted = set(self.parts(table))
            for *_, name in self._parts(table):
                if name not in counted:
                    self.remove(name)

    def _read_part(self, name: str, schema: pa.Schema) -> pa.Table:
        try:
            return check_table(
                complete_table(with_present_names(parse_table(self.read_bytes(name))), schema).cast(schema)
            )
        except (pa.ArrowException, OSError, ValueError) as error:
            raise RunError(
                f"cannot read '{self._url(name)}': {error}; the file is damaged or from another version of rayfed: "
                f"restore the file from a copy"
            ) from error

    def _parts(self, table: str) -> list[tuple[int, int, str]]:
        """Return (round, driver, name) of a table's parts in order, without temporary files."""
        matches = [match for name in self.files(table) if (match := _PART.fullmatch(name))]
        return sorted((int(match[1]), int(match[2] or 1), f"{table}/{match[0]}") for match in matches)


def _part(table: str, round: int, driver: int) -> str:
    return f"{table}/part-{round:05d}{tag(driver)}.parquet"


def complete_table(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return a table with the schema's columns in order; columns that the file lacks are null."""
    for field in schema:
        if field.nullable and field.name not in table.column_names:
            table = table.append_column(field, pa.nulls(len(table), field.type))
    return table.select(schema.names) if set(table.column_names) == set(schema.names) else table


def check_table(table: pa.Table) -> pa.Table:
    """Return a table that was read from a file; raise `ValueError` for invalid text and forbidden nulls."""
    table.validate(full=True)
    for field in table.schema:
        if not field.nullable and table[field.name].null_count:
            raise ValueError(f"column '{field.name}' has nulls, which are not allowed")
    return table


def _check_bucket(fs: AbstractFileSystem, root: str) -> None:
    """Raise any error of listing a bucket, as s3fs would otherwise create a missing bucket."""
    bucket = root.partition("/")[0]  # empty if paths start with a slash
    if bucket and not isinstance(fs, LocalFileSystem):
        with suppress(PermissionError):  # access may be limited to a part of the bucket
            fs.ls(bucket, detail=False)


def _runs_in(fs: AbstractFileSystem, folder: str) -> list[str]:
    """Return the names of the run folders directly in a folder; empty if there is no such folder."""
    if not fs.isdir(folder):
        return []
    folders = [entry["name"] for entry in fs.ls(folder, detail=True) if entry["type"] == "directory"]
    return sorted(path.rpartition("/")[2] for path in folders if fs.exists(f"{path}/{SCENARIO}"))
