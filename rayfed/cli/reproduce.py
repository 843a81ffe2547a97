"""The command `reproduce`, which reproduces tables and figures of papers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rayfed.cli import sweeps
from rayfed.cli.common import (
    REPRODUCING,
    Address,
    Debug,
    Executor,
    ExecutorName,
    Out,
    Quiet,
    Set,
    errors_for_people,
)
from rayfed.cli.tables import table
from rayfed.errors import UserError
from rayfed.report.terminal.console import console

if TYPE_CHECKING:
    from rayfed.reproductions.pages import Record
    from rayfed.reproductions.reading import Scale
    from rayfed.scenario import Scenario

commands = typer.Typer()
Player = Callable[["Scenario"], Any]
"""Function that runs a sweep and returns its folder."""


@commands.command(rich_help_panel=REPRODUCING)
def reproduce(
    context: typer.Context,
    what: Annotated[
        str,
        typer.Argument(
            metavar="list|NAME|FILE|all",
            help="Reproduction to run: name, file, or `all`; `list` shows all names.",
            show_default=False,
        ),
    ],
    reduced: Annotated[
        bool, typer.Option("--reduced", help="Run a smaller version (about 15 minutes on two cores).")
    ] = False,
    changes: Set = None,
    keep: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder to write the record, its page and a summary of all records to. Default: print only.",
        ),
    ] = None,
    run: Annotated[
        str | None,
        typer.Option(metavar="SWEEP", help="Finished sweep to compare with the paper, instead of running a new sweep."),
    ] = None,
    folder: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Folder of reproductions. Default: reproductions in the current folder, or the built-in ones.",
        ),
    ] = None,
    out: Out = None,
    executor: Executor = ExecutorName.RAY,
    address: Address = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Reproduce a table or figure of a paper, and compare the results with the paper.

    Examples:

        rayfed reproduce list
        rayfed reproduce dcs2-table-1 --reduced
    """
    with errors_for_people(debug, resumable=True):
        from rayfed.core.shipped import shipped
        from rayfed.reproductions.reading import find, names

        folder = folder or str(own if (own := Path("reproductions")).is_dir() else shipped("reproductions"))
        if what == "list":
            _list([find(name, folder) for name in names(folder)])
            return
        if what == "all" and run is not None:
            raise UserError("--run compares one reproduction with one sweep: give the reproduction's name, not all")
        files = [find(name, folder) for name in (names(folder) if what == "all" else [what])]
        scale: Scale = "reduced" if reduced else "full"
        failed = []
        player = partial(sweeps.run, out=out, executor=executor, address=address, quiet=quiet)
        for path in files:
            try:
                _show(_reproduced(context, path, scale, changes or [], run, player), keep, folder)
            except UserError as error:
                if len(files) == 1:
                    raise
                failed.append(f"  {path.stem}: {error}")
        if failed:
            raise UserError("\n".join([f"{len(failed)} of {len(files)} reproductions failed:", *failed]))


def _list(files: Sequence[Path]) -> None:
    from rayfed.reproductions.reading import load

    rows = []
    for path in files:
        found = load(path)
        figures = sum(len(group.figures) for group in found.groups)
        rows.append((path.stem, f"{found.paper.name}, {found.paper.place}", found.title, str(figures or "none")))
    console().print(table("", ("name", "paper", "title", "figures"), rows))


def _reproduced(
    context: typer.Context, path: Path, scale: Scale, changes: Sequence[str], run: str | None, player: Player
) -> Record:
    """Run a reproduction, or load its finished sweep, and compare the results with the paper."""
    from datetime import date
    from time import monotonic

    from rayfed.core.documents import dump_yaml, load_yaml
    from rayfed.reproductions import pages, reading
    from rayfed.reproductions.judging import judge
    from rayfed.reproductions.measuring import measured
    from rayfed.results.loading import Sweep
    from rayfed.results.sweep_folder import SweepFolder
    from rayfed.runs.scenario_loading import search_beside
    from rayfed.scenario import check

    own, began = reading.load(path), monotonic()
    record = partial(pages.Record, path.stem, own, scale, date.today().isoformat(), pages.made_with())
    if own.scenario is None:
        return record([], 0.0)
    document = own.document(scale, changes)
    search_beside(path)
    scenario = check(document, f"{path} ({scale})")
    if run is None:
        _prepare(own.prepare, context)
        _check_data(scenario)
        files = player(scenario).files
    else:
        folder = SweepFolder.open(run)
        files = folder.files
        if folder.scenario != load_yaml(scenario.dump()):
            raise UserError(
                f"{run} is a sweep of another scenario than {path} ({scale}): use the same size and --set options"
            )
    found = Sweep(files)
    judgements = [judge(group, measured(group, found)) for group in own.compared(scale)]
    text = dump_yaml(document, width=110)
    seconds = monotonic() - began if run is None else None
    return record(judgements, seconds, text, tuple(changes))


def _check_data(scenario: Scenario) -> None:
    """Raise `DataError` for missing data before the first trial."""
    if scenario.sweep and not any(path.partition(".")[0] == "data" for path in scenario.sweep.fields):
        scenario.data.load()


def _prepare(commands: dict[str, str], context: typer.Context) -> None:
    """Run the commands whose output files are missing."""
    from shlex import split

    for file, command in commands.items():
        if not Path(file).exists():
            print(f"{file} is missing, so running: rayfed {command}")
            failed = context.find_root().command.main(split(command), standalone_mode=False)
            if failed or not Path(file).exists():
                raise UserError(f"`prepare`: the command `rayfed {command}` did not write {file}: correct the command")


def _show(record: Record, keep: Path | None, folder: str) -> None:
    from rich.text import Text

    from rayfed.reproductions import pages

    own, to = record.reproduction, console()
    to.print(Text(f"\n{own.title} ({own.paper.name}, {own.paper.place}; {record.scale} size)", style="bold"))
    to.print(Text(f"Verdict: {record.verdict}", style="bold"))
    for each in record.judgements:
        to.print(table(each.group.title, pages.HEADINGS, pages.rows(each.findings), words=1))
        because = f": {each.because}" if each.because else ""
        because += f" ({pages.RANKED})" if each.group.ranked else ""
        to.print(Text(f"{each.verdict}{because}"))
    for absent in own.not_compared(record.scale):
        to.print(Text(f"Not reproduced: {absent.what}. Reason: {absent.why}"))
    if keep is not None:
        pages.write(keep, record.document(), sorted(path.stem for path in Path(folder).glob("*.yaml")))
        print(f"Page: {keep / record.name}.md")
