"""Audit of a model: which attacks apply, which fit into the time, and what they find.

For users who have a model and data and no scenario yet; `rayfed audit` and `rayfed.audit` are this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from math import ceil, inf
from pathlib import Path
from time import monotonic, process_time
from typing import Any

import yaml

from rayfed import scenario as scenarios
from rayfed.analysis.audit import DEFENCES, FEWEST, TWINS, UNDEFENDED, Criterion, Defences, Plan, called, title
from rayfed.analysis.formats import duration
from rayfed.data.section import data_section
from rayfed.engine import runs
from rayfed.engine.attacking import Allowance, Spare
from rayfed.engine.executor import Execution
from rayfed.engine.finding import dotted, loss_section, search_where
from rayfed.engine.fitting import (
    SHARE,
    Fitted,
    Unit,
    answerable,
    fit,
    of_calls,
    of_one_sample,
    too_slow_to_compare,
    untimed,
)
from rayfed.engine.inputs import Inputs, prepare
from rayfed.engine.progress import AuditProgress, Progress
from rayfed.engine.rehearsing import Pace, Rehearsal, Trial
from rayfed.errors import ClientError, UserError
from rayfed.metrics.known import NOUNS
from rayfed.models.describe import described
from rayfed.scenario import Scenario, resolve
from rayfed.scenario.components import named
from rayfed.scenario.problems import Problem, component_problems
from rayfed.store.folder import SCENARIO, RunFolder

BATCHES = 1, 4, 16
"""Batch sizes where none are given."""
_MARGIN = 1.25
"""Times as long as estimated is what minutes that are said to be enough have room for."""
Watch = Callable[[], AbstractContextManager[AuditProgress]]
"""Opens what shows one stage of an audit: the trials, or the attacks on one set of weights."""


class TooShort(UserError):
    """An audit's time that suffices for no attack."""

    def __init__(self, message: str, options: Mapping[str, Any]) -> None:
        """Keep the `options` (name -> value) of the smallest audit, those that differ; empty where it is not known."""
        super().__init__(message)
        self.options = options


@dataclass(frozen=True)
class Audited:
    """One set of weights that was audited."""

    folder: RunFolder
    weights: str
    """Whose they are, in words."""
    arms: Sequence[str]
    """The arms that were asked about: those with the user's defences, or else the undefended one."""


def audit(
    plan: Plan,
    budget: Budget,
    execution: Execution,
    watch: Watch,
    *,
    run: str | None = None,
    arm: str | None = None,
    changes: Sequence[str] = (),
    out: str | None = None,
    shrink: bool = False,
    arms: Sequence[str] = (UNDEFENDED,),
) -> list[Audited]:
    """Play all applicable attacks within the budget, and return a folder for each set of weights, possibly none.

    Weights are the untrained ones and, where a `run` is named, those that its `arm` has learnt. With `shrink` batches
    are no larger than what clients have. What attacks need, such as Ray, starts before the trials, for it may fail.
    Raises `UserError` for the user's mistakes, too little time among them.
    """
    audited: list[Audited] = []
    with ExitStack() as started:
        with watch() as progress:
            start = lambda inputs: started.enter_context(execution(inputs, Progress()))  # noqa: E731
            found = rehearsed(plan, changes, budget, progress, shrink, start)
        if found is None:
            return audited
        loaded, allowance, noted = found
        attacks: list[tuple[str, str | None, str | None]] = [("untrained weights", None, None)]
        attacks += [(f"weights of {run}", run, arm)] if run else []
        for weights, source, learnt in attacks:
            with watch() as progress:
                progress.seconds, progress.noted = allowance.calls, noted
                progress.limit = allowance.seconds - allowance.scoring
                folder = runs.attack(loaded, source, out, execution, progress, learnt, allowance)
                progress.audited(weights, f"{folder.url}/report.html")
            audited.append(Audited(folder, weights, arms))
    return audited


def model_of(given: str | Mapping[str, Any] | None, trained: Trained | None) -> dict[str, Any]:
    """Return the section `model` for a name or mapping, by default the run's; raises `UserError` without either."""
    if given is not None:
        found = named(given)
        if not isinstance(found, Mapping):
            raise UserError(f"model: found a {type(given).__name__}; give a name, a class, or {{name: NAME, ...}}")
        return {**found, "name": dotted(found["name"])}
    if trained is None:
        raise UserError("--model: name the model to audit, or a run by --run")
    return trained.model


def loss_of(given: str | Mapping[str, Any] | None, trained: Trained | None) -> dict[str, Any]:
    """Return the section `loss` for a name or mapping, by default the run's; empty if the model's task sets it."""
    if given is None:
        return {} if trained is None else trained.loss
    return loss_section(given)


def data_of(
    given: str | None,
    size: int | None,
    label: str | None,
    targets: Sequence[str] | None,
    text: str | None,
    trained: Trained | None,
) -> dict[str, Any]:
    """Return the section `data` for the given samples (`rayfed.data.section`), by default the run's."""
    if label is not None and targets:
        raise UserError("--label names the column of the classes, --target columns of numbers: give one of them")
    if given is not None:
        return data_section(given, size, label, targets, text)
    if trained is None:
        raise UserError("--data: name a file, a folder or a data set, or a run by --run")
    return trained.data


def pipelines(given: Sequence[Any]) -> Defences:
    """Return defence pipelines by arm, from names, mappings with a name, or lists of these.

    Raises `UserError` for what is none.
    """
    found: Defences = {}
    if isinstance(given, str | Mapping):
        raise UserError(f"defences: found {given!r}; give a list of arms, such as [{given!r}]")
    for value in given:
        pipeline = [named(one) for one in (value if isinstance(value, list | tuple) else [value])]
        if not all(isinstance(one, Mapping) and isinstance(one.get("name"), str) for one in pipeline):
            raise UserError(
                f"defence: found '{_typed(value)}'; give a name, {{name: NAME, FIELD: VALUE}}, or a list of these"
            )
        pipeline = [{**one, "name": dotted(one["name"])} for one in pipeline]
        for problem in component_problems({"defences": pipeline}):
            raise UserError(f"defence '{_typed(value)}': {_told(problem, value)}")
        found[called(pipeline)] = pipeline
    return {name: pipeline for name, pipeline in found.items() if pipeline}


def _told(problem: Problem, value: Any) -> str:
    """Return a problem of a pipeline's field, and how a name alone is given with what it lacks."""
    field = ".".join(map(str, problem.path[2:]))
    lacks = problem.wanted or not field
    example = f", as '{{name: {value}, {field or 'FIELD'}: VALUE}}'" if lacks and isinstance(value, str) else ""
    return f"{field}{': ' * bool(field)}{problem.told}{example}"


def _typed(value: Any) -> str:
    """Return a defence as a command takes it: YAML in one line."""
    try:
        return yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10_000).partition("\n")[0]
    except yaml.YAMLError:  # of a Python value that YAML does not know
        return str(value)


@dataclass(frozen=True)
class Budget:
    """Time budget of an audit, or its replacement by a fixed number of evaluations."""

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
        """End of the trials: at most half of the time."""
        return inf if self.iterations is not None else self.began + self.seconds / 2

    @property
    def pace_end(self) -> float:
        """End of timing the defences: at most two thirds of the time."""
        return inf if self.iterations is not None else self.began + self.seconds * 2 / 3

    @property
    def left(self) -> float:
        """Seconds left for each set of weights."""
        return inf if self.iterations is not None else (self.began + self.seconds - monotonic()) / self.sets


@dataclass(frozen=True)
class Trained:
    """A run whose weights are audited: those of its first arm, its reference."""

    arm: str
    model: dict[str, Any]
    data: dict[str, Any]
    loss: dict[str, Any]

    @classmethod
    def of(cls, run: str) -> Trained:
        """Read a run's scenario; raises `UserError` if there is none."""
        search_where(run)
        folder = RunFolder.open(run)
        loaded = scenarios.parse(folder.read_text(SCENARIO), f"{folder.url}/{SCENARIO}")
        name, arm = next(iter(resolve(loaded).items()))
        parts = (part.model_dump(mode="json") for part in (arm.model, loaded.data, arm.loss))
        return cls(name, *parts)


def rehearsed(
    plan: Plan,
    changes: Sequence[str],
    budget: Budget,
    progress: AuditProgress,
    shrink: bool,
    start: Callable[[Inputs], Any] = lambda _: None,
) -> tuple[Scenario, Allowance, Sequence[str]] | None:
    """Inspect the model and try all attacks; return the audit's scenario, the part that fits into the time, and notes.

    The notes are on data and models, and are told before anything is tried. Then `start` starts what the attacks need,
    which takes none of the budget. Returns None where no attack applies;
    raises `UserError` where there is no time for any that does. With `shrink` batches are no larger than what clients
    have, and those that the model does not take are left out.
    """
    say = progress.say
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
        fitting, usual = (",".join(map(str, sizes)) for sizes in (plan.batches, BATCHES))
        say(f"--batch {fitting} in place of {usual}: each of {plan.samples} clients (--images) has no more samples")
        loaded = _scenario(plan, {title(*search): 1 for search in plan.searches}, changes)
    if not loaded.attacks:
        say(f"attacks: none of the audit's works on {plan.modality}")
        return None
    inputs = prepare(loaded, data=data)
    rehearsal = Rehearsal(inputs)
    if refused := rehearsal.refused():
        plan = _able(plan, refused, say, shrink)
        loaded = _scenario(plan, {title(*search): 1 for search in plan.searches}, changes)
        inputs = prepare(loaded, data=data)
        rehearsal = Rehearsal(inputs)
    for message in inputs.remarks:
        progress.note(message)
    say(f"model {loaded.model.title}, loss {loaded.loss.name}:")
    for line in described(inputs.accounts[0].arm.model, inputs.data.sample):
        say(f"  {line}")
    clock = monotonic()
    start(inputs)
    budget = replace(budget, began=budget.began + monotonic() - clock)
    arms = list(loaded.played)
    if budget.iterations is None and plan.searches and (line := _at_least(plan, rehearsal.gradient, budget)):
        say(line)
    say("attacks, tried on the undefended model:")
    clock, work = monotonic(), process_time()
    trials: list[Trial] = []
    criterion = Criterion.of(plan.modality, plan.threshold)

    def enough(*trial: Trial) -> bool:
        slower = max((monotonic() - clock) / max(process_time() - work, 1e-9), 1.0)
        return bool(plan.defences) and too_slow_to_compare(plan, [*trials, *trial], SHARE * budget.left / slower)

    try:
        for trial in rehearsal.trials(budget.trials_end, progress.trying, enough):
            trials.append(trial)
        leaking = rehearsal.leaking(criterion)
    except KeyboardInterrupt:  # nothing is written yet: what is known is told
        progress.tried()
        for line in [*_applying(trials), *rehearsal.found(criterion)]:
            say(f"  {line}")
        say("no attack was played yet, so there is no report: give the command again")
        raise
    progress.tried()
    for line in _applying(trials):
        say(f"  {line}")
    if all(trial.obstacle and trial.tried for trial in trials):
        return None
    answered = any(not trial.obstacle for trial in trials)
    # where nothing is to be played, nothing more is measured
    forms = {account.name: repr(account.arm.model) for account in inputs.accounts}

    def chosen(plan: Plan, trials: Sequence[Trial], until: float) -> tuple[Fitted, float, float]:
        """Return what fits, the seconds left, and how much slower the clock is than this process."""
        own = [UNDEFENDED, *plan.defences]
        pace = rehearsal.pace(until, own) if answered else Pace()
        slower = max((monotonic() - clock) / max(process_time() - work, 1e-9), 1.0)
        alike = {arm: forms[arm] == forms[UNDEFENDED] for arm in own}
        left = budget.left
        seconds = SHARE * left / slower
        fitted = fit(plan, trials, pace, alike, seconds=seconds, given=budget.iterations, leaking=leaking)
        return fitted, left, slower

    try:
        # where defences are not compared, or not all of them may be, two arms alone are timed
        brief = plan.defences is DEFENCES or enough()
        fitted, left, slower = chosen(plan, trials, monotonic() if brief else budget.pace_end)
        whole, fewer_defences = plan, ""
        kept = answerable(fitted, arms, leaking) if plan.defences is DEFENCES and answered else list(plan.defences)
        if len(kept) < len(plan.defences):
            fewer_defences = _fewer(kept, budget, plan, fitted, slower)
            plan = replace(plan, defences={name: plan.defences[name] for name in kept})
            arms = [UNDEFENDED, *kept]
        if brief and not enough():
            fitted, left, slower = chosen(plan, trials, budget.pace_end)
    except (KeyboardInterrupt, UserError):  # nothing is written yet
        _tell_found(rehearsal.found(criterion), say)
        raise
    asked, offered = plan, fitted
    if not fitted.compares and plan.samples > 1:
        one, alone = of_one_sample(plan, trials)
        fewer, left, slower = chosen(one, alone, monotonic())
        if fewer.compares or (fewer.says_anything and not fitted.says_anything):
            say(f"--batch {one.batches[0]} --images 1: there is no time for more, which is NOT MEASURED")
            plan, trials, fitted = one, alone, fewer
    if not fitted.says_anything:
        _tell_found(rehearsal.found(criterion), say)
        raise _too_short(budget, whole, fitted, slower)
    if fewer_defences:
        say(fewer_defences)
    if searches := {name: count for name, count in fitted.iterations.items() if _plays(fitted, name)}:
        unknown = untimed(plan, trials)
        each = {title(m, batch): m.evaluations for m, batch in plan.searches}
        told = (
            f"{name} {count * each[name]:,}{' (not timed)' * (name in unknown)}" for name, count in searches.items()
        )
        say(f"evaluations of the objective in each search: {', '.join(told)}")
    gone, needed = (monotonic() - budget.began) / 60, slower * fitted.seconds / 60
    many = f" for each of {budget.sets} sets of weights" if budget.sets > 1 else ""
    short = [unit for unit in fitted.left_out if not unit.obstacle]
    limit = _limit(budget, any(unit.seconds is not None for unit in short))
    say(f"estimate: {gone:.1f} min so far and {needed:.1f} min of attacks{many}, on one core{_busy(slower)}{limit}")
    for line in _not_measured(short, arms, slower):
        say(line)
    if short or plan is not asked:
        done = all(trial.tried for trial in trials)
        say(f"with at least {FEWEST} evaluations of each search, {_takes(budget, asked, offered, slower, done)}")
        played = {name for unit in fitted.played if unit.arm == UNDEFENDED for name in unit.titles}
        left_out_there = {name for unit in offered.left_out if unit.arm == UNDEFENDED for name in unit.titles}
        unplayed = left_out_there - played
        _tell_found(rehearsal.found(criterion, unplayed), say)
    calls = {name: slower * took for name, took in of_calls(trials, fitted.iterations).items()}
    left_out = {(unit.arm, name): unit.unplayed(slower) for unit in fitted.left_out for name in unit.titles}
    spare = [
        Spare(unit.arm, unit.titles, slower * unit.seconds, slower * unit.scoring)
        for unit in short
        if unit.seconds is not None
    ]
    rest = [unit for unit in fitted.played if unit not in fitted.first]
    stages = [[(unit.arm, name) for unit in units for name in unit.titles] for units in (fitted.first, rest)]
    allowance = Allowance(left, slower * fitted.scoring, calls, stages, left_out, spare)
    return _scenario(plan, fitted.iterations, changes), allowance, inputs.remarks


def _fewer(kept: Sequence[str], budget: Budget, plan: Plan, fitted: Fitted, slower: float) -> str:
    """Return which of the default defences are audited, and how long all of them take at the smallest batch size."""
    minutes = _minutes(budget, fitted.first_batch, slower, tried=True)
    return (
        f"defences: {', '.join(kept)}, of {len(plan.defences)} usual ones, as there is no time for more: --minutes "
        f"{minutes} --batch {min(plan.batches)} has time for all; --defence chooses"
    )


def _at_least(plan: Plan, gradient: float, budget: Budget) -> str:
    """Return how long searches on one sample take at least, where a gradient takes this many seconds.

    Empty where it is next to nothing of the budget.
    """
    least = FEWEST * (1 + len(TWINS) * bool(plan.defences)) * gradient
    if least < budget.seconds / 10:
        return ""
    where = "without a defence" + " and by three attackers behind one" * bool(plan.defences)
    over = f", more than --minutes {budget.seconds / 60:g}" * (least > budget.seconds)
    pace = f"one gradient takes about {duration(gradient)} at batch {min(plan.batches)}, and an evaluation more"
    count = f"{FEWEST} for one {NOUNS[plan.modality]} {where}"
    return f"searches: {pace}: {count} take at least about {duration(least)}{over}"


def _limit(budget: Budget, spare: bool) -> str:
    """Return how much longer than estimated an audit may take, and why; empty if no time was given.

    `spare` is whether something is left out that is played where time is left.
    """
    if budget.iterations is not None:
        return ""
    longer = f"; they may take longer, up to about --minutes {budget.seconds / 60:g} in all"
    return longer + ", and time that is left goes to what is left out" * spare


def _plays(fitted: Fitted, name: str) -> bool:
    return any(title(unit.method, unit.batch) == name and unit.applies for unit in fitted.played)


def _not_measured(units: Sequence[Unit], arms: Sequence[str], slower: float) -> list[str]:
    """Return a line for each group of attacks that there is no time for, grouped by batch size and arms."""
    cells: dict[tuple[int, str], list[Unit]] = {}
    for unit in units:
        cells.setdefault((unit.batch, unit.method.name), []).append(unit)
    alike: dict[tuple[int, str, bool], list[Unit]] = {}
    for (batch, _), own in cells.items():
        known = all(unit.seconds is not None for unit in own)
        alike.setdefault((batch, _where(own, arms), known), []).extend(own)
    lines = []
    for (batch, where, known), own in alike.items():
        names = ", ".join(dict.fromkeys(unit.method.name for unit in own))
        took = sum(unit.seconds or 0.0 for unit in own)
        needs = f"about {duration(slower * took)} in all" if known else "not even tried"
        lines.append(f"NOT MEASURED for want of time: {names} at batch {batch} on {where} ({needs})")
    return lines


def _where(units: Sequence[Unit], arms: Sequence[str]) -> str:
    """Return the arms of an attack's units, in their order, with the attackers where it is not all of them."""
    twins: dict[str, list[str]] = {arm: [] for arm in arms}
    for unit in units:
        twins[unit.arm] += [name.partition(", ")[2] for name in unit.titles]
    some = {arm: own for arm, own in twins.items() if own}
    if all(len(own) == len(TWINS) for own in twins.values()):
        return "all arms"
    told = (f" ({' and '.join(f'“{twin}”' for twin in own)})" * (len(own) < len(TWINS)) for own in some.values())
    return ", ".join(arm + note for arm, note in zip(some, told, strict=True))


def _takes(budget: Budget, plan: Plan, fitted: Fitted, slower: float, tried: bool) -> str:
    """Return the options and minutes with which an audit of the tried attacks would fit."""
    ways = [("all that was tried" if not tried else "all of it", fitted.whole)]
    if len(plan.batches) > 1:
        ways.append((f"--batch {min(plan.batches)} alone", fitted.first_batch))
    if len(plan.defences) > 1:
        ways.append(
            (f"--batch {min(plan.batches)} with one --defence", 2 / (1 + len(plan.defences)) * fitted.first_batch)
        )
    return "; ".join(f"{what} takes about --minutes {_minutes(budget, took, slower, tried)}" for what, took in ways)


def _minutes(budget: Budget, seconds: float, slower: float, tried: bool) -> int:
    """Return the whole command's minutes for attacks of this many seconds, rounded up.

    Where not all could be `tried`, trials take half of any time that is given, and what defences take is measured
    for a fourth of the time that is gone.
    """
    spent, needed = budget.seconds - budget.left * budget.sets, _MARGIN * slower * seconds / SHARE * budget.sets
    return ceil((max(spent + needed, 2 * spent) if tried else 2 * needed + spent / 2) / 60)


def _busy(slower: float) -> str:
    """Return a remark on other work that slows the machine down; empty if there is little."""
    return f" (other work makes it {slower:.1f} times as long)" if slower > 1.2 else ""


def _tell_found(lines: Sequence[str], say: Callable[[str], None]) -> None:
    if lines:
        say("what trials found on the undefended model, of what was not played:")
    for line in lines:
        say(f"  {line}")


def _too_short(budget: Budget, plan: Plan, fitted: Fitted, slower: float) -> TooShort:
    """Return the error of an audit without time for any attack, with the options of the smallest that has it."""
    given, least = f"--minutes {budget.seconds / 60:g} is too short", fitted.smallest
    if least is None:
        return TooShort(f"{given}: no attack that applies could be tried, so how many it takes is not known", {})
    fewer: dict[str, Any] = {}
    if len(plan.batches) > 1:
        fewer["batch"] = str(least.batch)
    if plan.samples > 1:
        fewer["images"] = 1
    if len(plan.defences) > 1:
        name = least.arms[1]
        fewer["defence"] = plan.defences[name]
    needed = slower * (least.seconds * _MARGIN / SHARE + least.untried) * budget.sets
    minutes = ceil((budget.seconds - budget.left * budget.sets + needed) / 60)
    noun, count = NOUNS[plan.modality], "closed form" if not least.evaluation else f"{FEWEST} evaluations"
    pace = f"one evaluation takes about {duration(slower * least.evaluation)} for one {noun}"
    took = f": {pace} on this machine{_busy(slower)}" if least.evaluation else ", and needs no search"
    where = " and ".join("without a defence" if arm == UNDEFENDED else f"behind {arm}" for arm in least.arms)
    size = ", fewer with a smaller --size" if plan.modality == "pixels" else ""
    one = slower * least.seconds * _MARGIN / SHARE / len(least.arms) * budget.sets
    others = f"; each further --defence takes about {duration(one)} more" if len(plan.defences) > 1 else ""
    return TooShort(
        f"{given}: {least.attack} applies, and was tried{took}. The smallest audit "
        f"that says something ({least.attack} on one {noun} at batch {least.batch}, {count}, {where}) takes about "
        f"{minutes} minute{'s' * (minutes > 1)}{size}{others}",
        {**fewer, "minutes": minutes},
    )


def _able(plan: Plan, refused: Mapping[int, ClientError], say: Callable[[str], None], shrink: bool) -> Plan:
    """Return the plan without batch sizes that the model cannot process; raises `UserError` if the user asked for them.

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


def _scenario(plan: Plan, iterations: Mapping[str, int], changes: Sequence[str]) -> Scenario:
    """Return the audit's scenario; its problems have no line numbers, as there is no file."""
    document = scenarios.with_changes(yaml.safe_load(plan.scenario_text(iterations)), list(changes))
    scenarios.find_inputs(document, [Path.cwd()])
    return scenarios.check(document, "the audit (arms: --defence; other fields: --set PATH=VALUE)")


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
