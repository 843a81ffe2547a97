"""Copy of a run or sweep that is safe to share: settings and measured values, without samples or secrets.

Only the files listed here are copied. The copy has no checkpoint (private states of clients and the server), no tables
of samples or reconstructions, no description of the machine and no logs. Messages of exceptions are left out, because
they may contain a sample.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import BytesIO
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rayfed.core.reasons import Reason
from rayfed.errors import RunError, UserError
from rayfed.evidence.rows import Row
from rayfed.evidence.verdicts import VERDICTS, write_verdicts
from rayfed.report.text.formats import LEFT_OUT
from rayfed.report.text.reasons import REASONS
from rayfed.results.loading import Results, Sweep
from rayfed.results.sweep_folder import OUTCOMES_FILE, TRIALS, SweepFolder
from rayfed.store import client_states
from rayfed.store.folder import SCENARIO, RunFolder, parse_table
from rayfed.store.renamed import OUTCOMES, with_present_names
from rayfed.store.schemas import TABLES, UNPLAYED, WANT_OF_TIME

SAMPLES = ("images", "texts", "snapshots")
"""Tables with samples of victims or their reconstructions."""
_RAISED = re.compile(r"(raised \w+): .*( \([^()]*, line \d+\))", re.DOTALL)
"""Status of a client that raised an exception: type, message and place."""


@contextmanager
def copy_shareable(results: Results, out: str) -> Iterator[RunFolder]:
    """Copy the shareable files of a run or sweep to a new folder (local path or fsspec URL), and yield the folder.

    If the copy or the block raises an exception, the folder is removed. Raises `UserError` if the folder exists,
    `RunError` if a file cannot be read or written.
    """
    target = RunFolder.at(out)
    if target.exists(""):
        raise UserError(f"'{out}' already exists; give a new folder with --out")
    try:
        if isinstance(results, Sweep):
            sweep = SweepFolder(results.folder)
            for trial in (f"{TRIALS}/{name}" for name in sweep.trial_names()):
                _copy(sweep.trial(trial), RunFolder(target.fs, f"{target.root}/{trial}"))
        _copy(results.folder, target)
        yield target
    except BaseException:
        with suppress(Exception):  # the folder may not exist, and the first error is the one to report
            target.fs.rm(target.root, recursive=True)
        raise


def has_private_states(results: Results) -> bool:
    """Return whether a run's folder, or that of any trial of a sweep, has private states of clients."""
    sweep = SweepFolder(results.folder)
    trials = [sweep.trial(f"{TRIALS}/{name}") for name in sweep.trial_names()] if isinstance(results, Sweep) else []
    return any(client_states.holds_any(folder) for folder in (results.folder, *trials))


def _copy(source: RunFolder, target: RunFolder) -> None:
    tables = [name for table in TABLES if table not in (*SAMPLES, VERDICTS) for name in source.parts(table)]
    for name in (*tables, OUTCOMES_FILE, "status.json", SCENARIO):  # the last one makes it a run folder
        if source.exists(name):
            target.write_bytes(name, _without_messages(source, name))
    if source.parts(VERDICTS):
        write_verdicts(target)  # without messages of errors


def _without_messages(source: RunFolder, name: str) -> bytes:
    """Return a file without the messages of errors."""
    if name == "status.json":
        status = source.read_mapping(name)
        return json.dumps(status | ({"error": LEFT_OUT} if status.get("error") else {}), indent=2).encode()
    if name == OUTCOMES_FILE:
        return _without_reasons(source, name)
    if name.startswith("clients/"):
        return rewrite_columns(source, name, {"status": _without_message})
    if name.startswith(("attacks/", "inferences/")):
        return _with_known_messages(source, name)
    return source.scenario_text().encode() if name == SCENARIO else source.read_bytes(name)


def _without_message(status: str) -> str:
    """Return the status of a client without the message of its exception."""
    raised = _RAISED.fullmatch(status)
    return "".join(raised.groups()) if raised else LEFT_OUT if status.startswith("raised ") else status


def _without_reasons(source: RunFolder, name: str) -> bytes:
    """Return the file of a sweep's outcomes without errors, and without reasons that may have an attack's message."""
    try:
        table = with_present_names(parse_table(source.read_bytes(name)), OUTCOMES)
        for column in {"error", "reason"} & set(table.column_names):
            doubts = table["doubt"].to_pylist() if column == "reason" else [None] * len(table)
            texts = map(_known_reason, table[column].to_pylist(), doubts)
            table = table.set_column(table.column_names.index(column), column, pa.array(texts, pa.string()))
    except (pa.ArrowException, KeyError) as error:
        raise _unreadable(source, name, error) from error
    return _parquet(table)


def _known_reason(text: str | None, doubt: str | None) -> str | None:
    """Return the text of an enumerated reason; other texts are left out."""
    if doubt:
        return REASONS[Reason(doubt)]
    return LEFT_OUT if text else text


def _with_known_messages(source: RunFolder, name: str) -> bytes:
    """Return the file of a table of attacks with messages that follow from the other columns and contain no data."""
    try:
        table = with_present_names(parse_table(source.read_bytes(name)))
        messages = [_known_message(row) for row in table.select(["status", "reason", "message"]).to_pylist()]
    except (pa.ArrowException, KeyError) as error:
        raise _unreadable(source, name, error) from error
    place = table.column_names.index("message")
    return _parquet(table.set_column(place, "message", pa.array(messages, pa.string())))


def _known_message(row: Row) -> str | None:
    if row["reason"]:
        return REASONS[Reason(row["reason"])]
    if row["status"] == UNPLAYED:
        return WANT_OF_TIME
    message: str | None = row["message"]
    return LEFT_OUT if message else message


def rewrite_columns(
    source: RunFolder, name: str, changes: Mapping[str, Callable[[Any], Any]], may_lack: Collection[str] = ()
) -> bytes:
    """Return the file of a table with the values of some columns replaced, by column name; keep nulls.

    Tables of earlier versions may lack the columns `may_lack`. Raises `RunError` if the table cannot be read.
    """
    try:
        table = parse_table(source.read_bytes(name))
        for column, change in changes.items():
            place = table.schema.get_field_index(column)
            if place < 0 and column in may_lack:
                continue
            values = [None if value is None else change(value) for value in table[column].to_pylist()]
            table = table.set_column(place, table.schema.field(place), pa.array(values, table.schema.field(place).type))
    except (pa.ArrowException, KeyError) as error:
        raise _unreadable(source, name, error) from error
    return _parquet(table)


def _unreadable(source: RunFolder, name: str, error: Exception) -> RunError:
    return RunError(f"cannot read '{source.url}/{name}': {error}; restore the file from a copy")


def _parquet(table: pa.Table) -> bytes:
    buffer = BytesIO()
    pq.write_table(table, buffer, compression="zstd")
    return buffer.getvalue()
