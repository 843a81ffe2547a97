"""The command `reproduce`, which reproduces tables and figures of papers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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
from rayfed.cli.tables import make_terminal_table
from rayfed.errors import UserError
from rayfed.report.terminal.console import console
from rayfed.reproductions.kinds import Size

if TYPE_CHECKING:
    from rayfed.reproductions.reading import Reproduction
    from rayfed.reproductions.records import Record, SeedRecord
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
            metavar="list|pages|NAME|FILE|all",
            help="Reproduction to run: name, file, or `all`. `list` shows all names; `pages` rewrites all pages in "
            "--keep from their records.",
            show_default=False,
        ),
    ],
    size: Annotated[
        Size,
        typer.Option(
            help="Size: `reduced` (about 15 minutes on two cores), `paper` (the paper's size), or `gpu` (for a GPU)."
        ),
    ] = Size.PAPER,
    seeds: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of seeds. Seeds in the record in --keep are not run again, unless the record is stale. "
            "Default: `sweep.repeats` of the reproduction.",
            show_default=False,
        ),
    ] = None,
    changes: Set = None,
    keep: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder of the records: the record, its page and an index of all records are written to it. "
            "Default: print only.",
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
        rayfed reproduce dcs2-table-1 --size reduced
        rayfed reproduce dcs2-table-1 --size reduced --seeds 5 --keep docs/reproductions
    """
    with errors_for_people(debug, resumable=True):
        from rayfed.core.shipped import find_shipped
        from rayfed.reproductions.reading import find, names

        folder = folder or str(own if (own := Path("reproductions")).is_dir() else find_shipped("reproductions"))
        every = [find(name, folder) for name in names(folder)]
        if what == "list":
            _list(every, keep)
            return
        if what == "pages":
            _write_pages(every, keep)
            return
        if what == "all" and run is not None:
            raise UserError("--run compares one reproduction with one sweep: give the reproduction's name, not all")
        files = every if what == "all" else [find(what, folder)]
        player = partial(sweeps.run_in_terminal, out=out, executor=executor, address=address, quiet=quiet)
        job = _Job(size, seeds, tuple(changes or ()), run, keep, player)
        failed = []
        for path in files:
            try:
                _show(path, job, _reproduced(context, path, job))
            except UserError as error:
                if len(files) == 1:
                    raise
                failed.append(f"  {path.stem}: {error}")
            if keep is not None:
                _write_pages(list(dict.fromkeys([*every, *files])), keep)
        if failed:
            raise UserError("\n".join([f"{len(failed)} of {len(files)} reproductions failed:", *failed]))


@dataclass(frozen=True)
class _Job:
    """Options of the command that hold for all reproductions."""

    size: Size
    seeds: int | None
    changes: tuple[str, ...]
    run: str | None
    keep: Path | None
    player: Player


def _list(files: Sequence[Path], keep: Path | None) -> None:
    from rayfed.reproductions.pages import NAMES, stale_text, verdict_text
    from rayfed.reproductions.reading import load
    from rayfed.reproductions.results import read_results

    rows: list[tuple[str, ...]] = []
    if keep is None:
        for path in files:
            own = load(path)
            figures = sum(len(group.figures) for group in own.groups)
            rows.append((path.stem, f"{own.paper.name}, {own.paper.place}", own.title, str(figures or "none")))
        console().print(make_terminal_table("", ("name", "paper", "title", "figures"), rows))
        return
    for result in read_results(files, keep):
        place = f"{result.own.paper.name}, {result.own.paper.place}"
        for one in result.sizes.values():
            rows.append((result.name, place, one.size, verdict_text(one.paper), stale_text(one.staleness) or "current"))
        if not result.sizes:
            rows.append((result.name, place, "", NAMES[result.verdict], ""))
    console().print(make_terminal_table("", ("name", "paper", "size", "verdict", "record"), rows))


def _write_pages(files: Sequence[Path], keep: Path | None) -> None:
    from rayfed.reproductions.pages import write_pages
    from rayfed.reproductions.results import read_results

    if keep is None:
        raise UserError("`pages` rewrites the pages of records: give their folder with --keep")
    write_pages(keep, read_results(files, keep))


def _reproduced(context: typer.Context, path: Path, job: _Job) -> Record:
    """Run the missing seeds of a reproduction, or load its finished sweep, and return the record with them."""
    from rayfed.core.documents import dump_yaml
    from rayfed.reproductions import reading
    from rayfed.reproductions.fingerprints import fingerprints
    from rayfed.reproductions.records import Record, SizeRecord, read_record, write_record
    from rayfed.runs.scenario_loading import search_beside
    from rayfed.scenario import check_scenario

    own = reading.load(path)
    record = read_record(job.keep, path.stem) if job.keep is not None else Record(path.stem)
    if own.scenario is None:
        return record
    document = own.document(job.size, job.changes)
    search_beside(path)
    scenario = check_scenario(document, f"{path} ({job.size})")
    parts = fingerprints(document, scenario, own.compared(job.size))
    text = dump_yaml(document, width=110)
    empty = SizeRecord(text, job.changes, parts, {})
    if job.run is None:
        added = _run_seeds(context, own, scenario, record.seeds_of(job.size, empty), job)
    else:
        added = _read_sweep(own, scenario, path, job)
    record = record.with_seeds(job.size, replace(empty, seeds=added))
    if job.keep is not None:
        write_record(job.keep, record)
    return record


def _run_seeds(
    context: typer.Context, own: Reproduction, scenario: Scenario, done: Mapping[int, Any], job: _Job
) -> dict[int, SeedRecord]:
    """Run the seeds that a record lacks, from the first one on, and return their values."""
    from time import monotonic

    first, wanted = scenario.seed, job.seeds or (scenario.sweep.repeats if scenario.sweep else 1)
    missing = [seed for seed in range(first, first + wanted) if seed not in done]
    if not missing:
        return {}
    repeats = first + wanted - missing[0]
    # A copy, because a single further seed is no sweep by the rules for scenarios.
    sweep = scenario.sweep.model_copy(update={"repeats": repeats}) if scenario.sweep else None
    scenario = scenario.model_copy(update={"seed": missing[0], "sweep": sweep})
    _prepare(own.prepare, context)
    _check_data(scenario)
    began = monotonic()
    files = job.player(scenario).files
    return _seed_records(own, files, job.size, (monotonic() - began) / repeats)


def _read_sweep(own: Reproduction, scenario: Scenario, path: Path, job: _Job) -> dict[int, SeedRecord]:
    """Return the values of a finished sweep. Its seeds and machines may differ from those of the scenario."""
    from rayfed.core.documents import load_yaml
    from rayfed.results.sweep_folder import SweepFolder

    folder = SweepFolder.open(str(job.run))
    wanted, found = load_yaml(scenario.dump()), folder.scenario
    for document in (wanted, found):
        document["seed"] = document["sweep"]["repeats"] = None
        document["resources"] = None  # a run writes the GPUs of its machine into them
    if found != wanted:
        raise UserError(
            f"{job.run} is a sweep of another scenario than {path} ({job.size}): use the same size and --set options"
        )
    return _seed_records(own, folder.files, job.size, None)


def _seed_records(own: Reproduction, files: Any, size: Size, seconds: float | None) -> dict[int, SeedRecord]:
    from datetime import date

    from rayfed.reproductions.measuring import measure
    from rayfed.reproductions.records import SeedRecord, commit, made_with
    from rayfed.results.loading import Sweep

    groups, sweep = own.compared(size), Sweep(files)
    values = measure(groups, sweep)
    true = measure([group.in_true_arithmetic() for group in groups if group.true_measure], sweep)
    today, made, at = date.today().isoformat(), made_with(), commit()
    return {seed: SeedRecord(values[seed], true[seed], seconds, today, at, made) for seed in sorted(values)}


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


def _show(path: Path, job: _Job, record: Record) -> None:
    from rich.text import Text

    from rayfed.reproductions import pages
    from rayfed.reproductions.reading import load
    from rayfed.reproductions.results import result_of

    own, to = load(path), console()
    result = result_of(path.stem, own, record)
    to.print(Text(f"\n{own.title} ({own.paper.name}, {own.paper.place}; size {job.size})", style="bold"))
    one = result.sizes.get(job.size)
    verdict = pages.NAMES[result.verdict] if one is None else pages.verdict_text(one.paper)
    to.print(Text(f"Verdict: {verdict}", style="bold"))
    if one is not None and one.adaptive is not None:
        to.print(Text(f"With the adaptive attacker: {pages.verdict_text(one.adaptive)}", style="bold"))
    for each in one.judgements if one is not None else ():
        headings, rows = pages.rows(each)
        to.print(make_terminal_table(pages.group_title(each.group), headings, rows, words=1))
        reasons = pages.reasons_text(each)
        to.print(Text(f"{pages.verdict_text(each)}{': ' if reasons else ''}{reasons}"))
    for absent in own.not_compared([job.size]):
        to.print(Text(f"Not reproduced: {absent.what}. Reason: {absent.why}"))
    if job.keep is not None:
        print(f"Page: {job.keep / path.stem}.md")
