"""The command `audit`: look at a model, say which attacks apply, play them within a budget, and say what they found."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, inf
from pathlib import Path
from time import monotonic, process_time
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
    loss_section,
    search_where,
    watched,
)
from rayfed.cli.gate import AllowUnmeasured, Baseline, FailAbove, Gate, Json, Junit
from rayfed.errors import ClientError, UserError

if TYPE_CHECKING:
    from rayfed.analysis.audit import Plan
    from rayfed.engine.attacking import Allowance
    from rayfed.engine.auditing import Fitted, Trial, Unit
    from rayfed.report.terminal_run import RunView
    from rayfed.scenario import Scenario

commands = typer.Typer()
_BATCHES = "1,4,16"
"""Batch sizes where none are given."""
_SHARE = 0.75
"""Share of the time that is planned: some searches take longer behind a defence than on the undefended gradient."""


@commands.command()
def audit(
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
    minutes: Annotated[
        float,
        typer.Option(
            min=0, help="Minutes that trials and attacks may take in all; what does not fit is named as not measured."
        ),
    ] = 10,
    iterations: Annotated[
        int | None, typer.Option(min=1, help="Evaluations of each search's objective, in place of --minutes.")
    ] = None,
    threshold: Annotated[
        float | None, typer.Option(help="From where on a reconstruction may be a leak; 15 dB, or 0.9 of a row or text.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="All randomness follows from it.")] = 0,
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
    with errors_for_people(debug):
        from rayfed import registry
        from rayfed.analysis.audit import DEFENCES, UNDEFENDED, Plan
        from rayfed.report.gate import Gated

        registry.search(str(Path.cwd()))
        trained = Trained.of(run) if run else None
        plan = Plan(
            model=_model(model, trained),
            data=_data(data, size, label, target, text, trained),
            loss=_loss(loss, trained),
            batches=_batches(batch or _BATCHES),
            samples=images,
            seed=seed,
            defences=_defences(defence) if defence else DEFENCES,
            threshold=threshold,
        )
        gate = Gate(fail_above, allow_unmeasured, json, junit, baseline)
        bounds, changes = gate.bounds(plan.modality), [*gate.changes(plan.modality), *(changes or [])]
        say = (lambda line: None) if quiet else partial(print, flush=True)
        budget = Budget(monotonic(), 60 * minutes, 1 if trained is None else 2, iterations)
        with watched(quiet, executor, "attack", brief=True) as view:
            rehearsed = _rehearsed(plan, changes, budget, view, shrink=batch is None)
        if rehearsed is None:
            print("NOT MEASURED: no attack applies, so this says nothing about what the gradient gives away")
            gate.close([], bounds, say)
            return
        loaded, allowance = rehearsed
        attacks: list[tuple[str, str | None, str | None]] = [("untrained weights", None, None)]
        attacks += [(f"weights of {run}", run, trained.arm)] if trained else []
        from rayfed.engine import runs

        gated, arms = [], list(plan.defences) if defence and plan.defences else [UNDEFENDED]
        for weights, source, arm in attacks:
            with watched(quiet, executor, "attack", brief=True) as view:
                view.seconds = allowance.calls
                folder = runs.attack(loaded, source, out, execution(executor, address), view, arm, allowance)
                view.audited(weights, f"{folder.url}/report.html")
            gated.append(Gated(folder, weights, arms))
        gate.close(gated, bounds, say)


@dataclass(frozen=True)
class Budget:
    """Time of an audit, or what stands in its place."""

    began: float
    """When it began, by the clock of `monotonic`."""
    seconds: float
    """Seconds that it may take in all, the trials with it."""
    sets: int = 1
    """Sets of weights that are attacked."""
    iterations: int | None = None
    """Evaluations of each search, in place of a time."""

    @property
    def trials_end(self) -> float:
        """Until when trials go on: no longer than half the time."""
        return inf if self.iterations is not None else self.began + self.seconds / 2

    @property
    def left(self) -> float:
        """Seconds that are left for each set of weights."""
        return inf if self.iterations is not None else (self.began + self.seconds - monotonic()) / self.sets


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
    plan: Plan, changes: list[str], budget: Budget, view: RunView, shrink: bool
) -> tuple[Scenario, Allowance] | None:
    """Look at the model, try all attacks, and return the audit's scenario, and what of it fits into the time.

    None where no attack applies; raises `UserError` where there is no time for any that does. With `shrink` batches are
    no larger than what clients have, and those that the model does not take are left out.
    """
    from rayfed.analysis.audit import FEWEST, UNDEFENDED, title
    from rayfed.engine.attacking import Allowance
    from rayfed.engine.auditing import Rehearsal, fit, of_calls, untimed
    from rayfed.engine.inputs import prepare
    from rayfed.models.describe import described

    say = view.say
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
    rehearsal, arms = Rehearsal(inputs), list(loaded.played)
    clock, work = monotonic(), process_time()
    trials = list(rehearsal.trials(budget.trials_end, view.trying))
    view.tried()
    for line in _applying(trials):
        say(f"  {line}")
    if all(trial.obstacle and trial.tried for trial in trials):
        return None
    pace = rehearsal.pace()
    slower = max((monotonic() - clock) / max(process_time() - work, 1e-9), 1.0)
    left = budget.left
    forms = {account.name: repr(account.arm.model) for account in inputs.accounts}
    alike = {arm: forms[arm] == forms[UNDEFENDED] for arm in arms}
    fitted = fit(plan, trials, pace, alike, _SHARE * left / slower, budget.iterations)
    if not fitted.says_anything:
        raise UserError(_too_short(budget, fitted, slower))
    if searches := {name: count for name, count in fitted.iterations.items() if _plays(fitted, name)}:
        say(f"iterations: {', '.join(f'{name} {count:,}' for name, count in searches.items())}")
    if unknown := [name for name in untimed(plan, trials) if _plays(fitted, name)]:
        say(f"{FEWEST} evaluations, not timed: {', '.join(unknown)}")
    busy = f" (other work makes it {slower:.1f} times as long)" if slower > 1.2 else ""
    say(f"estimate: {slower * fitted.seconds / 60:.1f} min on one core{busy}, for each set of weights")
    short = [unit for unit in fitted.left_out if not unit.obstacle]
    for line in _not_measured(short, arms, slower):
        say(line)
    if short:
        minutes = _all_of_it(budget, fitted.whole, slower)
        say(f"all of it, with {FEWEST} evaluations of each search, takes about --minutes {minutes}")
    calls = {name: slower * took for name, took in of_calls(trials, fitted.iterations).items()}
    left_out = {(unit.arm, name): unit.unplayed(slower) for unit in fitted.left_out for name in unit.titles}
    allowance = Allowance(left, slower * fitted.scoring, calls, left_out)
    return _scenario(plan, fitted.iterations, changes), allowance


def _plays(fitted: Fitted, name: str) -> bool:
    from rayfed.analysis.audit import title

    return any(title(unit.method, unit.batch) == name and unit.applies for unit in fitted.played)


def _not_measured(units: Sequence[Unit], arms: Sequence[str], slower: float) -> list[str]:
    """Return a line for each attack and batch size for which there is no time on some arms."""
    from rayfed.analysis.formats import duration

    cells: dict[tuple[str, int], list[Unit]] = {}
    for unit in units:
        cells.setdefault((unit.method.name, unit.batch), []).append(unit)
    lines = []
    for (name, batch), own in cells.items():
        where = "all arms" if len(own) == len(arms) else ", ".join(unit.arm for unit in own)
        known = [unit.seconds for unit in own if unit.seconds is not None]
        needs = f"which takes about {duration(slower * sum(known))}" if len(known) == len(own) else "not even tried"
        lines.append(f"NOT MEASURED for want of time: {name} at batch {batch} on {where}, {needs}")
    return lines


def _all_of_it(budget: Budget, seconds: float, slower: float) -> str:
    """Return the minutes of the whole command for so many seconds of attacks, rounded up."""
    spent = budget.seconds - budget.left * budget.sets
    return f"{ceil(10 * max(spent + slower * seconds / _SHARE * budget.sets, 2 * spent) / 60) / 10:g}"


def _too_short(budget: Budget, fitted: Fitted, slower: float) -> str:
    least, whole = (_all_of_it(budget, seconds, slower) for seconds in (fitted.smallest, fitted.whole))
    return (
        f"--minutes {budget.seconds / 60:g} is too short to measure anything: about --minutes {least} is enough for "
        f"one attack on one arm at one batch size, {whole} for all that was tried, with few "
        f"evaluations of each search; smaller --batch and fewer --images or --defence take less"
    )


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


def _scenario(plan: Plan, iterations: Mapping[str, int], changes: list[str]) -> Scenario:
    """Return the audit's scenario; its problems name fields and no lines, for nobody wrote a file."""
    from rayfed import scenario

    document = scenario.with_changes(yaml.safe_load(plan.scenario_text(iterations)), changes)
    scenario.find_inputs(document, [Path.cwd()])
    return scenario.check(document, "the audit, whose arms are --defence")


def _applying(trials: Sequence[Trial]) -> list[str]:
    """Return a line for each attack: where it applies, and why not elsewhere."""
    lines = []
    for name in dict.fromkeys(trial.title.partition(" ")[0] for trial in trials):
        own = [trial for trial in trials if trial.title.startswith(f"{name} ")]
        own = [trial for trial in own if trial.tried]
        if not own:
            lines.append(f"{name}: not tried, for want of time")
            continue
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
    return loss_section(text) if text is not None or trained is None else trained.loss


def _data(
    data: str | None,
    size: int | None,
    label: str | None,
    targets: Sequence[str] | None,
    text: str | None,
    trained: Trained | None,
) -> dict[str, Any]:
    from rayfed.analysis.audit import data_section

    if label is not None and targets:
        raise UserError("--label names the column of the classes, --target columns of numbers: give one of them")
    if data is not None:
        return data_section(data, size, label, targets, text)
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
