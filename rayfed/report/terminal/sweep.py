"""Terminal view of a sweep: a progress bar, one line per trial, and a table of the settings."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from math import inf
from shlex import quote
from time import monotonic
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from rayfed.errors import MissingExtraError, noting_errors
from rayfed.evidence.knowledge_pairs import failed_attacks, mark_outdone
from rayfed.evidence.pareto import compute_front
from rayfed.evidence.settings import Setting, group_by_values, group_settings, select_strongest, worst_verdict
from rayfed.metrics.measures import JUDGED
from rayfed.report.samples import find_warning
from rayfed.report.text.batch_sizes import label_grid
from rayfed.report.text.figures import heading, marked_cell, useless_mark
from rayfed.report.text.formats import MAX_NAMES, NONE, format_count, format_duration, format_share
from rayfed.report.text.guarantees import mixed_guarantees_text
from rayfed.report.text.knowledge_pairs import failed_attack_text
from rayfed.report.text.leakage import STATES
from rayfed.report.text.outcomes import outcome_reasons
from rayfed.report.text.tables import notes_on_marks
from rayfed.results.sweep_folder import SweepFolder
from rayfed.store.finding import State

if TYPE_CHECKING:
    from rayfed.store.folder import RunFolder

_COLUMNS = ("test_accuracy", *(metric.name for metric in JUDGED if "sweep" in metric.tables), "epsilon")

_BOUNDS = {"psnr": "--max-psnr 15", "test_accuracy": "--min-accuracy 0.9"}
"""Measure -> bound in the command of the next step."""


class SweepView:
    """Terminal view of one sweep; implements `rayfed.simulation.progress.SweepProgress`."""

    def __init__(self, console: Console, quiet: bool = False, bar: bool = True) -> None:
        """Create a view. `quiet` prints errors and notes only, `bar` shows progress on terminals."""
        self._console, self._quiet = console, quiet
        self._bar = Progress(
            TextColumn("trials"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=console,
            transient=True,
            disable=quiet or not bar or not console.is_terminal,
        )
        self._task: TaskID | None = None
        self._folder: RunFolder | None = None
        self._began, self._ended, self._trials, self._before, self._failed = 0.0, 0, 0, 0, 0

    def starting(self, scenario: Any, folder: Any, where: str, trials: int, done: int) -> None:
        """Print the sweep's size and folder, and start the progress bar."""
        self._trials, self._before, self._began, self._folder = trials, done, monotonic(), folder.files
        before = f", {done} finished before" if done else ""
        swept = scenario.sweep
        size = f"{format_count(trials, 'trial')} over {format_count(len(swept.fields), 'field')}"
        self._say(f"[bold]{scenario.name}[/bold]: {size} ({swept.search}){before}; {where}")
        self._say(f"Results: {folder.url}", markup=False)
        self._bar.start()
        self._task = self._bar.add_task("trials", total=trials, left="")

    @property
    def folder(self) -> Any:
        """Return the folder of the sweep; None before the start."""
        return self._folder

    def note(self, message: str) -> None:
        """Print a line that begins with `note:`."""
        self._console.print(Text.assemble(("note:", "yellow"), f" {message}"), soft_wrap=True)  # a path stays whole

    def trial_done(self, trial: Any, rows: Sequence[dict[str, Any]]) -> None:
        """Print one line for the trial; after the first trial, also the estimated time of the remaining trials."""
        self._ended += 1
        self._failed += rows[0]["status"] == "failed"
        with noting_errors(self._note_unprinted):
            self._say_trial(trial, rows)
        left = (monotonic() - self._began) / self._timed() * max(self._trials - self._ended, 0)
        if self._task is not None:
            self._bar.update(self._task, advance=1, left=f"about {format_duration(left)} left")
        if self._ended == 1 and left:
            self._say(f"about {format_duration(left)} left for {self._trials - 1} trials")

    def _timed(self) -> int:
        """Return the number of trials that used the time so far; at first this includes the running ones."""
        begun = len(SweepFolder(self._folder).trial_names()) - self._before if self._folder else 0
        return begun if begun >= 2 * self._ended else self._ended

    def _say_trial(self, trial: Any, rows: Sequence[dict[str, Any]]) -> None:
        values = ", ".join(f"{path.rpartition('.')[2]} {_plain(value)}" for path, value in trial.values.items())
        what = f"{self._ended:>4}/{self._trials} {trial.arm}" + (f", {values}" if values else "")
        what += f", repeat {trial.repeat}" if trial.repeat else ""
        if rows[0]["status"] == "failed":
            self._say(Text(f"{what}  FAILED: {' '.join(str(rows[0]['error']).split())}", style="red"))
            return
        row = max(rows, key=lambda row: row.get("psnr") or 0)
        accuracy = format_share(row.get("test_accuracy"))
        psnr = NONE if row.get("psnr") is None else f"{row['psnr']:.1f} dB ({row['attack']})"
        stopped = "  stopped early" if row["status"] == "stopped" else ""
        self._say(f"{what:<40}  accuracy {accuracy:>7}  PSNR {psnr}{stopped}", markup=False)

    def finished(self, rows: Sequence[dict[str, Any]], fields: Sequence[str], report: str | None) -> None:
        """Print a table of the settings, sorted by leakage, then remarks, the next step and the report's path."""
        self.close()
        with noting_errors(self._note_unprinted):
            self._say_settings(rows, fields)
        if report is not None:
            self._say(f"Report: {report}", markup=False)
        with noting_errors(self._note_unprinted):
            self.warn()

    def _note_unprinted(self, why: str) -> None:
        self.note(f"part of the summary could not be printed: {why}")

    def _say_settings(self, rows: Sequence[dict[str, Any]], fields: Sequence[str]) -> None:
        scenario = SweepFolder(self._folder).scenario if self._folder else None
        found = mark_outdone(group_settings(rows, fields, scenario=scenario), scenario or {})
        found.sort(key=_psnr)
        shown = [name for name in _COLUMNS if any(name in s.measures for s in found)]
        self._say(_table(found, shown))
        attacked = [row for one in found if one.attack for row in one.rows]
        for state in State:
            reasons = outcome_reasons(attacked, state)[:MAX_NAMES]
            if reasons:
                self._say(f"{state}: {'; '.join(reasons)}", markup=False)
        for note in notes_on_marks(found, shown):
            self._say(note, markup=False)
        for unlike in filter(None, (mixed_guarantees_text(found, name) for name in shown)):
            self._say(f"note: {unlike}", markup=False)
        self._labels(found)
        self._front(found)
        for failed in failed_attacks(found):
            self._say(failed_attack_text(failed), markup=False)
        if self._failed:
            self._say(f"{format_count(self._failed, 'trial')} failed; errors are in outcomes.parquet")
        if self._folder is not None and (bounds := [_BOUNDS[name] for name in shown if name in _BOUNDS]):
            self._say(f"Next: rayfed recommend {quote(self._folder.url)} {' '.join(bounds)}", markup=False)

    def warn(self) -> None:
        """Print a warning if the report contains samples that may not be public."""
        if self._folder and (text := find_warning(self._folder)):
            self.note(text)

    def _labels(self, found: Sequence[Setting]) -> None:
        """Print the share of recovered labels by batch size, if there are several batch sizes."""
        if (labels := label_grid(found)) is None:
            return
        table = Table(*labels.headings, title="labels recovered", title_justify="left", box=SIMPLE)
        for row in sorted(labels.rows):
            table.add_row(*map(Text, row))
        self._say(table)

    def _front(self, found: Sequence[Setting]) -> None:
        """Print the Pareto-optimal settings and their hypervolume."""
        strong = select_strongest(found, "psnr")
        if any("test_accuracy" in setting.measures for setting in strong):
            best = compute_front(found, "psnr", "test_accuracy")
            if not best.best:
                self._say("Pareto-optimal: none, because the accuracy is at chance level or the leakage is unknown")
                return
            names = "; ".join(_title(setting) for setting in best.best)
            self._say(f"Pareto-optimal (PSNR, accuracy): {names}", markup=False)
            try:
                volume = f"{best.hypervolume():.3f} (1 if one setting has the best PSNR and the best accuracy)"
            except MissingExtraError as error:
                volume = str(error)
            self._say(f"Hypervolume: {volume}", markup=False)

    def close(self) -> None:
        """Remove the progress bar."""
        self._bar.stop()

    def _say(self, what: Any, markup: bool = True) -> None:
        if not self._quiet:
            self._console.print(what, markup=markup, soft_wrap=isinstance(what, str), highlight=False)


def _table(found: Sequence[Setting], shown: Sequence[str]) -> Table:
    """Return the table of the settings, with the verdict of each."""
    states = _states(found)
    optional = [bool(states), len({setting.attack for setting in found if setting.attack}) > 1]
    table = Table("setting", *compress(("verdict", "attack"), optional), *map(heading, shown), box=SIMPLE)
    for setting in found:
        cells = [states.get(setting.identity, NONE), setting.attack or NONE]
        words = [setting.title + useless_mark(setting), *compress(cells, optional)]
        table.add_row(*map(Text, words), *(marked_cell(name, setting) for name in shown))
    return table


def _states(found: Sequence[Setting]) -> dict[tuple[str, str, str], str]:
    """Return identity -> verdict of each attacked setting: the worst over all attacks and repeats."""
    states = {group[0].identity: worst_verdict(group) for group in group_by_values(found)}
    return {identity: STATES[state] for identity, state in states.items() if state}


def _title(setting: Setting) -> str:
    return f"{setting.title} (leaks)" if worst_verdict([setting]) == State.LEAKS else setting.title


def _psnr(setting: Setting) -> float:
    """Return the mean PSNR of a setting, infinity if it is not known."""
    known = setting.measures.get("psnr")
    return known.mean if known else inf


def _plain(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
