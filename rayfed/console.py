"""What a run looks like in a terminal: a live bar, and one line a round; only the lines when nobody is watching."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import isfinite
from statistics import fmean
from time import monotonic
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

EXACT_DB = 100.0
"""Above this a reconstruction is exact for every purpose; means are taken with the value cut off here."""


class RunView:
    """Draws one run; implements `actors.progress.Progress`."""

    def __init__(self, console: Console, quiet: bool = False) -> None:
        self._console, self._quiet = console, quiet
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=console,
            transient=True,
            disable=quiet or not console.is_terminal,
        )
        self._task: TaskID | None = None
        self._rounds = self._first = 0
        self._began = self._round_began = 0.0
        self._speed = ""
        self._attacks: list[dict[str, Any]] = []
        self._last: list[dict[str, Any]] = []

    def starting(self, scenario: Any, folder: Any, allotment: Any) -> None:
        """Say what runs where, and begin the bar."""
        self._rounds = scenario.federation.rounds
        counts = [(scenario.federation.clients, "client"), (len(scenario.stacks), "arm"), (self._rounds, "round")]
        kinds = [
            (allotment.clients, "client actor", allotment.client),
            (allotment.attackers, "attacker", allotment.attacker),
        ]
        actors = [f"{_plural(n, what)} of {share} each" for n, what, share in kinds if n]
        self._say(f"[bold]{scenario.name}[/bold]: {', '.join(_plural(*c) for c in counts)}; {', '.join(actors)}")
        self._say(f"results in {folder.url}")
        self._bar.start()
        self._task = self._bar.add_task("starting actors", total=None, rate="", left="")

    def ready(self, first_round: int) -> None:
        """Start the clocks: rates and the time left are of rounds, not of imports."""
        self._first = first_round
        self._began = self._round_began = monotonic()

    def clients_done(self, round: int, done: int, total: int) -> None:
        """Move the bar."""
        self._speed = f"{done / max(monotonic() - self._round_began, 1e-9):.1f} clients/s"
        last = " ".join(f"loss {r['train_loss']:.3f} acc {r.get('test_accuracy') or 0:.1%}" for r in self._last[:1])
        self._show(f"round {round + 1}/{self._rounds} {last}", done, total, self._speed)

    def attacks_done(self, round: int, done: int, total: int) -> None:
        """Move the bar."""
        self._show(f"round {round + 1}/{self._rounds}: attacks", done, total, "")

    def round_done(self, rows: Sequence[dict[str, Any]], attacks: Sequence[dict[str, Any]]) -> None:
        """One line for each arm, one for each attack on it; speed and time left are of all arms together."""
        for row in rows:
            loss = f"loss {row['train_loss']:.4f}"
            tested = row.get("test_accuracy") is not None
            accuracy = f"accuracy {row['test_accuracy']:6.2%}" if tested else " " * 16
            left = self._time_left(row["round"])
            arm = f"{row['arm']:<12}" if len(rows) > 1 else ""
            self._say(f"round {row['round'] + 1:>3}/{self._rounds}  {arm}{loss}  {accuracy}  {self._speed}  {left}")
        for (arm, attack), found in _grouped(attacks).items():
            self._say(f"  {attack} on {arm}: {_summary(found)}")
        self._last, self._attacks = list(rows), self._attacks + list(attacks)
        self._round_began = monotonic()

    def note(self, message: str) -> None:
        """Something out of the ordinary."""
        self._console.print(f"[yellow]note:[/yellow] {message}", highlight=False)

    def close(self) -> None:
        """End the bar, however the run ended."""
        self._bar.stop()

    def finished(self, report: str) -> None:
        """The table that the run was for, and where to read more."""
        self.close()
        if self._attacks and not self._quiet:
            self._console.print(self._table())
        self._say(f"report: {report}")

    def _table(self) -> Table:
        title = "leakage (mean over images; best is the closest one) and accuracy"
        table = Table(title=title, title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0))
        for column in ("arm", "attack", "images", "PSNR", "best", "SSIM", "labels", "accuracy"):
            table.add_column(column, justify="left" if column in ("arm", "attack") else "right", no_wrap=True)
        accuracy = {row["arm"]: row.get("test_accuracy") for row in self._last}
        for (arm, attack), found in _grouped(self._attacks).items():
            psnr, ssim = _values(found, "psnr"), _values(found, "ssim")
            table.add_row(
                arm,
                attack,
                str(len(found)),
                f"{fmean(psnr):.1f} dB" if psnr else "-",
                f"{max(psnr):.1f} dB" if psnr else "-",
                f"{fmean(ssim):.3f}" if ssim else "-",
                _share(_values(found, "label_accuracy")),
                "-" if accuracy.get(arm) is None else f"{accuracy[arm]:.2%}",
            )
        return table

    def _show(self, description: str, done: int, total: int, rate: str) -> None:
        if self._task is not None:
            self._bar.update(self._task, description=description, completed=done, total=total, rate=rate)

    def _time_left(self, round: int) -> str:
        played = round + 1 - self._first
        seconds = (monotonic() - self._began) / played * (self._rounds - round - 1)
        left = f"{int(seconds // 60)}:{int(seconds % 60):02d} left" if seconds else "done"
        if self._task is not None:
            self._bar.update(self._task, left=left)
        return left

    def _say(self, message: str) -> None:
        if not self._quiet:
            self._console.print(message, highlight=False, soft_wrap=True)


def _plural(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _grouped(attacks: Sequence[dict[str, Any]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in attacks:
        groups[row["arm"], row["attack"]].append(row)
    return groups


def _values(rows: Sequence[dict[str, Any]], column: str) -> list[float]:
    """A column's numbers; PSNR of exact images is cut off, rows without one are left out."""
    found = [row[column] for row in rows if row.get(column) is not None]
    return [min(v, EXACT_DB) if column == "psnr" else v for v in found if isfinite(v) or column == "psnr"]


def _share(values: Sequence[float]) -> str:
    return f"{fmean(values):.0%}" if values else "-"


def _summary(rows: Sequence[dict[str, Any]]) -> str:
    psnr = _values(rows, "psnr")
    quality = f"PSNR mean {fmean(psnr):.1f} dB, best {max(psnr):.1f} dB; " if psnr else ""
    failed = sorted({f"{r['status']}: {r['message']}" for r in rows if r["status"] != "ok"})
    labels = f"labels {_share(_values(rows, 'label_accuracy'))}"
    return f"{_plural(len(rows), 'image')}, {quality}{labels}" + "".join(f"; {reason}" for reason in failed)
