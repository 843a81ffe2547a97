"""Terminal view of a sweep: a bar, a line for every trial that ends, and the settings in a table."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from rayfed.analysis.figures import heading, mark, marked, notes_on_marks
from rayfed.analysis.formats import duration
from rayfed.analysis.labels import by_batch_size
from rayfed.analysis.pareto import front
from rayfed.analysis.promises import mixed
from rayfed.analysis.settings import Estimate, Setting, settings, strongest
from rayfed.analysis.sweep_folder import SweepFolder
from rayfed.analysis.twins import failures, with_twins
from rayfed.errors import noting_errors
from rayfed.metrics.measures import JUDGED
from rayfed.report.samples import warning
from rayfed.report.words import sweep_verdicts

if TYPE_CHECKING:
    from rayfed.store.folder import RunFolder

_COLUMNS = ("test_accuracy", *(metric.name for metric in JUDGED if "sweep" in metric.tables), "epsilon")


class SweepView:
    """Terminal view of one sweep; implements `rayfed.engine.progress.SweepProgress`."""

    def __init__(self, console: Console, quiet: bool = False, bar: bool = True) -> None:
        """Make a view; `quiet` says nothing but errors, `bar` shows progress on terminals."""
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
        """Print what the sweep varies and where its results go, and start the progress bar."""
        self._trials, self._before, self._began, self._folder = trials, done, monotonic(), folder.files
        before = f", {done} played before" if done else ""
        swept = scenario.sweep
        varied = f"{len(swept.fields) or 'no'} field{'s' * (len(swept.fields) != 1)}"
        self._say(
            f"[bold]{scenario.name}[/bold]: {trials} trial{'s' * (trials != 1)} over {varied} ({swept.search})"
            f"{before}; {where}"
        )
        self._say(f"results in {folder.url}", markup=False)
        self._bar.start()
        self._task = self._bar.add_task("trials", total=trials, left="")

    @property
    def folder(self) -> Any:
        """The sweep's folder; None before it has begun."""
        return self._folder

    def note(self, message: str) -> None:
        """Print something out of the ordinary."""
        self._console.print(Text.assemble(("note:", "yellow"), f" {message}"), soft_wrap=True)  # a path stays whole

    def trial_done(self, trial: Any, rows: Sequence[dict[str, Any]]) -> None:
        """Print one line for the trial, and about how long the others will take: on the bar, and once in a line."""
        self._ended += 1
        self._failed += rows[0]["status"] == "failed"
        with noting_errors(self._note_unprinted):
            self._say_trial(trial, rows)
        left = (monotonic() - self._began) / self._played() * max(self._trials - self._ended, 0)
        if self._task is not None:
            self._bar.update(self._task, advance=1, left=f"about {duration(left)} left")
        if self._ended == 1 and left:
            self._say(f"the other {self._trials - 1} take about {duration(left)}, if they are like this one")

    def _played(self) -> int:
        """Return how many trials the time so far was for; while few have ended, those beside them count as well."""
        begun = len(SweepFolder(self._folder).trial_names()) - self._before if self._folder else 0
        return begun if begun >= 2 * self._ended else self._ended

    def _say_trial(self, trial: Any, rows: Sequence[dict[str, Any]]) -> None:
        values = ", ".join(f"{path.rpartition('.')[2]} {_plain(value)}" for path, value in trial.values.items())
        what = f"{self._ended:>4}/{self._trials} {trial.arm}" + (f", {values}" if values else "")
        what += f", repeat {trial.repeat}" if trial.repeat else ""
        if rows[0]["status"] == "failed":
            self._say(Text(f"{what}: failed: {' '.join(str(rows[0]['error']).split())}", style="red"))
            return
        row = max(rows, key=lambda row: row.get("psnr") or 0)
        told = [f"accuracy {100 * row['test_accuracy']:.2f} %" if row.get("test_accuracy") is not None else ""]
        told += [f"PSNR {row['psnr']:.1f} dB by {row['attack']}" if row.get("psnr") is not None else ""]
        told += ["stopped early" if row["status"] == "stopped" else ""]
        self._say(f"{what}: {', '.join(filter(None, told)) or 'played'}", markup=False)

    def finished(self, rows: Sequence[dict[str, Any]], fields: Sequence[str], report: str | None) -> None:
        """Print the settings in a table, those first that leak least, and the path of the report, if there is one."""
        self.close()
        with noting_errors(self._note_unprinted):
            self._say_settings(rows, fields)
        if report is not None:
            self._say(f"report: {report}", markup=False)
        with noting_errors(self._note_unprinted):
            self.warn()

    def _note_unprinted(self, why: str) -> None:
        self.note(f"a part of the summary could not be printed: {why}")

    def _say_settings(self, rows: Sequence[dict[str, Any]], fields: Sequence[str]) -> None:
        scenario = SweepFolder(self._folder).scenario if self._folder else {}
        found = sorted(with_twins(settings(rows, fields), scenario), key=lambda s: _mean(s.measures.get("psnr")))
        shown = [name for name in _COLUMNS if any(name in s.measures for s in found)]
        attacks = len({setting.attack for setting in found if setting.attack}) > 1
        table = Table("setting", *["attack"] * attacks, *map(heading, shown), box=SIMPLE)
        for setting in found:
            words = [setting.title + mark(setting), *[setting.attack or "–"] * attacks]
            table.add_row(*map(Text, words), *(marked(name, setting) for name in shown))
        self._say(table)
        for note in notes_on_marks(found, shown):
            self._say(note, markup=False)
        for unlike in filter(None, (mixed(found, name) for name in shown)):
            self._say(f"note that {unlike}", markup=False)
        self._labels(found)
        self._front(found)
        for state, sentence in sweep_verdicts(found):
            self._say(f"{state}: {sentence}", markup=False)
        for sentence in failures(found):
            self._say(sentence, markup=False)
        if self._failed:
            self._say(f"{self._failed} trial{'s' * (self._failed != 1)} failed; why stands in outcomes.parquet")

    def warn(self) -> None:
        """Say that the page has samples which are not known to be public, where it has."""
        if self._folder and (said := warning(self._folder)):
            self.note(said)

    def _labels(self, found: Sequence[Setting]) -> None:
        """Print the share of labels found by batch size, where that varies."""
        if (labels := by_batch_size(found)) is None:
            return
        table = Table(*labels.headings, title="labels found (label accuracy)", title_justify="left", box=SIMPLE)
        for row in sorted(labels.rows):
            table.add_row(*map(Text, row))
        self._say(table)

    def _front(self, found: Sequence[Setting]) -> None:
        """Print the Pareto-optimal settings and their hypervolume."""
        strong = strongest(found, "psnr")
        if any("test_accuracy" in setting.measures for setting in strong):
            best = front(found, "psnr", "test_accuracy")
            if not best.best:
                self._say("no Pareto front: every setting is at the accuracy of guessing, or what leaks is not known")
                return
            names = "; ".join(setting.title + " (leaks)" * _leaks(setting) for setting in best.best)
            self._say(f"Pareto-optimal (PSNR, accuracy): {names}", markup=False)
            self._say(f"hypervolume {best.hypervolume():.3f} (1: one setting has the best of both)")

    def close(self) -> None:
        """Take the bar away."""
        self._bar.stop()

    def _say(self, what: Any, markup: bool = True) -> None:
        if not self._quiet:
            self._console.print(what, markup=markup, soft_wrap=isinstance(what, str), highlight=False)


def _leaks(setting: Setting) -> bool:
    return any(row.get("verdict") == "leaks" for row in setting.rows)


def _mean(found: Estimate | None) -> float:
    return found.mean if found else float("inf")


def _plain(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
