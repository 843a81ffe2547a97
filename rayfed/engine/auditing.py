"""Preparation of an audit: try the attacks, select the attacks that fit into the time, and print the plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf
from pathlib import Path
from time import monotonic, process_time
from typing import Any, NamedTuple

from rayfed import scenario as scenarios
from rayfed.analysis.audit import DEFENCES, TWINS, UNDEFENDED, Plan, called, title
from rayfed.documents import load_yaml
from rayfed.engine.attacking import Allowance, Spare
from rayfed.engine.fitting import (
    SHARE,
    SHORT_SHARE,
    Fitted,
    Unit,
    answerable,
    crowded,
    fit,
    of_calls,
    of_samples,
    refused,
    too_slow_to_compare,
    untimed,
)
from rayfed.engine.inputs import Inputs, prepare
from rayfed.engine.progress import AuditProgress
from rayfed.engine.rehearsing import Pace, Rehearsal, Trial
from rayfed.engine.tables import RoundTables
from rayfed.errors import ClientError, UserError
from rayfed.evidence.criteria import Criterion
from rayfed.evidence.methods import FEWEST
from rayfed.metrics.known import NOUNS
from rayfed.models.describe import described
from rayfed.report.text.formats import duration
from rayfed.scenario import Scenario
from rayfed.store.schemas import UNPLAYED

BATCHES = 1, 4, 16
"""Default batch sizes."""
_MARGIN = 1.25
"""Safety factor on estimated times when minutes are recommended."""


_ONE_VALUE = "Expected more than 1 value per channel when training"
"""Start of the error that PyTorch's batch norm raises for a single value per channel."""
_TOLD = 60.0
"""Minimum seconds for trials to time one search, so that even a short audit can recommend a sufficient time."""
_CLOSING = 4.0
"""Seconds after the attacks for writing the report and ending processes."""
_UNTIMED = f", or --iterations {FEWEST} instead of --minutes, which runs all attacks without a time limit"
_GRACE = 0.05
"""Share of the time by which the first result may exceed it."""


@dataclass(frozen=True)
class TooShort:
    """Description of the smallest possible audit, for an audit whose time is too short for any attack."""

    message: str
    options: Mapping[str, Any]
    """Changed options of the smallest audit (name -> value); empty if it is not known."""

    @property
    def enough(self) -> str:
        """Return the options of the smallest possible audit, as text; empty if the options are not known."""
        if not self.options:
            return ""
        given = " ".join(f"--{name} {value}" for name, value in self.options.items() if name != "defence")
        one = " and one --defence" if "defence" in self.options else ""
        return f"{given}{one} (about the smallest audit with a result)"


@dataclass(frozen=True)
class Budget:
    """Time budget of an audit, or a fixed number of evaluations of the objective per search."""

    began: float
    """Start of the command, on the clock of `monotonic`."""
    seconds: float
    """Seconds for the whole command, including the start of processes and the trials."""
    sets: int = 1
    """Number of sets of weights to attack."""
    iterations: int | None = None
    """Evaluations per search, instead of a time limit."""
    closing: float = 0.0
    """Seconds reserved for the report of each set."""
    ready: float | None = None
    """Start of the trials, on the clock of `monotonic`."""

    @property
    def end(self) -> float:
        """Return the end of the time budget, on the clock of `monotonic`."""
        return inf if self.iterations is not None else self.began + self.seconds

    @property
    def starting(self) -> float:
        """Return the seconds from the command's start to its trials, as an estimate of the start of another process."""
        return 0.0 if self.ready is None else self.ready - self.began

    @property
    def trials_end(self) -> float:
        """Return the latest end of the trials, which may take half of the time left at the start of the trials."""
        return self._of_the_rest(1 / 2)

    @property
    def pace_end(self) -> float:
        """Return the latest end of timing the defences: two thirds of the time left at the start of the trials."""
        return self._of_the_rest(2 / 3)

    def _of_the_rest(self, share: float) -> float:
        ready = self.began if self.ready is None else self.ready
        return ready if self.end < ready else ready + share * (self.end - ready)

    @property
    def left(self) -> float:
        """Return the seconds left for each set of weights."""
        return (self.end - monotonic()) / self.sets - self.closing

    def until(self, sets: int) -> float:
        """Return the time at which attacks on the next set of weights must end, if `sets` sets are left."""
        now = monotonic()
        return inf if self.end == inf else now + (self.end - now) / sets - self.closing


class Rehearsed(NamedTuple):
    """Plan of an audit after the trials of attacks: the scenario to run, and how much time the attacks may take."""

    scenario: Scenario
    allowance: Allowance
    notes: Sequence[str]
    """Notes on data and models, printed before the trials."""
    budget: Budget
    """The time budget, with the time reserved for reports."""
    short: TooShort | None = None
    """Set if there is no time for any attack. Then nothing is run, and the results of trials are written."""
    here: bool = False
    """Whether running the attacks in this process is faster than starting others."""


def rehearsed(
    plan: Plan,
    changes: Sequence[str],
    budget: Budget,
    progress: AuditProgress,
    shrink: bool,
    start: Callable[[Inputs], Any] = lambda _: None,
) -> Rehearsed | None:
    """Inspect the model, try all attacks, and return the scenario with the attacks that fit into the time.

    `start` is called before the trials, to start the processes for the attacks. Returns None if no attack applies.
    `shrink` reduces batch sizes to the number of samples per client, and drops those that the model rejects. After
    Ctrl-C during the trials, the returned plan only writes the trials' results and raises the interruption again.
    """
    inspected = _inspected(plan, changes, progress, shrink)
    if inspected is None:
        return None
    plan, rehearsal = inspected
    start(rehearsal.inputs)
    budget = replace(budget, ready=monotonic())
    if budget.iterations is None and plan.searches and (line := _pace(plan, rehearsal.gradient, budget)):
        progress.say(line)
    try:
        return _chosen(plan, changes, rehearsal, budget, progress)
    except KeyboardInterrupt as stopped:
        return _stopped(_one_iteration(plan, changes), rehearsal, budget, progress, stopped)


def _chosen(
    plan: Plan, changes: Sequence[str], rehearsal: Rehearsal, budget: Budget, progress: AuditProgress
) -> Rehearsed | None:
    """Try all attacks, select those that fit into the time, and print the plan; return None if none applies."""
    say, inputs = progress.say, rehearsal.inputs
    criterion, clock = Criterion.of(plan.modality, plan.threshold), _Clock()
    trials: Sequence[Trial] = _tried(plan, rehearsal, budget, clock, progress, criterion)
    if all(trial.obstacle and trial.tried for trial in trials):
        if failures := [f"{trial.title}: {trial.obstacle}" for trial in trials if trial.raised]:
            raise UserError("no attack could be run, so there are no results:\n  " + "\n  ".join(failures))
        return None
    budget = replace(budget, closing=clock.slower * _CLOSING)
    choice = _Choice(rehearsal, budget, clock, rehearsal.leaking(criterion))
    try:
        asked, fitted = choice.fitted(plan, trials)
    except UserError:  # nothing is written yet
        _tell_found(rehearsal.found(criterion), say)
        raise
    whole, plan, offered, few = plan, asked, fitted, ""
    if plan.samples > 1 and not (fitted.compares and fitted.answers):
        some, own, fewer = choice.of_fewer(plan, trials, fitted)
        if some is not plan:
            say(_fewer_samples(some, len(choice.arms(some))))
            few = _attacked(some, whole)
            plan, trials, fitted = some, own, fewer
    slower = clock.slower
    if not fitted.says_anything:
        _tell_found(rehearsal.found(criterion), say)
        short = _too_short(budget, whole, fitted, slower)
        nothing = _nothing(asked, trials, offered, short, slower, budget.sets)
        allowance = replace(nothing, arms=choice.arms(asked), measured=rehearsal.measured)
        return Rehearsed(_scenario(whole, offered.iterations, changes), allowance, inputs.remarks, budget, short)
    if len(plan.defences) < len(whole.defences):
        say(_fewer(plan, whole))
    _tell_plan(plan, choice.arms(plan), trials, fitted, budget, slower, say)
    enough = "" if budget.iterations is not None else _if_it_overran(budget)
    if plan is not whole or any(not unit.obstacle for unit in fitted.left_out):
        enough = _enough(budget, whole, choice.of_all, slower, all(trial.tried for trial in trials))
        say(f"time for all of this: {enough}")
        _tell_found(rehearsal.found(criterion, _bare(offered.left_out) - _bare(fitted.played)), say)
    planned = _allowance(fitted, trials, budget, slower)
    tried = _answered(rehearsal) if plan.samples == whole.samples else RoundTables()  # fewer clients have other samples
    allowance = replace(planned, arms=choice.arms(plan), enough=enough, fewer=few, tried=tried)
    scenario = _scenario(replace(plan, defences=whole.defences), fitted.iterations, changes)
    here = slower * fitted.seconds < budget.starting
    return Rehearsed(scenario, allowance, inputs.remarks, budget, here=here)


class _Clock:
    """Clock that compares elapsed time with the CPU time of this process."""

    def __init__(self) -> None:
        self._began, self._work = monotonic(), process_time()

    @property
    def slower(self) -> float:
        """Return the elapsed seconds per CPU second, at least 1; larger if other processes use the machine."""
        return max((monotonic() - self._began) / max(process_time() - self._work, 1e-9), 1.0)


def _inspected(
    plan: Plan, changes: Sequence[str], progress: AuditProgress, shrink: bool
) -> tuple[Plan, Rehearsal] | None:
    """Describe the model, and return the plan with the batch sizes that data and model allow.

    Returns None if no attack supports this kind of data. Unless `shrink` is true, raises `UserError` for a requested
    batch size that exceeds the clients' samples or that the model rejects.
    """
    say = progress.say
    loaded = _one_iteration(plan, changes)
    data = loaded.data.load()
    largest = max(len(data.train_labels) // loaded.federation.clients, 1)
    if not shrink and largest < max(plan.batches):
        raise UserError(
            f"--batch {max(plan.batches)}: each of {plan.samples} clients (--images) has at most {largest} of the "
            f"{len(data.train_labels)} samples; use smaller batches, fewer images, or more data"
        )
    if largest < max(plan.batches):
        plan = replace(plan, batches=sorted({min(size, largest) for size in plan.batches}))
        fitting, usual = (",".join(map(str, sizes)) for sizes in (plan.batches, BATCHES))
        say(f"--batch {fitting} instead of {usual}: each of {plan.samples} clients (--images) has too few samples")
        loaded = _one_iteration(plan, changes)
    if not loaded.attacks:
        say(f"attacks: no attack of the audit supports {plan.modality}")
        return None
    rehearsal = Rehearsal(prepare(loaded, data=data))
    if refused := rehearsal.refused():
        plan = _able(plan, refused, say, shrink)
        rehearsal = Rehearsal(prepare(_one_iteration(plan, changes), data=data))
    for message in rehearsal.inputs.remarks:
        progress.note(message)
    given = {"name": loaded.data.name, **loaded.data.model_dump(mode="json", exclude_defaults=True)}
    say(f"data {called([given])}: {data.described}")
    say(f"model {loaded.model.title}, loss {loaded.loss.name}:")
    for line in described(rehearsal.inputs.accounts[0].arm.model, data.sample):
        say(f"  {line}")
    return plan, rehearsal


def _tried(
    plan: Plan, rehearsal: Rehearsal, budget: Budget, clock: _Clock, progress: AuditProgress, criterion: Criterion
) -> list[Trial]:
    """Try the attacks on the undefended model, and print which apply, even after Ctrl-C."""
    say, trials = progress.say, list[Trial]()
    say("attacks, tried on the undefended model:")

    def enough(trial: Trial) -> bool:
        known = [*trials, trial]
        return _compares_nothing(plan, known, budget, clock) or _crowded(plan, known, budget, clock)

    try:
        last = max(budget.pace_end, monotonic() + _TOLD)
        for trial in rehearsal.trials(budget.trials_end, progress.trying, enough, last):
            trials.append(trial)
        rehearsal.leaking(criterion)  # scores all trials now, so that their time counts
    finally:
        progress.tried()
        for line in _applying(trials):
            say(f"  {line}")
    return trials


def _stopped(
    scenario: Scenario, rehearsal: Rehearsal, budget: Budget, progress: AuditProgress, stopped: KeyboardInterrupt
) -> Rehearsed:
    """Return a plan that runs nothing, writes the results of closed-form trials, and raises the interruption again.

    Raises it immediately if there are no results.
    """
    measured = _answered(rehearsal)
    if not measured.attacks:
        progress.say("stopped before the first result, so there is no report: run the command again")
        raise stopped
    allowance = Allowance(seconds=0.0, arms=[UNDEFENDED], measured=measured, stopped=stopped)
    short = TooShort("the trials were stopped", {})
    return Rehearsed(scenario, allowance, rehearsal.inputs.remarks, budget, short)


def _answered(rehearsal: Rehearsal) -> RoundTables:
    """Return the rows of completed trials."""
    measured = rehearsal.measured
    measured.attacks[:] = [row for row in measured.attacks if row["status"] != UNPLAYED]
    return measured


def _compares_nothing(plan: Plan, trials: Sequence[Trial], budget: Budget, clock: _Clock) -> bool:
    """Return whether, according to the trials, the remaining time is too short to compare two arms."""
    return bool(plan.defences) and too_slow_to_compare(plan, trials, SHARE * budget.left / clock.slower)


def _crowded(plan: Plan, trials: Sequence[Trial], budget: Budget, clock: _Clock) -> bool:
    """Return whether the time after the trials would be too short for the defences that the user named."""
    if budget.iterations is not None:
        return False
    rest = min(budget.left, budget.end - budget.trials_end)
    return crowded(plan, trials, SHARE * rest / clock.slower)


class _Choice:
    """Selection of the attacks that fit into the remaining time."""

    def __init__(self, rehearsal: Rehearsal, budget: Budget, clock: _Clock, leaking: Sequence[str]) -> None:
        """Initialise the selection; `leaking` has the titles of attacks that leaked in their trials."""
        self._rehearsal, self._budget, self._clock, self._leaking = rehearsal, budget, clock, leaking
        self._forms = {account.name: repr(account.arm.model) for account in rehearsal.inputs.accounts}
        self.of_all: Fitted
        """Selection for the requested plan, with all of its defences."""

    def arms(self, plan: Plan) -> list[str]:
        """Return the arms (tested variants) of the scenario, without the default defences that the plan leaves out."""
        return [arm for arm in self._forms if arm in plan.defences or arm not in DEFENCES]

    def fitted(self, plan: Plan, trials: Sequence[Trial]) -> tuple[Plan, Fitted]:
        """Return the plan with as many default defences as there is time for, and the attacks that fit into the time.

        Observations are timed on two arms first: for the default defences, or if no arms can be compared.
        """
        alone = _compares_nothing(plan, trials, self._budget, self._clock)
        usual = plan.defences is DEFENCES and self._budget.iterations is None
        fitted = self.of_all = self._fit(plan, trials, monotonic() if alone or usual else self._budget.pace_end)
        if usual and any(not trial.obstacle for trial in trials):
            kept = answerable(fitted, self.arms(plan), self._leaking)
            if not kept >= self._forms.keys() & DEFENCES.keys():
                plan = replace(plan, defences={name: how for name, how in DEFENCES.items() if name in kept})
        if usual:
            fitted = self._fit(plan, trials, monotonic() if alone else self._budget.pace_end)
        return plan, fitted

    def of_fewer(self, plan: Plan, trials: Sequence[Trial], fitted: Fitted) -> tuple[Plan, Sequence[Trial], Fitted]:
        """Return a plan with fewer samples at the smallest batch size, the plan's trials, and the attacks that fit.

        The number of samples is the largest with which all attacks fit on the defences that the user named, or else one
        sample, if only then arms can be compared or any attack fits. Otherwise returns the given plan.
        """
        counts = [1]
        while plan.asked and counts[0] < plan.samples // 2:
            counts.insert(0, min(2 * counts[0], plan.samples // 2))
        for samples, share in [*((count, SHORT_SHARE) for count in counts if plan.asked), (1, SHARE)]:
            some, own = of_samples(plan, trials, samples)
            found = self._fit(some, own, monotonic(), share)
            if found.compares and (found.answers or samples == 1):
                return some, own, found
        alone = found.says_anything and not fitted.says_anything and not fitted.compares
        return (some, own, found) if alone else (plan, trials, fitted)

    def _fit(self, plan: Plan, trials: Sequence[Trial], until: float, share: float = SHARE) -> Fitted:
        arms = self.arms(plan)
        # if nothing can be run, no more times are measured
        pace = self._rehearsal.pace(until, arms) if any(not trial.obstacle for trial in trials) else Pace()
        alike = {arm: self._forms[arm] == self._forms[UNDEFENDED] for arm in arms}
        seconds = share * self._budget.left / self._clock.slower
        fitted = fit(plan, trials, pace, alike, seconds=seconds, given=self._budget.iterations, leaking=self._leaking)
        if self._budget.sets > 1:  # trials did not use the other weights
            return fitted
        return replace(fitted, left_out=[refused(unit, plan, trials) for unit in fitted.left_out])


def _tell_plan(
    plan: Plan,
    arms: Sequence[str],
    trials: Sequence[Trial],
    fitted: Fitted,
    budget: Budget,
    slower: float,
    say: Callable[[str], None],
) -> None:
    """Print the evaluations of each search, the estimated time, and the attacks that do not fit."""
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
    say(
        f"estimated time on one core: {needed:.1f} min of attacks{many}, plus {gone:.1f} min so far"
        f"{_busy(slower)}{limit}"
    )
    for line in _not_measured(short, arms):
        say(line)


def _allowance(fitted: Fitted, trials: Sequence[Trial], budget: Budget, slower: float) -> Allowance:
    """Return the run's allowance; elapsed time is `slower` times CPU time."""
    rest = [unit for unit in fitted.played if unit not in fitted.first]
    return Allowance(
        seconds=budget.left,
        grace=_GRACE * budget.seconds if budget.iterations is None else inf,
        scoring=slower * fitted.scoring,
        calls={name: slower * took for name, took in of_calls(trials, fitted.iterations).items()},
        stages=[[(unit.arm, name) for unit in units for name in unit.titles] for units in (fitted.first, rest)],
        left_out={(unit.arm, name): unit.unplayed(slower) for unit in fitted.left_out for name in unit.titles},
        spare=[
            Spare(unit.arm, unit.titles, slower * unit.seconds, slower * unit.scoring)
            for unit in fitted.left_out
            if not unit.obstacle and unit.seconds is not None
        ],
    )


def _nothing(
    plan: Plan, trials: Sequence[Trial], fitted: Fitted, short: TooShort, slower: float, sets: int
) -> Allowance:
    """Return the allowance of an audit that has no time for any attack.

    Attacks that did not apply in their trials are marked as not applicable.
    """
    units = [*fitted.played, *fitted.left_out]
    if sets == 1:  # trials used only the initial weights
        units = [refused(unit, plan, trials) for unit in units]
    left_out = {(unit.arm, name): unit.unplayed(slower) for unit in units for name in unit.titles}
    return Allowance(seconds=0.0, left_out=left_out, enough=short.enough)


def _bare(units: Sequence[Unit]) -> set[str]:
    """Return the titles of the units on the undefended arm."""
    return {name for unit in units if unit.arm == UNDEFENDED for name in unit.titles}


def _fewer_samples(plan: Plan, arms: int) -> str:
    """Return a line that says that fewer samples are attacked, at the smallest batch size, to fit into the time."""
    many = f" on all {arms} arms" if arms > 1 else ""
    return (
        f"--batch {plan.batches[0]} --images {plan.samples}{many}: there is no time for more samples or larger "
        "batches, which are NOT MEASURED"
    )


def _attacked(plan: Plan, whole: Plan) -> str:
    """Return how many of the requested samples are attacked, as text."""
    were = "was" if plan.samples == 1 else "were"
    alone = f", only at batch {plan.batches[0]}" * (len(whole.batches) > 1)
    return f"{plan.samples} of {whole.samples} samples (--images) {were} attacked{alone}"


def _fewer(plan: Plan, whole: Plan) -> str:
    """Return lines that list the default defences that are audited and those that are not measured."""
    others = ", ".join(name for name in whole.defences if name not in plan.defences)
    return (
        f"defences: {', '.join(plan.defences)} ({len(plan.defences)} of {len(whole.defences)} default defences; choose "
        f"with --defence)\n"
        f"NOT MEASURED, no time: all attacks on {others}"
    )


def _pace(plan: Plan, gradient: float, budget: Budget) -> str:
    """Return a warning that searches take long if a gradient takes this many seconds; empty if they are fast.

    Trials measure the exact time: an evaluation takes several times as long as a gradient, depending on the model.
    """
    least = FEWEST * (1 + len(TWINS) * bool(plan.defences)) * gradient
    if least < budget.seconds / 10:
        return ""
    batch = min(plan.batches)
    told = f"one gradient takes about {duration(gradient)} at batch {batch}, and an evaluation several times that"
    if least > budget.seconds:
        return f"searches: {told}; --minutes {budget.seconds / 60:g} is too short for searches under a defence"
    return f"searches: {told}; the trials measure how long searches take"


def _limit(budget: Budget, spare: bool) -> str:
    """Return text on how much longer than estimated an audit may take; empty without a time limit.

    `spare` says whether attacks are left out that are run if time is left.
    """
    if budget.iterations is not None:
        return ""
    longer = f"; at most about --minutes {budget.seconds / 60:g} in total"
    return longer + ", and remaining time is used for attacks that are left out" * spare


def _plays(fitted: Fitted, name: str) -> bool:
    return any(title(unit.method, unit.batch) == name and unit.applies for unit in fitted.played)


def _not_measured(units: Sequence[Unit], arms: Sequence[str]) -> list[str]:
    """Return a line for each group of attacks that do not fit into the time, grouped by batch size and arms."""
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
        what = f"{names} at batch {batch} on {where}"
        if known:
            lines.append(f"NOT MEASURED unless time is left: {what}")
        else:
            untried = "their trials were not completed, so it is not known whether they apply"
            lines.append(f"NOT MEASURED, no time: {what} ({untried})")
    return lines


def _where(units: Sequence[Unit], arms: Sequence[str]) -> str:
    """Return the arms of an attack's units, as text, with the attackers unless all are included."""
    twins: dict[str, list[str]] = {arm: [] for arm in arms}
    for unit in units:
        twins[unit.arm] += [name.partition(", ")[2] for name in unit.titles]
    some = {arm: own for arm, own in twins.items() if own}
    if all(len(own) == len(TWINS) for own in twins.values()):
        return "all arms"
    told = (f" ({' and '.join(f'“{twin}”' for twin in own)})" * (len(own) < len(TWINS)) for own in some.values())
    return ", ".join(arm + note for arm, note in zip(some, told, strict=True))


def _enough(budget: Budget, plan: Plan, fitted: Fitted, slower: float, tried: bool) -> str:
    """Return the minutes of an audit that leaves nothing out, and of the smallest one that compares a defence.

    Both are for the whole command, including trials. If not all attacks were `tried`, the text also suggests
    `--iterations`, because the time of the others is not known.
    """
    first = min(plan.batches)
    ways = [(f"--minutes {_minutes(budget, fitted.whole, slower, tried)}", "")]
    fewer = [f"--batch {first}"] * (len(plan.batches) > 1) + ["one --defence"] * (len(plan.defences) > 1)
    if fewer:
        one = 2 / (1 + len(plan.defences)) if len(plan.defences) > 1 else 1.0
        ways.append((f"--minutes {_minutes(budget, one * fitted.first_batch, slower, tried)}", " and ".join(fewer)))
    every = "each attack that applies" if tried else "each attack that was tried and applies"
    sizes, arms = ", ".join(map(str, plan.batches)), 1 + len(plan.defences)
    more = "".join(f", or {minutes} with {how}" for minutes, how in ways[1:])
    return f"about {ways[0][0]} in total ({every}, at batch {sizes}, on {arms} arm{'s' * (arms > 1)}){more}" + (
        _UNTIMED * (not tried)
    )


def _if_it_overran(budget: Budget) -> str:
    """Return the options for an audit whose attacks were expected to fit into the time, but did not."""
    return f"about --minutes {ceil(budget.seconds / 30)} in total{_UNTIMED}"


def _minutes(budget: Budget, seconds: float, slower: float, tried: bool) -> int:
    """Return the minutes of the whole command for attacks of this many seconds, rounded up.

    If not all attacks were `tried`, trials are assumed to take half of any time, and timing of the defences a quarter
    of the time spent so far.
    """
    spent, needed = budget.seconds - budget.left * budget.sets, _MARGIN * slower * seconds / SHARE * budget.sets
    return ceil((max(spent + needed, 2 * spent) if tried else 2 * needed + spent / 2) / 60)


def _busy(slower: float) -> str:
    """Return a remark on other processes that slow the machine down; empty if their effect is small."""
    return f" ({slower:.1f} times as long because other processes use the machine)" if slower > 1.2 else ""


def _tell_found(lines: Sequence[str], say: Callable[[str], None]) -> None:
    if lines:
        say("results of trials on the undefended model (attacks that are not run again):")
    for line in lines:
        say(f"  {line}")


def _too_short(budget: Budget, plan: Plan, fitted: Fitted, slower: float) -> TooShort:
    """Return the reason why there is no time for any attack, with the options of the smallest possible audit."""
    given, least = f"--minutes {budget.seconds / 60:g} is too short", fitted.smallest
    if least is None:
        said = "the time ended before any attack was found to apply, so the required minutes are not known"
        return TooShort(f"{given}: {said}", {})
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
    pace = f"one evaluation takes about {duration(slower * least.evaluation)} per {noun}"
    took = f": {pace} on this machine{_busy(slower)}" if least.evaluation else ", and needs no search"
    where = " and ".join("without a defence" if arm == UNDEFENDED else f"under {arm}" for arm in least.arms)
    size = ", fewer with a smaller --size" if plan.modality == "pixels" else ""
    one = slower * least.seconds * _MARGIN / SHARE / len(least.arms) * budget.sets
    others = f"; each further --defence takes about {duration(one)} more" if len(plan.defences) > 1 else ""
    return TooShort(
        f"{given}: {least.attack} applies, and was tried{took}. The smallest audit "
        f"with a result ({least.attack} on one {noun} at batch {least.batch}, {count}, {where}) takes about "
        f"{minutes} minute{'s' * (minutes > 1)}{size}{others}",
        {**fewer, "minutes": minutes},
    )


def _able(plan: Plan, refused: Mapping[int, ClientError], say: Callable[[str], None], shrink: bool) -> Plan:
    """Return the plan without the batch sizes that the model rejects (`refused`: batch size -> error).

    Raises `UserError` if the user requested them (not `shrink`), or if the model rejects all.
    """
    able, sizes = [size for size in plan.batches if size not in refused], ",".join(map(str, refused))
    error = next(iter(refused.values()))
    said = _refusal(error, plan, sizes)
    if not able:
        raise UserError(said) from error
    if not shrink:
        raise UserError(f"--batch: remove {sizes}, because the model rejects this batch size: {said}")
    say(f"--batch {','.join(map(str, able))}: without {sizes}, because the model rejects this batch size: {said}")
    return replace(plan, batches=able)


def _refusal(error: ClientError, plan: Plan, sizes: str) -> str:
    """Return why a model rejects batches of these sizes, with a fix if batch norm is the reason."""
    said = str(error).partition("\n")[0]
    if _ONE_VALUE not in said:
        return said
    larger = ", a larger --size" if plan.modality == "pixels" else ""
    return (
        f"batch norm in training mode needs more than one value per channel, and a batch of {sizes} has only one. Use "
        f"larger batches (--batch 4){larger}, or batch norm in evaluation mode (--set model.batch_norm=eval)"
    )


def _one_iteration(plan: Plan, changes: Sequence[str]) -> Scenario:
    """Return the audit's scenario with one iteration per search, for use before the iterations are chosen."""
    return _scenario(plan, {title(*search): 1 for search in plan.searches}, changes)


def _scenario(plan: Plan, iterations: Mapping[str, int], changes: Sequence[str]) -> Scenario:
    """Return the audit's scenario. Its error messages have no line numbers, because there is no file."""
    document = scenarios.with_changes(load_yaml(plan.scenario_text(iterations)), list(changes))
    scenarios.find_inputs(document, [Path.cwd()])
    return scenarios.check(document, "the audit (arms: --defence; other fields: --set PATH=VALUE)")


def _applying(trials: Sequence[Trial]) -> list[str]:
    """Return a line for each attack, with the cases in which it applies and the reasons if it does not."""
    lines = []
    for name in dict.fromkeys(trial.title.partition(" ")[0] for trial in trials):
        own = [trial for trial in trials if trial.title.startswith(f"{name} ")]
        untried = [trial.obstacle for trial in own if not trial.tried]
        own = [trial for trial in own if trial.tried]
        if not own:
            lines.append(f"{name}: {untried[0]}")
            continue
        able = [trial.title.removeprefix(f"{name} ") for trial in own if not trial.obstacle]
        reasons = dict.fromkeys(trial.obstacle for trial in own if trial.obstacle)
        applies = "applies"
        if any(trial.raised for trial in own):
            applies = "FAILED"
        elif not able:
            applies = "does not apply"
        elif len(able) < len(own):
            applies = f"applies to {'; '.join(able)}"
        sizes = dict.fromkeys(trial.title.partition(",")[0].rpartition(" ")[2] for trial in own if trial.supposed)
        supposed = f" (assumed at batch {', '.join(sizes)}, because a trial would take long)" if sizes else ""
        lines.append(f"{name}: {applies}" + "".join(f" ({reason})" for reason in reasons) + supposed)
    return lines
