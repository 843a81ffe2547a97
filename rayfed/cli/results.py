"""Commands on the results of runs and sweeps: `recommend`, `compare`, `export`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from rayfed.cli.common import BOUND_EXCEEDED, INSPECTING, Debug, errors_for_people
from rayfed.cli.tables import make_terminal_table
from rayfed.errors import UserError
from rayfed.report.terminal.console import console

if TYPE_CHECKING:
    from rayfed.evidence.recommend import Recommendation
    from rayfed.results.loading import Results

commands = typer.Typer()
LEAKAGE_PANEL = "Bounds on leakage"
COST_PANEL = "Bounds on accuracy and cost"

RunOrSweep = Annotated[
    str, typer.Argument(metavar="RUN", help="Path or URL of a run folder or sweep folder.", show_default=False)
]


Against = Annotated[
    str | None,
    typer.Option(metavar="ARM", help="Reference arm, from which differences are computed. Default: the first arm."),
]


@commands.command(rich_help_panel=INSPECTING)
def recommend(
    run: RunOrSweep,
    max_psnr: Annotated[
        float | None,
        typer.Option(
            metavar="DB",
            help="Maximum mean PSNR of reconstructions, in dB. Default: no bound.",
            rich_help_panel=LEAKAGE_PANEL,
        ),
    ] = None,
    max_ssim: Annotated[
        float | None,
        typer.Option(
            metavar="FLOAT",
            help="Maximum mean SSIM of reconstructions. Default: no bound.",
            rich_help_panel=LEAKAGE_PANEL,
        ),
    ] = None,
    min_lpips: Annotated[
        float | None,
        typer.Option(
            metavar="FLOAT",
            help="Minimum mean LPIPS (AlexNet) of reconstructions. Default: no bound.",
            rich_help_panel=LEAKAGE_PANEL,
        ),
    ] = None,
    min_mse: Annotated[
        float | None,
        typer.Option(
            metavar="FLOAT",
            help="Minimum mean squared error of reconstructions. Default: no bound.",
            rich_help_panel=LEAKAGE_PANEL,
        ),
    ] = None,
    worst: Annotated[
        bool,
        typer.Option(
            "--worst",
            help="Apply the bounds on PSNR, SSIM, LPIPS and MSE to the best reconstruction instead of the mean.",
            rich_help_panel=LEAKAGE_PANEL,
        ),
    ] = False,
    max_epsilon: Annotated[
        float | None,
        typer.Option(
            metavar="FLOAT",
            min=0,
            help="Maximum epsilon of the privacy guarantee. Default: no bound.",
            rich_help_panel=LEAKAGE_PANEL,
        ),
    ] = None,
    max_rero: Annotated[
        float | None,
        typer.Option(
            metavar="FLOAT",
            min=0,
            max=1,
            help="Maximum proved reconstruction success at prior probability 1/100, a share (reconstruction "
            "robustness, ReRo).",
            rich_help_panel=LEAKAGE_PANEL,
        ),
    ] = None,
    min_accuracy: Annotated[
        float | None,
        typer.Option(
            metavar="FLOAT",
            min=0,
            max=1,
            help="Minimum test accuracy, a share (0 to 1). Default: no bound.",
            rich_help_panel=COST_PANEL,
        ),
    ] = None,
    min_pmm: Annotated[
        float | None,
        typer.Option(
            metavar="FLOAT",
            min=0,
            help="Minimum accuracy relative to the arm without a defence, a share (PMM).",
            rich_help_panel=COST_PANEL,
        ),
    ] = None,
    max_seconds: Annotated[
        float | None,
        typer.Option(
            metavar="FLOAT",
            min=0,
            help="Maximum training time, in seconds. Default: no bound.",
            rich_help_panel=COST_PANEL,
        ),
    ] = None,
    max_bytes: Annotated[
        float | None,
        typer.Option(
            metavar="FLOAT",
            min=0,
            help="Maximum upload of all clients together, in bytes. Default: no bound.",
            rich_help_panel=COST_PANEL,
        ),
    ] = None,
    cheapest: Annotated[
        str | None,
        typer.Option(
            metavar="COST",
            help="Cost to minimise. Default: train_seconds (simulated_seconds for simulated devices), then bytes_up.",
            show_default=False,
            rich_help_panel=COST_PANEL,
        ),
    ] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(metavar="'MEASURE<=X'", help="Bound on any measure, such as label_accuracy<=0.5. Repeatable."),
    ] = None,
    debug: Debug = False,
) -> None:
    """Recommend the cheapest setting that satisfies all bounds.

    If no setting satisfies all bounds, show the setting with the smallest excess and exit with code 3.

    Examples:

        rayfed recommend runs/NAME --max-psnr 15 --min-accuracy 0.9
        rayfed recommend runs/SWEEP --max-psnr 15 --worst --where 'label_accuracy<=0.5'
    """
    with errors_for_people(debug):
        from rayfed.evidence import recommend as choice
        from rayfed.report.text.recommendation import rerun_commands
        from rayfed.results.loading import open_results
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
        bounds = [choice.parse_bound(text) for text in asked]
        if worst:
            bounds = [choice.bound_on_best(bound) for bound in bounds]
        results = open_results(run)
        costs = None if cheapest is None else (choice.check_cost(cheapest),)
        found = choice.recommend_setting(results.settings(), bounds, costs)
        _print(found, rerun_commands(results.url, results.scenario, found.chosen))
        if not exits.is_complete(results.status):
            state = results.status.get("state") or "not started"
            print(f"note: {run} is not finished ({state}); only its finished trials are compared")
        if not found.meeting:
            raise typer.Exit(BOUND_EXCEEDED)


def _print(found: Recommendation, commands: dict[str, str]) -> None:
    from rayfed.report.text import recommendation

    page = console()
    page.print(Text(recommendation.recommendation_text(found)), soft_wrap=True)
    page.print(Text(f"\n  {found.chosen.title}", style="bold"))
    page.print(
        make_terminal_table(
            "", recommendation.check_headings(found), [recommendation.check_cells(each) for each in found.chosen.checks]
        )
    )
    for line in recommendation.remarks(found):
        page.print(Text(line), soft_wrap=True)
    for place, (what, command) in enumerate(commands.items()):
        page.print(Text(f"\n{'Or' if place else 'Next:'} rerun {what}:\n  {command}"), soft_wrap=True)


@commands.command(rich_help_panel=INSPECTING)
def compare(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN RUN...", help="Paths or URLs of at least two run or sweep folders.", show_default=False
        ),
    ],
    against: Against = None,
    debug: Debug = False,
) -> None:
    """Compare the results of several runs and sweeps.

    Also lists paired differences, and the fields in which the scenarios differ.

    Examples:

        rayfed compare runs/A runs/B --against none
    """
    with errors_for_people(debug):
        from rayfed.evidence import compare as comparison
        from rayfed.report.text.compare import scenario_value_text, warnings_text
        from rayfed.report.text.paired import paired_grid
        from rayfed.report.text.sweeps import sweep_verdicts
        from rayfed.report.text.tables import grid
        from rayfed.results.loading import open_results

        found = comparison.compare_results([open_results(run) for run in runs], against)
        page = console()
        settings = grid(found.settings)
        page.print(make_terminal_table("settings", settings.headings, settings.rows, words=settings.words))
        page.print(Text(settings.note))
        for state, sentence in sweep_verdicts(found.settings):
            page.print(Text(f"{state}: {sentence}"))
        if pairs := paired_grid(found.paired):
            page.print(make_terminal_table("paired differences", pairs.headings, pairs.rows, words=pairs.words))
            page.print(Text(pairs.note))
        differences = [one for changed in found.differences.values() for one in changed]
        if differences:
            rows = [[one.path, *(scenario_value_text(value) or "-" for value in one.values)] for one in differences]
            page.print(make_terminal_table("scenario differences", ["field", *found.names], rows))
        for warning in warnings_text(found):
            page.print(Text.assemble(("note:", "yellow"), f" {warning}"))


@commands.command(rich_help_panel=INSPECTING)
def export(
    run: RunOrSweep,
    format: Annotated[
        str,
        typer.Option(
            metavar="FORMAT",
            help="Format of the export: csv, latex, markdown, or folder (a copy to share).",
        ),
    ] = "csv",
    table: Annotated[
        str,
        typer.Option(
            metavar="TABLE",
            help="Table to export: outcomes, paired (differences between arms), or a table of the run such as "
            "verdicts, rounds or attacks.",
        ),
    ] = "outcomes",
    columns: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[=HEADING],...",
            help="Columns of a latex or markdown table, with optional headings. Default: all common measures.",
        ),
    ] = None,
    against: Against = None,
    figures: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="Folder to write the charts to, as PDF, SVG and CSV. A table is exported only with --out.",
        ),
    ] = None,
    out: Annotated[
        str | None, typer.Option(metavar="FILE", help="File or folder to write. Default: print the table.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Export tables and figures of a run or sweep, or a copy to share.

    Examples:

        rayfed export runs/SWEEP --format latex --columns arm=Defence,psnr,test_accuracy
        rayfed export runs/NAME --table attacks --out attacks.csv
        rayfed export runs/NAME --figures figures/
        rayfed export runs/NAME --format folder --out to_share/
    """
    with errors_for_people(debug):
        from rayfed.report.export.share import SAMPLES, has_private_states
        from rayfed.report.export.tables import export_table as exported
        from rayfed.report.samples import make_sample_filter
        from rayfed.results.loading import open_results

        results = open_results(run)
        if format == "folder":
            if figures or columns or against:
                raise UserError(
                    "--format folder writes a copy to share, without --figures, --columns or --against: use a separate "
                    "command"
                )
            _share(results, out)
            return
        if figures is not None:
            from rayfed.report.export.figures import write_figures

            names = write_figures(results, figures)
            print(f"wrote {len(names)} figure{'s' * (len(names) != 1)} to {figures}: {', '.join(names)}")
            if out is None:
                return
        text = exported(results, format, table, _headings(columns), against)
        if results.unfinished:
            typer.echo(f"note: {results.unfinished}", err=True)
        if table in SAMPLES and not make_sample_filter([results.scenario]).public:
            typer.echo(f"warning: table {table} contains clients' samples, which are not known to be public", err=True)
        if has_private_states(results):
            typer.echo(
                f"note: {run} contains private states of clients in clear (checkpoint/clients). Do not share it; share "
                f"a copy made with --format folder --out COPY",
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
    """Return column name -> heading from `arm=Defence,psnr`, None for the default heading."""
    if columns is None:
        return None
    parts = (part.partition("=") for part in columns.split(","))
    return {name.strip(): heading.strip() or None for name, _, heading in parts}


def _share(results: Results, out: str | None) -> None:
    from rayfed.report.export.share import SAMPLES, copy_shareable
    from rayfed.report.html.run import write_report
    from rayfed.report.html.sweep import write_sweep_report
    from rayfed.results.sweep_folder import SweepFolder, is_sweep

    if out is None:
        raise UserError("export --format folder needs a new folder for the copy: add --out")
    with copy_shareable(results, out) as copy:
        if is_sweep(copy):
            write_sweep_report(SweepFolder(copy))
        else:
            write_report(copy)
    print(f"wrote {copy.url}")
    print(f"Left out: checkpoint, {', '.join(SAMPLES)}")
    print("Included: seed and paths (scenario.yaml); labels, class names and class counts per client; statistics of")
    print("private layers, without their weights (table `private`)")
    print("Next: for a report without labels and class names, run rayfed report RUN --redact")
