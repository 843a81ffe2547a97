"""The command `audit`: run the attacks that apply to a model within a time budget, and print the results."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated

import typer

from rayfed.cli.common import (
    ATTACK_PANEL,
    DATA_PANEL,
    RUNNING,
    SET_HELP,
    Address,
    Debug,
    Executor,
    ExecutorName,
    OutInRuns,
    Quiet,
    errors_for_people,
    show_progress,
    yaml_option,
)
from rayfed.cli.gate import AllowUnmeasured, Baseline, FailAbove, Gate, Json, Junit
from rayfed.cli.options import in_options
from rayfed.errors import UserError

if TYPE_CHECKING:
    from rayfed.audits.plan import Defences

commands = typer.Typer()


@commands.command(rich_help_panel=RUNNING)
def audit(
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Model: FILE.py:Net, my_module:Net, hf:FOLDER, timm:NAME, torchvision:NAME, or a built-in name "
            "(rayfed list models). Set constructor arguments with --set model.ARG=VALUE, weights with --set "
            "model.state=FILE.",
            rich_help_panel=DATA_PANEL,
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="DATA",
            help="Data: image folder (one subfolder per class, or a label table), Hugging Face folder, Parquet or CSV "
            "file, or a built-in name (rayfed list datasets).",
            rich_help_panel=DATA_PANEL,
        ),
    ] = None,
    size: Annotated[
        int | None,
        typer.Option(
            metavar="INT",
            min=1,
            help="Height and width to which images are resized. Default: original size. Unit: pixels.",
            rich_help_panel=DATA_PANEL,
        ),
    ] = None,
    label: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN", help="Column of a table with the class labels. Default: none.", rich_help_panel=DATA_PANEL
        ),
    ] = None,
    target: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COLUMN",
            help="Column of a table with numbers to predict (regression), instead of --label. Repeatable.",
            rich_help_panel=DATA_PANEL,
        ),
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN",
            help="Column of a table that has the texts. Default: a column named text or similar.",
            rich_help_panel=DATA_PANEL,
        ),
    ] = None,
    loss: Annotated[
        str | None,
        typer.Option(
            metavar="YAML",
            help="Loss: built-in name, FILE.py:fn, or {name: cross_entropy, label_smoothing: 0.1}. Default: "
            "cross_entropy, or the loss of --run.",
            rich_help_panel=DATA_PANEL,
        ),
    ] = None,
    run: Annotated[
        str | None,
        typer.Option(
            "--run",
            metavar="RUN",
            help="Run folder whose trained weights are attacked in addition. Default model and data: those of the run.",
            rich_help_panel=DATA_PANEL,
        ),
    ] = None,
    defence: Annotated[
        list[str] | None,
        typer.Option(
            metavar="YAML",
            help="Defence to attack: name, FILE.py:Class, {name: gaussian, sigma: 0.01}, or a list to chain "
            "several. Repeatable. Default: nine common defences.",
            rich_help_panel=ATTACK_PANEL,
        ),
    ] = None,
    batch: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Batch sizes, comma-separated. Default: 1,4,16, or fewer if data are small.",
            rich_help_panel=ATTACK_PANEL,
        ),
    ] = None,
    images: Annotated[
        int,
        typer.Option(
            metavar="INT",
            min=1,
            help="Number of samples to attack per batch size, rounded up to full batches.",
            rich_help_panel=ATTACK_PANEL,
        ),
    ] = 4,
    minutes: Annotated[
        float,
        typer.Option(
            metavar="FLOAT",
            min=0,
            help="Time limit of the audit, in minutes. Searches get longer until it is reached. Attacks that were not "
            "run are reported as not measured.",
            rich_help_panel=ATTACK_PANEL,
        ),
    ] = 10,
    iterations: Annotated[
        int | None,
        typer.Option(
            metavar="INT",
            min=1,
            help="Evaluations of the objective per search, without a time limit. Default: as many as fit --minutes.",
            rich_help_panel=ATTACK_PANEL,
        ),
    ] = None,
    threshold: Annotated[
        float | None,
        typer.Option(
            metavar="FLOAT",
            help="Similarity that counts as a leak: PSNR in dB, or a share for texts and tables. Default: 15, or 0.9.",
            rich_help_panel=ATTACK_PANEL,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="INT", min=0, help="Random seed.", rich_help_panel=ATTACK_PANEL)] = 0,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PATH=VALUE", help=SET_HELP, rich_help_panel=ATTACK_PANEL),
    ] = None,
    fail_above: FailAbove = None,
    allow_unmeasured: AllowUnmeasured = False,
    json: Json = None,
    junit: Junit = None,
    baseline: Baseline = None,
    out: OutInRuns = None,
    executor: Executor = ExecutorName.RAY,
    address: Address = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Measure how much one gradient of your model leaks about the training samples.

    Attacks are run with and without defences. No scenario is needed.

    Examples:

        rayfed audit --model net.py:Net --data my_images/ --batch 8
        rayfed audit --model lenet --data digits --defence '{name: gaussian, sigma: 0.01}'
        rayfed audit --model net.py:Net --data my_images/ --fail-above 15
    """
    began = monotonic()  # before the import of PyTorch, which takes seconds
    with errors_for_people(debug), in_options([model, loss, *(defence or [])]):
        gate = Gate(fail_above, allow_unmeasured, json, junit, baseline)
        say = (lambda line: None) if quiet else partial(print, flush=True)
        with gate.undecided(say):
            from rayfed import registry

            registry.search(str(Path.cwd()))
            _check_given(model, data, run, bool(target), loss is not None)
            from rayfed.audits.options import AuditOptions, Trained
            from rayfed.audits.plan import UNDEFENDED
            from rayfed.audits.run import AuditBudget, run_audit
            from rayfed.data.section import UserData
            from rayfed.report.gate import GatedRun
            from rayfed.runs.executors import execution
            from rayfed.simulation.rounds.attacks import Deadline

            trained = Trained.from_run(run) if run else None
            options = AuditOptions(
                loss=yaml_option("--loss", loss),
                batches=_batches(batch) if batch else None,
                images=images,
                iterations=iterations,
                threshold=threshold,
                seed=seed,
                executor=executor,
                address=address,
            )
            given = None if data is None else UserData(data, size, label, target, text)
            plan = options.plan(model, given, _defences(defence) if defence else None, trained)
            bounds = gate.bounds(plan.modality)
            audited = run_audit(
                plan,
                AuditBudget(Deadline(began + 60 * minutes), options.iterations),
                execution(options.executor, options.address),
                partial(show_progress, quiet, executor, "attack", brief=True),
                trained=trained,
                changes=[*gate.changes(plan.modality), *(changes or [])],
                out=out,
                shrink=batch is None,
            )
            arms = list(plan.defences) if defence and plan.defences else [UNDEFENDED]
            if not any(one.applies for one in audited):
                print("NOT MEASURED: no attack applies, so this audit says nothing about the leakage of the gradient")
        gate.close([GatedRun(one.folder, one.weights, arms) for one in audited], bounds, say)


def _check_given(model: str | None, data: str | None, run: str | None, target: bool, loss: bool) -> None:
    """Raise `UserError` for missing options and files, before the slow import of PyTorch."""
    from rayfed.data.sets import check_given
    from rayfed.runs.scenario_loading import to_dotted_path
    from rayfed.store.folder import RunFolder

    if run is not None:
        RunFolder.open(run)
    elif model is None:
        raise UserError("--model is missing: give the model to audit, or a run with --run")
    elif data is None:
        raise UserError("--data is missing: give a file, a folder or a data set, or a run with --run")
    if data is not None:
        check_given(data)
        if target and not loss and run is None and Path(data).is_file():
            raise UserError(
                "--target: the default loss, cross_entropy, needs classes. Add --loss mean_squared_error, or --loss "
                "binary_cross_entropy if the numbers are 0 or 1"
            )
    if model is not None:
        to_dotted_path(model)


def _defences(texts: Sequence[str]) -> Defences:
    """Return the defence pipelines of the --defence options by name. Raises `UserError` for an invalid one."""
    from rayfed.audits.options import parse_pipelines

    found: Defences = {}
    for text in texts:
        try:
            found |= parse_pipelines([yaml_option("defence", text)])
        except UserError as error:
            raise UserError(f"--{error}") from error
    return found


def _batches(text: str) -> list[int]:
    try:
        sizes = sorted({int(part) for part in text.split(",")})
    except ValueError:
        sizes = [0]
    if sizes[0] < 1:
        raise UserError(f"--batch: found '{text}'; give whole numbers from 1, such as 1,4,16")
    return sizes
