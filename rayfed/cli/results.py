"""Commands that look at results: recommend, compare, export."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rayfed.cli.common import Debug, errors_for_people
from rayfed.errors import UserError

if TYPE_CHECKING:
    from rayfed.results.loading import Results
    from rayfed.results.recommend import Recommendation, Verdict
    from rayfed.results.settings import Setting

commands = typer.Typer()

RunOrSweep = Annotated[
    str, typer.Argument(metavar="RUN", help="A run folder or that of a sweep, or its URL.", show_default=False)
]
_WIDTH = 160
"""Columns of a table where there is no terminal to ask: nobody wants a file's lines cut at 80."""


@commands.command()
def recommend(
    run: RunOrSweep,
    max_psnr: Annotated[float | None, typer.Option(metavar="DB", help="Mean PSNR of reconstructions.")] = None,
    max_ssim: Annotated[float | None, typer.Option(help="Mean SSIM of reconstructions.")] = None,
    min_lpips: Annotated[float | None, typer.Option(help="Mean LPIPS (AlexNet) of reconstructions.")] = None,
    min_mse: Annotated[float | None, typer.Option(help="Mean squared error of reconstructions (BP_MSE).")] = None,
    min_accuracy: Annotated[float | None, typer.Option(min=0, max=1, help="Test accuracy, a share.")] = None,
    min_pmm: Annotated[float | None, typer.Option(min=0, help="Accuracy over that without a defence.")] = None,
    max_epsilon: Annotated[float | None, typer.Option(min=0, help="Epsilon of the guarantee.")] = None,
    max_seconds: Annotated[float | None, typer.Option(min=0, help="Training time.")] = None,
    max_bytes: Annotated[float | None, typer.Option(min=0, help="Bytes sent by clients.")] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(metavar="'MEASURE<=VALUE'", help="A bound, with <= or >=, on any measure. May be repeated."),
    ] = None,
    worst: Annotated[
        bool, typer.Option("--worst", help="Bounds on leakage are of the worst image, not of the mean.")
    ] = False,
    cheapest: Annotated[
        str | None,
        typer.Option(
            metavar="COST", help="What to spare: train_seconds, then bytes_up by default.", show_default=False
        ),
    ] = None,
    debug: Debug = False,
) -> None:
    """Name the cheapest setting that keeps within all bounds, or the one that comes nearest."""
    with errors_for_people(debug):
        from rayfed.results import recommend as choice
        from rayfed.results.loading import load

        limits = {
            "psnr<=": max_psnr,
            "ssim<=": max_ssim,
            "lpips_alex>=": min_lpips,
            "mse>=": min_mse,
            "test_accuracy>=": min_accuracy,
            "pmm>=": min_pmm,
            "epsilon<=": max_epsilon,
            "train_seconds<=": max_seconds,
            "bytes_up<=": max_bytes,
        }
        asked = [f"{measure}{limit!r}" for measure, limit in limits.items() if limit is not None] + (where or [])
        bounds = [choice.bound(text) for text in asked]
        if worst:
            bounds = [choice.of_worst_image(bound) for bound in bounds]
        results = load(run)
        costs = choice.COSTS if cheapest is None else (choice.cost(cheapest),)
        found = choice.recommend(results.settings(), bounds, costs)
        _print_recommendation(found, results)


@commands.command()
def compare(
    runs: Annotated[list[str], typer.Argument(metavar="RUN RUN...", help="Runs and sweeps.", show_default=False)],
    debug: Debug = False,
) -> None:
    """Set runs and sweeps beside each other: what they come to, and what their scenarios have different."""
    with errors_for_people(debug):
        from rayfed.results import compare as comparison
        from rayfed.results.figures import grid
        from rayfed.results.loading import load

        found = comparison.compare([load(run) for run in runs])
        console = _console()
        settings = grid(found.settings)
        console.print(_table("settings", settings.headings, settings.rows, words=settings.words))
        console.print(Text(settings.note))
        if found.differences:
            rows = [[each.path, *(value or "-" for value in each.values)] for each in found.differences]
            console.print(_table("what the scenarios have different", ["field", *found.names], rows))
        for warning in found.warnings:
            console.print(Text.assemble(("note:", "yellow"), f" {warning}"))


@commands.command()
def export(
    run: RunOrSweep,
    format: Annotated[str, typer.Option(help="csv (every row), latex or markdown (means and intervals).")] = "csv",
    table: Annotated[
        str, typer.Option(help="outcomes, or a table of a run: rounds, clients, attacks ...")
    ] = "outcomes",
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="File to write; printed when not given.")] = None,
    debug: Debug = False,
) -> None:
    """Write a table of a run or sweep for a paper or another program."""
    with errors_for_people(debug):
        from rayfed.results.export import export as exported
        from rayfed.results.loading import load

        text = exported(load(run), format, table)
        if out is None:
            print(text, end="")
            return
        try:
            out.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write {out}: {error}") from error
        print(f"wrote {out}")


def _print_recommendation(found: Recommendation, results: Results) -> None:
    from rayfed.results.outcomes import MEASURES
    from rayfed.results.recommend import rerun

    console = _console()
    asked = ", ".join(map(str, found.bounds))
    spared = ", then ".join(MEASURES[name].title for name in found.costs)
    if found.meeting:
        console.print(Text(f"{found.meeting} of {found.candidates} settings meet {asked}. The cheapest ({spared}):"))
    else:
        console.print(Text(f"None of {found.candidates} settings meets {asked}. What comes nearest:"))
    console.print(Text(f"\n  {found.chosen.title}", style="bold"))
    rows = [_verdict(each) for each in found.chosen.verdicts]
    console.print(_table("", ["bound", "found (95 % interval)", "by attack", ""], rows))
    for line in _remarks(found):
        console.print(Text(line))
    console.print(Text("\nto play it again:"))
    for command in rerun(results, found.chosen):
        console.print(Text(f"  {command}"), soft_wrap=True)


def _verdict(verdict: Verdict) -> list[str]:
    from rayfed.results.figures import said, said_with_interval
    from rayfed.results.outcomes import MEASURES

    bound, estimate = verdict.bound, verdict.estimate
    if verdict.setting is None or estimate is None:
        return [str(bound), "-", "-", "no guarantee" if bound.measure == "epsilon" else "not known"]
    by_attack = MEASURES[bound.measure].kind == "leakage" and bound.measure != "epsilon"
    attack = (verdict.setting.attack if by_attack else None) or "-"
    if verdict.share:
        excess = bound.excess(estimate.mean)
        judged = f"missed by {said(bound.measure, excess)}, {verdict.share:.0%} of the range"
    elif verdict.sure is None:
        judged = "met, in one run"
    else:
        judged = "met for sure" if verdict.sure else "met, within its uncertainty"
    return [str(bound), said_with_interval(bound.measure, estimate), attack, judged]


def _remarks(found: Recommendation) -> list[str]:
    """What the figures rest on."""
    chosen = found.chosen.settings[0]
    repeats = max(estimate.n for estimate in chosen.measures.values())
    lines = [_costs(chosen, found.costs)]
    if repeats == 1:
        lines.append("Played once: nothing is known of the spread over seeds.")
    else:
        lines.append(f"Means over {repeats} repeats; sure is what holds up to the end of the 95 % interval.")
    if not found.meeting:
        lines.append("The range is that of all settings' values and the bound; nearest is the least root of squares.")
    if found.unattacked:
        names = ", ".join(found.unattacked[:3]) + (", ..." if len(found.unattacked) > 3 else "")
        lines.append(f"No attack has met {len(found.unattacked)} settings ({names}): their leakage is not known.")
    return [*lines, _guarantee(chosen)]


def _costs(chosen: Setting, costs: Sequence[str]) -> str:
    from rayfed.results.figures import said_with_interval
    from rayfed.results.outcomes import MEASURES

    known = [f"{MEASURES[c].title} {said_with_interval(c, chosen.measures[c])}" for c in costs if c in chosen.measures]
    return f"It costs: {', '.join(known)}." if known else "What it costs was not measured."


def _guarantee(chosen: Setting) -> str:
    epsilon = chosen.measures.get("epsilon")
    if epsilon is None:
        return "Empirical: this is what these attacks got. No (epsilon, delta) guarantee holds; others may get more."
    row = max(chosen.rows, key=lambda row: row["epsilon"] or 0)
    return f"Guarantee: epsilon {row['epsilon']:.3g} at delta {row['delta']:g} of every {row['epsilon_unit']}; what leaks is empirical."


def _table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], words: int | None = None) -> Table:
    table = Table(title=title or None, title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0))
    for place, heading in enumerate(headings):
        table.add_column(Text(heading), justify="left" if words is None or place < words else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_WIDTH)
