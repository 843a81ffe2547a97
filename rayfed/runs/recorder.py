"""Records of a run in progress: tables, checkpoints, status, log, and finally the report."""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from io import StringIO
from typing import Any, cast

from rayfed.errors import LeaseError, UserError, noting_errors, plain
from rayfed.evidence.verdicts import VERDICTS, write_verdicts
from rayfed.simulation.progress import Progress
from rayfed.simulation.tables import RoundTables
from rayfed.simulation.virtual_time.clock import DROPPED
from rayfed.store import checkpoint, exits
from rayfed.store.checkpoint import Checkpoint
from rayfed.store.exits import RunKind
from rayfed.store.folder import REPORT, RunFolder


class RunRecorder:
    """Writer that stores a run's results in its folder."""

    def __init__(self, folder: RunFolder, kind: RunKind, rounds: int, weights: str | None = None) -> None:
        """Initialise a recorder that writes into `folder`; `weights` describes the attacked ones without training."""
        self._folder, self._kind, self._rounds = folder, kind, rounds
        self._weights = {"weights": weights} if weights else {}
        self._done, self._text, self._progress = 0, StringIO(), Progress()
        if folder.exists("log.txt"):
            self._text.write(folder.read_text("log.txt"))

    def line(self, message: str) -> None:
        """Add a line with the present time to the run's log.txt."""
        self._text.write(f"{datetime.now():%Y-%m-%d %H:%M:%S} {plain(message)}\n")
        self._folder.write_text("log.txt", self._text.getvalue())

    def logging(self, progress: Progress) -> Progress:
        """Return a progress display whose notes are also written to the log."""
        self._progress = progress
        return cast(Progress, _Logging(self, progress))

    def write(self, round: int, tables: RoundTables) -> list[str]:
        """Write a round's rows to every table that has rows, and return the names of these tables."""
        written = [table for table, rows in vars(tables).items() if rows]
        for table in written:
            self._folder.write_part(table, round, getattr(tables, table))
        return written

    def finish_round(self, tables: RoundTables, state: Checkpoint) -> None:
        """Write the results of a finished round, in this order: tables, checkpoint, status."""
        written = self.write(state.round, tables)
        checkpoint.save(self._folder, replace(state, tables=written))
        self._running(state.round + 1)
        for row in tables.rounds:
            accuracy = "" if row.get("test_accuracy") is None else f", test accuracy {row['test_accuracy']:.4f}"
            if row.get("test_error") is not None:
                accuracy = f", test error {row['test_error']:.4f}"
            if row.get("test_perplexity") is not None:
                accuracy += f", test perplexity {row['test_perplexity']:.2f}"
            if row.get("test_iou") is not None:
                accuracy += f", test intersection over union {row['test_iou']:.4f}"
            loss = "no client" if row["train_loss"] is None else f"training loss {row['train_loss']:.4f}"
            self.line(f"round {state.round}, arm {row['arm']}: {loss}{accuracy}")
        for row in tables.clients:
            if row["status"] not in ("ok", *DROPPED):
                said = f"client {row['client']} is excluded: it {row['status']}"
                self.line(f"round {state.round}, arm {row['arm']}: {said}")

    @contextmanager
    def recording(self, first: int, reports: bool = True) -> Iterator[None]:
        """Update status, log and report during a run that starts at round `first`, also if the run fails."""
        self._running(first)
        self._folder.remove_table(VERDICTS)  # those of an earlier stop
        if self._folder.lease and self._folder.lease.taken_from:
            self.line(self._folder.lease.taken_from)
        self.line(f"run starts at round {first} of {self._rounds}")
        try:
            yield
        except LeaseError:
            raise  # another driver owns the folder
        except BaseException as error:
            self._note_end(error)
            with self._not_hiding_the_first():
                self._judge(reports)
            raise
        self.line("run finished")
        self._status("finished")
        self._judge(reports)

    def _note_end(self, error: BaseException) -> None:
        state = exits.classify_exit(error)
        message = f"{type(error).__name__}: {error}" if state == "failed" else exits.describe_interruption(error)
        trace = traceback.format_exc() if state == "failed" and not isinstance(error, UserError) else message
        with self._not_hiding_the_first():
            self.line(trace)
        with self._not_hiding_the_first():
            self._status(state, message)

    def _running(self, done: int) -> None:
        self._done = done
        self._status("running")

    def _status(self, state: exits.Exit, error: str | None = None) -> None:
        rounds = {"rounds_done": self._done, "rounds": self._rounds}
        said = {"error": error and plain(error), "advice": exits.advise_on_state(state, self._kind)}
        status = {"kind": self._kind, "state": state, **rounds, **self._weights, **said}
        self._folder.write_text("status.json", json.dumps(status, indent=2))

    def _judge(self, reports: bool) -> None:
        """Write the verdicts, and the report if the run has one."""
        with noting_errors(self._note_missing_verdicts):
            write_verdicts(self._folder)
        if reports:
            self._report()

    def _note_missing_verdicts(self, why: str) -> None:
        self.logging(self._progress).note(
            f"the table of verdicts could not be written: {why}; the results are kept, and "
            f"`rayfed report {self._folder.url}` tries again"
        )

    def _report(self) -> None:
        """Write the report; if it fails, print a note with the reason, because the results are kept without it."""
        with noting_errors(self._note_missing_report):
            from rayfed.report.html.run import write_report  # imported here, because plotting libraries take a second

            write_report(self._folder)

    def _note_missing_report(self, why: str) -> None:
        self._folder.remove(REPORT)  # it would show an earlier state
        url = self._folder.url
        self.logging(self._progress).note(
            f"{REPORT} could not be written: {why}; the results are kept, and `rayfed report {url}` tries again"
        )

    @contextmanager
    def _not_hiding_the_first(self) -> Iterator[None]:
        """Suppress and log an error in this block, so that it does not replace the error that ended the run."""
        try:
            yield
        except Exception as error:
            with suppress(Exception):
                self.line(f"after the run ended: {type(error).__name__}: {error}")


class _Logging:
    """Progress that forwards all calls, and logs notes."""

    def __init__(self, recorder: RunRecorder, progress: Progress) -> None:
        self._recorder, self._progress = recorder, progress

    def note(self, message: str) -> None:
        self._recorder.line(message)
        self._progress.note(message)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._progress, name)
