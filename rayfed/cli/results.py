"""Commands on results: `recommend`, `compare`, `export`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from rayfed.cli.common import BOUND_PASSED, Debug, errors_for_people
from rayfed.cli.tables import table
from rayfed.errors import UserError
from rayfed.report.terminal import console

if TYPE_CHECKING:
    from rayfed.analysis.loading import Results
    from rayfed.analysis.recommend import Recommendation

commands = typer.Typer()

RunOrSweep = Annotated[
    str, typer.Argument(metavar="RUN", help="A run folder or that of a sweep, or its URL.", show_default=False)
]


Against = Annotated[
    str | None,
    typer.Option(metavar="ARM", help="The arm that the others are set against; the first when not given."),
]


@commands.command()
def recommend(
    run: RunOrSweep,
    max_psnr: Annotated[float | None, typer.Option(metavar="DB", help="Highest mean PSNR of reconstructions.")] = None,
    max_ssim: Annotated[float | None, typer.Option(help="Highest mean SSIM of reconstructions.")] = None,
    min_lpips: Annotated[float | None, typer.Option(help="Least mean LPIPS (AlexNet) of reconstructions.")] = None,
    min_mse: Annotated[float | None, typer.Option(help="Least mean squared error of reconstructions (BP_MSE).")] = None,
    min_accuracy: Annotated[float | None, typer.Option(min=0, max=1, help="Least test accuracy, a share.")] = None,
    min_pmm: Annotated[
        float | None, typer.Option(min=0, help="Least accuracy, as a share of that without a defence (PMM).")
    ] = None,
    max_epsilon: Annotated[float | None, typer.Option(min=0, help="Highest epsilon of the guarantee.")] = None,
    max_rero: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="Highest proved share of right guesses after training, of secrets guessed 1 in 100 before (ReRo).",
        ),
    ] = None,
    max_seconds: Annotated[float | None, typer.Option(min=0, help="Longest training time (s).")] = None,
    max_bytes: Annotated[float | None, typer.Option(min=0, help="Most bytes sent by clients.")] = None,
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
            metavar="COST",
            help="Cost to minimise: by default train_seconds (of devices simulated_seconds), then bytes_up.",
            show_default=False,
        ),
    ] = None,
    debug: Debug = False,
) -> None:
    """Name the cheapest setting that keeps within all bounds; the nearest one, and exit code 3, where none does."""
    with errors_for_people(debug):
        from rayfed.analysis import recommend as choice
        from rayfed.analysis.loading import load
        from rayfed.store import exits

        limits = {
            "psnr<=": max_psnr,
            "ssim<=": max_ssim,
            "lpips_alex>=": min_lpips,
            "mse>=": min_mse,
            "test_accuracy>=": min_accuracy,
            "pmm>=": min_pmm,
            "epsilon<=": max_epsilon,
            "rero<=": max_rero,
            "train_seconds<=": max_seconds,
            "bytes_up<=": max_bytes,
        }
        asked = [f"{measure}{limit!r}" for measure, limit in limits.items() if limit is not None] + (where or [])
        bounds = [choice.bound(text) for text in asked]
        if worst:
            bounds = [choice.of_worst_image(bound) for bound in bounds]
        results = load(run)
        costs = None if cheapest is None else (choice.cost(cheapest),)
        found = choice.recommend(results.settings(), bounds, costs)
        _print(found, choice.rerun(results, found.chosen))
        if not exits.over(results.status):
            state = results.status.get("state") or "never began"
            print(f"note: {run} is not finished ({state}): what was not played is not among the settings")
        if not found.meeting:
            raise typer.Exit(BOUND_PASSED)


def _print(found: Recommendation, commands: dict[str, str]) -> None:
    from rayfed.report import recommendation

    page = console()
    page.print(Text(recommendation.answer(found)), soft_wrap=True)
    page.print(Text(f"\n  {found.chosen.title}", style="bold"))
    page.print(table("", recommendation.headings(found), [recommendation.judged(each) for each in found.chosen.checks]))
    for line in recommendation.remarks(found):
        page.print(Text(line), soft_wrap=True)
    for what, command in commands.items():
        page.print(Text(f"\nTo play {what}:\n  {command}"), soft_wrap=True)


@commands.command()
def compare(
    runs: Annotated[list[str], typer.Argument(metavar="RUN RUN...", help="Runs and sweeps.", show_default=False)],
    against: Against = None,
    debug: Debug = False,
) -> None:
    """Compare runs and sweeps: their results side by side, and the fields in which their scenarios differ."""
    with errors_for_people(debug):
        from rayfed.analysis import compare as comparison
        from rayfed.analysis.figures import grid
        from rayfed.analysis.loading import load
        from rayfed.analysis.paired import paired_grid
        from rayfed.report.words import sweep_verdicts

        found = comparison.compare([load(run) for run in runs], against)
        page = console()
        settings = grid(found.settings)
        page.print(table("settings", settings.headings, settings.rows, words=settings.words))
        page.print(Text(settings.note))
        for state, sentence in sweep_verdicts(found.settings):
            page.print(Text(f"{state}: {sentence}"))
        if pairs := paired_grid(found.paired):
            page.print(table("paired differences", pairs.headings, pairs.rows, words=pairs.words))
            page.print(Text(pairs.note))
        if found.differences:
            rows = [[each.path, *(value or "-" for value in each.values)] for each in found.differences]
            page.print(table("what the scenarios have different", ["field", *found.names], rows))
        for warning in filter(None, [*found.warnings, found.unpaired]):
            page.print(Text.assemble(("note:", "yellow"), f" {warning}"))


@commands.command()
def export(
    run: RunOrSweep,
    format: Annotated[
        str, typer.Option(help="csv (every row), latex or markdown (means and intervals); folder: a copy to share.")
    ] = "csv",
    table: Annotated[
        str,
        typer.Option(help="outcomes; paired: differences between arms; of a run also verdicts, rounds, attacks ..."),
    ] = "outcomes",
    columns: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[=HEADING],...", help="Columns of the outcomes, measures of the pairs, as latex or markdown."
        ),
    ] = None,
    against: Against = None,
    figures: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="Write the report's charts as PDF, SVG and CSV; a table only with --out."),
    ] = None,
    out: Annotated[
        str | None, typer.Option(metavar="FILE", help="File or folder to write; a table is printed when not given.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Write tables and figures of a run or sweep for a paper or another program, or a copy that can be shared."""
    with errors_for_people(debug):
        from rayfed.analysis.loading import load
        from rayfed.report.export import export as exported
        from rayfed.report.samples import shown
        from rayfed.report.share import SAMPLES, has_private_states

        results = load(run)
        if format == "folder":
            if figures or columns or against:
                raise UserError("--format folder makes a copy to share: export figures by a command of their own")
            _share(results, out)
            return
        if figures is not None:
            from rayfed.report.paper import write_figures

            names = write_figures(results, figures)
            print(f"wrote {len(names)} figure{'s' * (len(names) != 1)} to {figures}: {', '.join(names)}")
            if out is None:
                return
        text = exported(results, format, table, _headings(columns), against)
        if results.unfinished:
            typer.echo(f"note: {results.unfinished}", err=True)
        if table in SAMPLES and not shown([results.scenario]).public:
            typer.echo(f"warning: the table {table} has clients' samples, which are not known to be public", err=True)
        if has_private_states(results):
            typer.echo(
                f"note: {run} holds in clear what clients keep to themselves (checkpoint/clients): do not share the "
                f"folder, but a copy of it, which --format folder --out COPY makes",
                err=True,
            )
        if out is None:
            print(text, end="")
            return
        try:
            Path(out).write_text(text, encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write {out}: {error.strerror or error}") from error
        print(f"wrote {out}")


def _headings(columns: str | None) -> dict[str, str | None] | None:
    """Return headings by the columns' names, from `arm=Defence,psnr`; None as a heading for the usual one."""
    if columns is None:
        return None
    parts = (part.partition("=") for part in columns.split(","))
    return {name.strip(): heading.strip() or None for name, _, heading in parts}


def _share(results: Results, out: str | None) -> None:
    from rayfed.analysis.sweep_folder import SweepFolder, is_sweep
    from rayfed.report.run import write_report
    from rayfed.report.share import SAMPLES, sharing
    from rayfed.report.sweep import write_sweep_report

    if out is None:
        raise UserError("export --format folder needs a place for the copy: name a new folder with --out")
    with sharing(results, out) as copy:
        if is_sweep(copy):
            write_sweep_report(SweepFolder(copy))
        else:
            write_report(copy)
    print(f"wrote {copy.url}, without the checkpoint, {', '.join(SAMPLES)}; scenario.yaml has the seed and your paths")
    print("labels, names of classes and how many of each a client has are in it: a page without is `report --redact`")
    print("a table `private` holds figures about clients' private layers, not the layers")
