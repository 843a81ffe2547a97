"""Commands on runs: `launch`, `sweep`, `attack`, `resume`, `report`, `statement`, `validate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rayfed.cli import sweeps
from rayfed.cli.common import (
    CHECKING,
    INSPECTING,
    RUNNING,
    Address,
    Debug,
    Executor,
    ExecutorName,
    Out,
    Quiet,
    Run,
    ScenarioFile,
    Set,
    errors_for_people,
    load_with_notes,
    ray_beside,
    show_progress,
)
from rayfed.errors import UserError

commands = typer.Typer()


@commands.command(rich_help_panel=RUNNING)
def launch(
    scenario: ScenarioFile,
    changes: Set = None,
    out: Out = None,
    executor: Executor = ExecutorName.RAY,
    address: Address = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Run a scenario: train, attack, and write tables and a report.

    A scenario with a `sweep` runs all trials of the sweep.

    Examples:

        rayfed launch noniid
        rayfed launch my.yaml --set training.lr=0.05 --out results
    """
    with ray_beside(executor, address, scenario, changes), errors_for_people(debug, resumable=True):
        loaded = load_with_notes(scenario, changes)
        if loaded.sweep is not None:
            sweeps.run_in_terminal(loaded, out, executor, address, quiet)
            return
        from rayfed.runs import runner
        from rayfed.runs.executors import execution

        with show_progress(quiet, executor) as view:
            folder = runner.launch(loaded, out, execution(executor, address), view)
            view.finished(f"{folder.url}/report.html")


@commands.command(rich_help_panel=RUNNING)
def sweep(
    scenario: ScenarioFile,
    changes: Set = None,
    out: Out = None,
    executor: Executor = ExecutorName.RAY,
    address: Address = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Run all trials of a scenario's section `sweep` in parallel, as `rayfed launch` does.

    Examples:

        rayfed sweep my_sweep.yaml --set sweep.repeats=5
    """
    with ray_beside(executor, address, scenario, changes), errors_for_people(debug, resumable=True):
        loaded = load_with_notes(scenario, changes)
        if loaded.sweep is None:
            raise UserError(f"{scenario} has no `sweep`: add one (docs/sweeps.md), or use rayfed launch")
        sweeps.run_in_terminal(loaded, out, executor, address, quiet)


@commands.command(rich_help_panel=RUNNING)
def attack(
    scenario: ScenarioFile,
    changes: Set = None,
    run: Annotated[
        str | None,
        typer.Option(
            "--run",
            metavar="RUN",
            help="Run folder whose weights are attacked. Default: the untrained weights of the scenario.",
        ),
    ] = None,
    arm: Annotated[
        str | None,
        typer.Option(
            metavar="ARM",
            help="Arm of --run whose weights are attacked in all arms. Default: the arm of the same name.",
        ),
    ] = None,
    out: Out = None,
    executor: Executor = ExecutorName.RAY,
    address: Address = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Run the attacks of a scenario on one update of a client, without training.

    Examples:

        rayfed attack my.yaml
        rayfed attack my.yaml --run runs/NAME --arm none
    """
    with ray_beside(executor, address, scenario, changes), errors_for_people(debug):
        from rayfed.runs.scenario_loading import search_where

        if run:
            search_where(run)
        loaded = load_with_notes(scenario, changes)
        if not loaded.attacks:
            raise UserError(f"{scenario} has no `attacks`: add one, such as `attacks: [idlg]`")
        if arm and not run:
            raise UserError("--arm selects an arm of a run: also give the run with --run")
        from rayfed.runs import runner
        from rayfed.runs.executors import execution

        with show_progress(quiet, executor, "attack") as view:
            folder = runner.attack(loaded, run, out, execution(executor, address), view, arm)
            view.finished(f"{folder.url}/report.html")


@commands.command(rich_help_panel=RUNNING)
def resume(
    run: Run,
    failed: Annotated[bool, typer.Option("--failed", help="Also rerun the failed trials of a sweep.")] = False,
    extend: Annotated[
        bool,
        typer.Option(
            "--extend",
            help="Apply your changes in the run's scenario.yaml: more rounds, or attacks in later rounds.",
        ),
    ] = False,
    executor: Executor = ExecutorName.RAY,
    address: Address = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Continue an interrupted run or sweep.

    The results are the same as without the interruption.

    Examples:

        rayfed resume runs/NAME
        rayfed resume runs/SWEEP --failed
    """
    with errors_for_people(debug, resumable=True):
        from rayfed.results.sweep_folder import is_sweep
        from rayfed.runs.scenario_loading import search_where
        from rayfed.store.folder import RunFolder

        if is_sweep(RunFolder.open(run)):
            if extend:
                raise UserError(
                    f"{run} is a sweep, but --extend applies only to runs. To run more `samples`, resume the sweep "
                    "without --extend"
                )
            search_where(run)
            sweeps.resume_in_terminal(run, failed, executor, address, quiet)
            return
        from rayfed.runs import runner
        from rayfed.runs.executors import execution

        search_where(run)
        with show_progress(quiet, executor) as view:
            folder = runner.resume(run, execution(executor, address), view, extend)
            view.finished(f"{folder.url}/report.html")


@commands.command(rich_help_panel=INSPECTING)
def report(
    run: Run,
    redact: Annotated[
        bool,
        typer.Option(
            "--redact",
            help="Write report-redacted.html, without clients' samples, labels and file names, instead of report.html.",
        ),
    ] = False,
    debug: Debug = False,
) -> None:
    """Rewrite the `report.html` of a run or sweep from the tables in the folder.

    Examples:

        rayfed report runs/NAME
        rayfed report runs/NAME --redact
    """
    with errors_for_people(debug):
        from rayfed.report.html.run import write_report
        from rayfed.report.html.sweep import write_sweep_report
        from rayfed.report.samples import find_warning
        from rayfed.results.sweep_folder import SweepFolder, is_sweep
        from rayfed.store.folder import RunFolder

        if redact:
            from rayfed.report.export.redaction import write_redacted
            from rayfed.results.loading import open_results as results

            print(write_redacted(results(run)))
            return
        folder = RunFolder.open(run)
        if said := find_warning(folder):
            typer.echo(f"warning: {said}", err=True)
        print(write_sweep_report(SweepFolder(folder)) if is_sweep(folder) else write_report(folder))


@commands.command(rich_help_panel=INSPECTING)
def statement(
    run: Run,
    about: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="YAML file that describes your system, with the keys system, controller, purposes, data, people, "
            "access, necessity, measures. Copied to the run folder. Default: the copy in the run folder, if any.",
        ),
    ] = None,
    redact: Annotated[
        bool,
        typer.Option(
            "--redact",
            help="Leave out clients' samples, labels and file names. Images are identified by their hash.",
        ),
    ] = False,
    debug: Debug = False,
) -> None:
    """Write a one-page evidence statement of a run, in HTML and Markdown.

    It lists attacks, success rates, proved bounds and file hashes.

    Examples:

        rayfed statement runs/NAME --about about.yaml
    """
    with errors_for_people(debug):
        from rayfed.report.statement.page import check_scored, write_statement
        from rayfed.store.folder import RunFolder

        check_scored(run)
        for page in write_statement(RunFolder.open(run), about, redact):
            print(page)


@commands.command(rich_help_panel=CHECKING)
def validate(scenario: ScenarioFile, changes: Set = None, debug: Debug = False) -> None:
    """Check a scenario, its data and its models, without running the scenario.

    Lists every error with its line and a fix.

    Examples:

        rayfed validate my.yaml
    """
    with errors_for_people(debug):
        from rayfed.scenario import dotted_paths, read_text

        if foreign := dotted_paths(read_text(scenario), changes or []):
            print(f"{scenario} imports your code, now and when it runs: {', '.join(foreign)}", flush=True)
        loaded = load_with_notes(scenario, changes)
        from rayfed.report.text.guarantees import guarantee_lines
        from rayfed.runs.preflight import find_undeclared, find_unreachable
        from rayfed.scenario.trials import plan_trials
        from rayfed.simulation.inputs import prepare_inputs
        from rayfed.simulation.small_batches import check_batches

        inputs = prepare_inputs(loaded)
        varied = loaded.sweep and loaded.sweep.fields  # of fields that vary nothing is known
        small = [] if varied else check_batches(inputs)
        trials = plan_trials(loaded) if loaded.sweep and loaded.sweep.search != "optuna" else []
        sizes = inputs.parts.sizes
        print(f"{scenario}: valid")
        print(f"  data: {loaded.data.name}, {inputs.data.described}")
        for line in inputs.remarks:
            print(f"  {line}")
        print(f"  clients: {len(sizes)}, with {sizes.min()} to {sizes.max()} samples ({loaded.partition.name})")
        print(f"  arms: {', '.join(loaded.played)}")
        for line in guarantee_lines(inputs.privacy):
            print(f"  {line}")
        for line in filter(None, [inputs.randomness, *inputs.encryption]):
            print(f"  {line}")
        if loaded.sweep:
            settings = loaded.sweep.samples or len(trials) // loaded.sweep.repeats
            print(f"  sweep: {settings} settings ({loaded.sweep.search}), {loaded.sweep.repeats} repeats per setting")
            from rayfed.report.text.paired import few_pairs_text

            if loaded.sweep.repeats > 1 and (said := few_pairs_text(loaded.sweep.repeats, 1)):
                print(f"  two arms paired by seed: {said}; more arms need more repeats")
        print(f"  attacks: {', '.join(a.title for a in loaded.attacks) or 'none'}")
        for line in small:
            print(f"  note: {line}")
        for line in [] if varied else find_unreachable(inputs.scenario, find_undeclared(inputs)):
            print(f"  note: {line}")
        print(f"  results: {loaded.output.folder} (change with --out)")
