"""The command `audit`: print which attacks apply to a model, play them within a budget, and print their results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rayfed.cli.common import (
    Address,
    Debug,
    Executor,
    ExecutorName,
    Out,
    Quiet,
    Set,
    errors_for_people,
    given_again,
    watched,
    yaml_option,
)
from rayfed.cli.gate import AllowUnmeasured, Baseline, FailAbove, Gate, Json, Junit
from rayfed.cli.options import in_options
from rayfed.documents import yaml_flow
from rayfed.errors import UserError

if TYPE_CHECKING:
    from rayfed.analysis.audit import Defences

commands = typer.Typer()


@commands.command()
def audit(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Option(
            help="A name of `rayfed list models`, `hf:FOLDER`, `timm:NAME`, `torchvision:NAME`, or your own "
            "`my_module:Net` or `FILE.py:Net`; --set model.state=FILE and model.train.layers=[head] say the rest."
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="A folder of images, with a folder for each class, a table of names and classes, or files of "
            "Hugging Face; a Parquet or CSV file; or a data set's name."
        ),
    ] = None,
    label: Annotated[str | None, typer.Option(help="Column of the classes, where the data have a table.")] = None,
    target: Annotated[
        list[str] | None,
        typer.Option(help="Column of numbers that the model predicts, in place of --label. May be repeated."),
    ] = None,
    text: Annotated[
        str | None, typer.Option(help="Column of the texts, where a table has them under a name of its own.")
    ] = None,
    loss: Annotated[
        str | None,
        typer.Option(
            metavar="YAML",
            help="A loss of `rayfed list losses`, your own `my_module:fn` or `FILE.py:fn` of outputs and targets, or "
            "`{name: cross_entropy, label_smoothing: 0.1}`.  [default: the run's, or cross_entropy]",
        ),
    ] = None,
    defence: Annotated[
        list[str] | None,
        typer.Option(
            metavar="YAML",
            help="A defence, `my_module:Mine`, `FILE.py:Mine` or `{name: gaussian, sigma: 0.01}`, or a list of "
            "several, one after the other. May be repeated; when not given, those of nine usual ones that there is "
            "time for.",
        ),
    ] = None,
    run: Annotated[
        str | None, typer.Option("--run", help="Attack the weights of this run, too; its model and data by default.")
    ] = None,
    batch: Annotated[
        str | None,
        typer.Option(
            help="Batch sizes behind the gradient, comma-separated; 1,4,16 when not given, or what small data allow."
        ),
    ] = None,
    images: Annotated[
        int, typer.Option(min=1, help="Samples attacked for each batch size, rounded up to batches.")
    ] = 4,
    size: Annotated[int | None, typer.Option(min=1, help="Resize images to this height and width.")] = None,
    minutes: Annotated[
        float,
        typer.Option(
            min=0, help="Minutes of the whole command, up to a tenth more; what does not fit is named as not measured."
        ),
    ] = 10,
    iterations: Annotated[
        int | None, typer.Option(min=1, help="Evaluations of each search's objective, in place of --minutes.")
    ] = None,
    threshold: Annotated[
        float | None, typer.Option(help="From where on a reconstruction may be a leak; 15 dB, or 0.9 of a row or text.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Random seed.")] = 0,
    fail_above: FailAbove = None,
    allow_unmeasured: AllowUnmeasured = False,
    json: Json = None,
    junit: Junit = None,
    baseline: Baseline = None,
    changes: Set = None,
    out: Out = None,
    executor: Executor = ExecutorName.RAY,
    address: Address = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Measure, without a scenario, how much one gradient of your model leaks, bare and behind defences."""
    began = monotonic()  # before PyTorch is imported, which takes a slow machine's user long
    with errors_for_people(debug), in_options([model, loss, *(defence or [])]):
        gate = Gate(fail_above, allow_unmeasured, json, junit, baseline)
        say = (lambda line: None) if quiet else partial(print, flush=True)
        with gate.undecided(say):
            from rayfed import registry

            registry.search(str(Path.cwd()))
            _check_given(model, data, run, bool(target), loss is not None)
            from rayfed.analysis.audit import DEFENCES, UNDEFENDED, Plan
            from rayfed.engine.audit import Trained, data_of, loss_of, model_of
            from rayfed.engine.audit import audit as played
            from rayfed.engine.auditing import BATCHES, Budget
            from rayfed.engine.executions import execution
            from rayfed.report.gate import Gated

            trained = Trained.of(run) if run else None
            plan = Plan(
                model=model_of(model, trained),
                data=data_of(data, size, label, target, text, trained),
                loss=loss_of(yaml_option("--loss", loss), trained),
                batches=_batches(batch) if batch else BATCHES,
                samples=images,
                seed=seed,
                defences=_defences(defence) if defence else DEFENCES,
                threshold=threshold,
            )
            bounds = gate.bounds(plan.modality)
            audited = played(
                plan,
                Budget(began, 60 * minutes, 1 if trained is None else 2, iterations),
                execution(executor, address),
                partial(watched, quiet, executor, "attack", brief=True),
                run=run,
                arm=trained.arm if trained else None,
                changes=[*gate.changes(plan.modality), *(changes or [])],
                out=out,
                shrink=batch is None,
                arms=list(plan.defences) if defence and plan.defences else [UNDEFENDED],
            )
            if not audited:
                print("NOT MEASURED: no attack applies, so this says nothing about what the gradient gives away")
            elif short := audited[0].short:
                more = f":\n  {_smallest(context, short.options)}" if short.options else ""
                print(f"Nothing was played: {short.message}{more}")
        gate.close([Gated(one.folder, one.weights, one.arms) for one in audited], bounds, say)


def _smallest(context: typer.Context, options: Mapping[str, Any]) -> str:
    """Return the user's command with these options changed; a defence that was typed is kept as it was."""
    changed = dict(options)
    if "defence" in changed:
        typed = context.params["defence"]
        changed["defence"] = typed[:1] if typed else [_typed_as(changed["defence"])]
    return given_again(context, changed)


def _typed_as(pipeline: Sequence[Any]) -> str:
    return yaml_flow(pipeline[0] if len(pipeline) == 1 else pipeline)


def _check_given(model: str | None, data: str | None, run: str | None, target: bool, loss: bool) -> None:
    """Raise `UserError` for what is missing, before PyTorch is imported, which takes seconds."""
    from rayfed.data.sets import check_given
    from rayfed.engine.finding import dotted
    from rayfed.store.folder import RunFolder

    if run is not None:
        RunFolder.open(run)
    elif model is None:
        raise UserError("--model: name the model to audit, or a run by --run")
    elif data is None:
        raise UserError("--data: name a file, a folder or a data set, or a run by --run")
    if data is not None:
        check_given(data)
        if target and not loss and run is None and Path(data).is_file():
            raise UserError(
                "--target: without --loss the loss is cross_entropy, which takes classes: add --loss "
                "mean_squared_error, or --loss binary_cross_entropy where the numbers are 0 or 1"
            )
    if model is not None:
        dotted(model)


def _defences(texts: Sequence[str]) -> Defences:
    """Return pipelines by name, from what the command was given; raises `UserError` for what is none."""
    from rayfed.engine.audit import pipelines

    found: Defences = {}
    for text in texts:
        try:
            found |= pipelines([yaml_option("defence", text)])
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
