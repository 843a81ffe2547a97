"""The command `audit`: look at a model, say which attacks apply, play them within a budget, and say what they found."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml

from rayfed.cli.common import (
    Address,
    Debug,
    Executor,
    ExecutorName,
    Out,
    Quiet,
    Set,
    dotted,
    errors_for_people,
    execution,
    search_where,
    watched,
)
from rayfed.errors import ClientError, UserError

if TYPE_CHECKING:
    from rayfed.analysis.audit import Plan
    from rayfed.engine.auditing import Trial
    from rayfed.scenario import Scenario

commands = typer.Typer()
_BATCHES = "1,4,16"
"""Batch sizes where none are given."""


@commands.command()
def audit(
    model: Annotated[
        str | None, typer.Option(help="A name of `rayfed list models`, or your own `my_module:Net` or `FILE.py:Net`.")
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
            "several, one after the other. May be repeated; nine common ones when not given.",
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
    minutes: Annotated[float, typer.Option(min=0, help="Minutes that the searches may take in all, on one core.")] = 10,
    iterations: Annotated[
        int | None, typer.Option(min=1, help="Evaluations of each search's objective, in place of --minutes.")
    ] = None,
    threshold: Annotated[
        float | None, typer.Option(help="From where on a reconstruction may be a leak; 15 dB, or 0.9 of a row or text.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="All randomness follows from it.")] = 0,
    changes: Set = None,
    out: Out = None,
    executor: Executor = ExecutorName.RAY,
    address: Address = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Measure, without a scenario, how much one gradient of your model leaks, bare and behind defences."""
    with errors_for_people(debug):
        from rayfed import registry
        from rayfed.analysis.audit import DEFENCES, Plan

        registry.search(str(Path.cwd()))
        trained = Trained.of(run) if run else None
        plan = Plan(
            model=_model(model, trained),
            data=_data(data, size, label, target, trained),
            loss=_loss(loss, trained),
            batches=_batches(batch or _BATCHES),
            samples=images,
            seed=seed,
            defences=_defences(defence) if defence else DEFENCES,
            threshold=threshold,
        )
        budget = 60 * minutes / (1 if trained is None else 2)
        say = (lambda line: None) if quiet else partial(print, flush=True)
        rehearsed = _rehearsed(plan, changes or [], iterations, budget, say, shrink=batch is None)
        if rehearsed is None:
            print("NOT MEASURED: no attack applies, so this says nothing about what the gradient gives away")
            return
        loaded, seconds = rehearsed
        attacks: list[tuple[str, str | None, str | None]] = [("untrained weights", None, None)]
        attacks += [(f"weights of {run}", run, trained.arm)] if trained else []
        from rayfed.engine import runs

        for weights, source, arm in attacks:
            with watched(quiet, executor, "attack", brief=True) as view:
                view.seconds = seconds
                folder = runs.attack(loaded, source, out, execution(executor, address), view, arm)
                view.audited(weights, f"{folder.url}/report.html")


@dataclass(frozen=True)
class Trained:
    """A run whose weights are audited: those of its first arm, the one that others are compared with."""

    arm: str
    model: dict[str, Any]
    data: dict[str, Any]
    loss: dict[str, Any]

    @classmethod
    def of(cls, run: str) -> Trained:
        """Read a run's scenario; raises `UserError` where there is none."""
        from rayfed import scenario
        from rayfed.scenario import resolve
        from rayfed.store.folder import SCENARIO, RunFolder

        search_where(run)
        folder = RunFolder.open(run)
        loaded = scenario.parse(folder.read_text(SCENARIO), f"{folder.url}/{SCENARIO}")
        name, arm = next(iter(resolve(loaded).items()))
        parts = (part.model_dump(mode="json") for part in (arm.model, loaded.data, arm.loss))
        return cls(name, *parts)


def _rehearsed(
    plan: Plan,
    changes: list[str],
    iterations: int | None,
    seconds: float,
    say: Callable[[str], None],
    shrink: bool,
) -> tuple[Scenario, dict[str, float]] | None:
    """Look at the model, try all attacks, and return the audit's scenario, and the seconds of a call of each attack.

    None where no attack applies. `seconds` is the budget of the searches unless `iterations` are given; with `shrink`
    batches are no larger than what clients have, and those that the model does not take are left out.
    """
    from rayfed.analysis.audit import FEWEST, title
    from rayfed.engine.auditing import Rehearsal, chosen_iterations, estimate, fewest, of_calls, untimed
    from rayfed.engine.inputs import prepare
    from rayfed.models.describe import described

    loaded = _scenario(plan, {title(*search): 1 for search in plan.searches}, changes)
    data = loaded.data.load()
    largest = max(len(data.train_labels) // loaded.federation.clients, 1)
    if not shrink and largest < max(plan.batches):
        raise UserError(
            f"--batch {max(plan.batches)}: each of {plan.samples} clients (--images) has no more than {largest} of the "
            f"{len(data.train_labels)} samples: take smaller batches, fewer images, or more data"
        )
    if largest < max(plan.batches):
        plan = replace(plan, batches=sorted({min(size, largest) for size in plan.batches}))
        fitting = ",".join(map(str, plan.batches))
        say(f"--batch {fitting} in place of {_BATCHES}: each of {plan.samples} clients (--images) has no more samples")
        loaded = _scenario(plan, {title(*search): 1 for search in plan.searches}, changes)
    if not loaded.attacks:
        say(f"attacks: none of the audit's works on {plan.modality}")
        return None
    inputs = prepare(loaded, data=data)
    if refused := Rehearsal(inputs).refused():
        plan = _able(plan, refused, say, shrink)
        loaded = _scenario(plan, {title(*search): 1 for search in plan.searches}, changes)
        inputs = prepare(loaded, data=data)
    say(f"model {loaded.model.name}, loss {loaded.loss.name}:")
    for line in described(inputs.accounts[0].arm.model, inputs.data.sample):
        say(f"  {line}")
    say("attacks, tried on the undefended model:")
    rehearsal, arms = Rehearsal(inputs), len(loaded.played)
    trials = list(rehearsal.trials())
    for line in _applying(trials):
        say(f"  {line}")
    if all(trial.obstacle for trial in trials):
        return None
    chosen, unknown = chosen_iterations(plan, trials, arms, seconds), untimed(plan, trials)
    if iterations is not None:
        chosen, unknown = {title(*search): fewest(search[0], iterations) for search in plan.searches}, []
    if chosen:
        say(f"iterations: {', '.join(f'{name} {count:,}' for name, count in chosen.items())}")
    if unknown:
        say(f"{FEWEST} evaluations, not timed: {', '.join(unknown)}")
    took = sum(rehearsal.observing().values()) + estimate(plan, trials, arms, chosen)
    say(f"estimate: {took / 60:.1f} min on one core, for each set of weights{_over(took, seconds, iterations)}")
    return _scenario(plan, chosen, changes), of_calls(trials, chosen)


def _able(plan: Plan, refused: Mapping[int, ClientError], say: Callable[[str], None], shrink: bool) -> Plan:
    """Return the plan without batch sizes that the model does not take; raises `UserError` where they were asked for.

    Where it takes none, the first error is raised.
    """
    able, sizes = [size for size in plan.batches if size not in refused], ",".join(map(str, refused))
    error = next(iter(refused.values()))
    if not able:
        raise error
    said = str(error).partition("\n")[0]
    if not shrink:
        raise UserError(f"leave {sizes} out of --batch, for the model does not take batches of so many: {said}")
    say(f"--batch {','.join(map(str, able))}: without {sizes}, for the model does not take batches of so many: {said}")
    return replace(plan, batches=able)


def _scenario(plan: Plan, iterations: dict[str, int], changes: list[str]) -> Scenario:
    """Return the audit's scenario; its problems name fields and no lines, for nobody wrote a file."""
    from rayfed import scenario

    document = scenario.with_changes(yaml.safe_load(plan.scenario_text(iterations)), changes)
    scenario.find_inputs(document, [Path.cwd()])
    return scenario.check(document, "the audit, whose arms are --defence")


def _over(took: float, budget: float, iterations: int | None) -> str:
    """Return why an audit takes longer than its budget, where it does; empty elsewhere."""
    from rayfed.analysis.audit import FEWEST

    if iterations is not None or took <= 1.5 * budget:
        return ""
    return f": more than the {budget / 60:g} min asked for, for no search takes fewer than {FEWEST} evaluations"


def _applying(trials: Sequence[Trial]) -> list[str]:
    """Return a line for each attack: where it applies, and why not elsewhere."""
    lines = []
    for name in dict.fromkeys(trial.title.partition(" ")[0] for trial in trials):
        own = [trial for trial in trials if trial.title.startswith(f"{name} ")]
        able = [trial.title.removeprefix(f"{name} ") for trial in own if not trial.obstacle]
        reasons = dict.fromkeys(trial.obstacle for trial in own if trial.obstacle)
        applies = "applies" if len(able) == len(own) else f"applies to {'; '.join(able)}" if able else "does not apply"
        lines.append(f"{name}: {applies}" + "".join(f" ({reason})" for reason in reasons))
    return lines


def _model(model: str | None, trained: Trained | None) -> dict[str, Any]:
    if model is not None:
        return {"name": dotted(model)}
    if trained is None:
        raise UserError("--model: name the model to audit, or a run by --run")
    return trained.model


def _loss(text: str | None, trained: Trained | None) -> dict[str, Any]:
    """Return the section `loss` of what the command was given; raises `UserError` for what is none."""
    from rayfed.scenario.components import named

    if text is None:
        return {"name": "cross_entropy"} if trained is None else trained.loss
    try:
        value = named(yaml.safe_load(text))
    except yaml.YAMLError as error:
        raise UserError(f"--loss: '{text}' is no YAML: {error}") from error
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise UserError(f"--loss: found '{text}'; give a name, or {{name: NAME, FIELD: VALUE}}")
    return {**value, "name": dotted(value["name"])}


def _data(
    data: str | None, size: int | None, label: str | None, targets: Sequence[str] | None, trained: Trained | None
) -> dict[str, Any]:
    from rayfed.analysis.audit import data_section

    if label is not None and targets:
        raise UserError("--label names the column of the classes, --target columns of numbers: give one of them")
    if data is not None:
        return data_section(data, size, label, targets)
    if trained is None:
        raise UserError("--data: name a file, a folder or a data set, or a run by --run")
    return trained.data


def _defences(texts: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """Return pipelines by name, from what the command was given; raises `UserError` for what is none."""
    from rayfed.analysis.audit import called
    from rayfed.scenario.components import named
    from rayfed.scenario.problems import component_problems

    found = {}
    for text in texts:
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise UserError(f"--defence: '{text}' is no YAML: {error}") from error
        pipeline = [named(one) for one in (value if isinstance(value, list) else [value])]
        if not all(isinstance(one, dict) and isinstance(one.get("name"), str) for one in pipeline):
            raise UserError(f"--defence: found '{text}'; give a name, {{name: NAME, FIELD: VALUE}}, or a list of these")
        pipeline = [{**one, "name": dotted(one["name"])} for one in pipeline]
        for problem in component_problems({"defences": pipeline}):
            raise UserError(f"--defence '{text}': {'.'.join(map(str, problem.path[2:]))}: {problem.message}")
        found[called(pipeline)] = pipeline
    return {name: pipeline for name, pipeline in found.items() if pipeline}


def _batches(text: str) -> list[int]:
    try:
        sizes = sorted({int(part) for part in text.split(",")})
    except ValueError:
        sizes = [0]
    if sizes[0] < 1:
        raise UserError(f"--batch: found '{text}'; give whole numbers from 1, such as 1,4,16")
    return sizes
