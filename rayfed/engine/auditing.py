"""Rehearsal of an audit: its attacks are tried, and those that fit into the time are chosen and told."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf
from pathlib import Path
from time import monotonic, process_time
from typing import Any, NamedTuple

from rayfed import scenario as scenarios
from rayfed.analysis.audit import DEFENCES, FEWEST, TWINS, UNDEFENDED, Criterion, Plan, called, title
from rayfed.analysis.formats import duration
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
from rayfed.metrics.known import NOUNS
from rayfed.models.describe import described
from rayfed.scenario import Scenario
from rayfed.store.schemas import UNPLAYED

BATCHES = 1, 4, 16
"""Batch sizes where none are given."""
_MARGIN = 1.25
"""Times as long as estimated is what minutes that are said to be enough have room for."""


_ONE_VALUE = "Expected more than 1 value per channel when training"
"""What PyTorch's batch norm says of a batch that leaves it no variance."""
_TOLD = 60.0
"""Seconds that trials have in any case to time one search: however short the time, somebody is told what is enough."""
_CLOSING = 4.0
"""Seconds of work after the attacks: the page is written, and what they needed ends."""
_UNTIMED = f", or --iterations {FEWEST} in place of --minutes, which plays all however long it takes"
_GRACE = 0.05
"""Share of the time past its end in which a first answer may come."""


@dataclass(frozen=True)
class TooShort:
    """What an audit needs whose time suffices for no attack."""

    message: str
    options: Mapping[str, Any]
    """Those of the smallest audit (name -> value) that differ; empty where it is not known."""

    @property
    def enough(self) -> str:
        """Options to give for something to be measured, in words; empty where they are not known."""
        if not self.options:
            return ""
        given = " ".join(f"--{name} {value}" for name, value in self.options.items() if name != "defence")
        one = " and one --defence" if "defence" in self.options else ""
        return f"{given}{one}, which is about the smallest audit that says something"


@dataclass(frozen=True)
class Budget:
    """Time budget of an audit, or its replacement by a fixed number of evaluations."""

    began: float
    """When it began, by the clock of `monotonic`."""
    seconds: float
    """Seconds that the whole command may take, the start of what attacks need and the trials with it."""
    sets: int = 1
    """Sets of weights that are attacked."""
    iterations: int | None = None
    """Evaluations of each search, in place of a time."""
    closing: float = 0.0
    """Seconds of that which are kept for the page of each set."""
    ready: float | None = None
    """When the trials began."""

    @property
    def end(self) -> float:
        """When all of it is over."""
        return inf if self.iterations is not None else self.began + self.seconds

    @property
    def starting(self) -> float:
        """Seconds from the command to its trials, which another process takes about as well."""
        return 0.0 if self.ready is None else self.ready - self.began

    @property
    def trials_end(self) -> float:
        """End of the trials: at most half of the time that they find."""
        return self._of_the_rest(1 / 2)

    @property
    def pace_end(self) -> float:
        """End of timing the defences: at most two thirds of the time that trials find."""
        return self._of_the_rest(2 / 3)

    def _of_the_rest(self, share: float) -> float:
        ready = self.began if self.ready is None else self.ready
        return ready if self.end < ready else ready + share * (self.end - ready)

    @property
    def left(self) -> float:
        """Seconds left for each set of weights."""
        return (self.end - monotonic()) / self.sets - self.closing

    def until(self, sets: int) -> float:
        """Return when the attacks on a set of weights are over, where so many sets are left."""
        now = monotonic()
        return inf if self.end == inf else now + (self.end - now) / sets - self.closing


class Rehearsed(NamedTuple):
    """What an audit plays."""

    scenario: Scenario
    allowance: Allowance
    notes: Sequence[str]
    """On data and models, which were told before anything was tried."""
    budget: Budget
    """The time, with what is kept of it for the pages."""
    short: TooShort | None = None
    """Where there is no time for any attack: then nothing is played, and what trials measured is written down."""
    here: bool = False
    """Whether its attacks are quicker played in this process than others are started."""


def rehearsed(
    plan: Plan,
    changes: Sequence[str],
    budget: Budget,
    progress: AuditProgress,
    shrink: bool,
    start: Callable[[Inputs], Any] = lambda _: None,
) -> Rehearsed | None:
    """Inspect the model and try all attacks; return the audit's scenario, and the part that fits into the time.

    Before the trials `start` starts what the attacks need. Returns None where no attack applies. With `shrink` batches
    are no larger than what clients have, and those that the model does not take are left out. Where Ctrl-C comes after
    the first trial began, what is returned plays nothing, writes down what trials found, and raises it again.
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
    """Try all attacks, choose what fits into the time, and tell it; None where no attack applies."""
    say, inputs = progress.say, rehearsal.inputs
    criterion, clock = Criterion.of(plan.modality, plan.threshold), _Clock()
    trials: Sequence[Trial] = _tried(plan, rehearsal, budget, clock, progress, criterion)
    if all(trial.obstacle and trial.tried for trial in trials):
        if failures := [f"{trial.title}: {trial.obstacle}" for trial in trials if trial.raised]:
            raise UserError("no attack could be run, so nothing was measured:\n  " + "\n  ".join(failures))
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
    """Clock of the process's work since it was made."""

    def __init__(self) -> None:
        self._began, self._work = monotonic(), process_time()

    @property
    def slower(self) -> float:
        """How many seconds a second of work takes, at least 1, for what else the machine does."""
        return max((monotonic() - self._began) / max(process_time() - self._work, 1e-9), 1.0)


def _inspected(
    plan: Plan, changes: Sequence[str], progress: AuditProgress, shrink: bool
) -> tuple[Plan, Rehearsal] | None:
    """Describe the model, and return the plan as far as data and model allow it; None where no attack is of such data.

    Of the plan's batch sizes those are left that clients have samples for and that the model takes; raises `UserError`
    where others were asked for (not `shrink`).
    """
    say = progress.say
    loaded = _one_iteration(plan, changes)
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
        loaded = _one_iteration(plan, changes)
    if not loaded.attacks:
        say(f"attacks: none of the audit's works on {plan.modality}")
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
    """Try the attacks on the undefended model, and tell which apply; at Ctrl-C those that were tried."""
    say, trials = progress.say, list[Trial]()
    say("attacks, tried on the undefended model:")

    def enough(trial: Trial) -> bool:
        known = [*trials, trial]
        return _compares_nothing(plan, known, budget, clock) or _crowded(plan, known, budget, clock)

    try:
        last = max(budget.pace_end, monotonic() + _TOLD)
        for trial in rehearsal.trials(budget.trials_end, progress.trying, enough, last):
            trials.append(trial)
        rehearsal.leaking(criterion)  # scored once, which takes its time
    finally:
        progress.tried()
        for line in _applying(trials):
            say(f"  {line}")
    return trials


def _stopped(
    scenario: Scenario, rehearsal: Rehearsal, budget: Budget, progress: AuditProgress, stopped: KeyboardInterrupt
) -> Rehearsed:
    """Return what plays nothing, writes down what trials of closed forms found, and raises what stopped them again.

    Raises it at once where they found nothing.
    """
    measured = _answered(rehearsal)
    if not measured.attacks:
        progress.say("no attack has answered yet, so there is no report: give the command again")
        raise stopped
    allowance = Allowance(seconds=0.0, arms=[UNDEFENDED], measured=measured, stopped=stopped)
    short = TooShort("the trials were stopped", {})
    return Rehearsed(scenario, allowance, rehearsal.inputs.remarks, budget, short)


def _answered(rehearsal: Rehearsal) -> RoundTables:
    """Return the rows of what trials have answered to the end."""
    measured = rehearsal.measured
    measured.attacks[:] = [row for row in measured.attacks if row["status"] != UNPLAYED]
    return measured


def _compares_nothing(plan: Plan, trials: Sequence[Trial], budget: Budget, clock: _Clock) -> bool:
    """Return whether the trials say that no two arms can be compared in the time that is left."""
    return bool(plan.defences) and too_slow_to_compare(plan, trials, SHARE * budget.left / clock.slower)


def _crowded(plan: Plan, trials: Sequence[Trial], budget: Budget, clock: _Clock) -> bool:
    """Return whether, if trials took all of their time, the rest would not do for defences that the user named."""
    if budget.iterations is not None:
        return False
    rest = min(budget.left, budget.end - budget.trials_end)
    return crowded(plan, trials, SHARE * rest / clock.slower)


class _Choice:
    """Choice of the attacks that fit into the time that is left."""

    def __init__(self, rehearsal: Rehearsal, budget: Budget, clock: _Clock, leaking: Sequence[str]) -> None:
        """Take the titles of the attacks that leaked in their trials as `leaking`."""
        self._rehearsal, self._budget, self._clock, self._leaking = rehearsal, budget, clock, leaking
        self._forms = {account.name: repr(account.arm.model) for account in rehearsal.inputs.accounts}
        self.of_all: Fitted
        """What fits of the plan that was asked for, with all of its defences."""

    def arms(self, plan: Plan) -> list[str]:
        """Return the arms of the scenario, without the default defences that the plan leaves out."""
        return [arm for arm in self._forms if arm in plan.defences or arm not in DEFENCES]

    def fitted(self, plan: Plan, trials: Sequence[Trial]) -> tuple[Plan, Fitted]:
        """Return what fits, and the plan with as many of the default defences as there is time for.

        What attackers see is timed of two arms alone where that may be all: by default, or if none can be compared.
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
        """Return a plan of fewer samples at the smallest batch size, its trials, and what fits of it.

        They are as many as defences that the user named have an answer on from all attacks; otherwise one, where that
        compares arms, or says anything, and more do not. Where fewer say no more either, it is the plan that was given.
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
        # where nothing is to be played, nothing more is measured
        pace = self._rehearsal.pace(until, arms) if any(not trial.obstacle for trial in trials) else Pace()
        alike = {arm: self._forms[arm] == self._forms[UNDEFENDED] for arm in arms}
        seconds = share * self._budget.left / self._clock.slower
        fitted = fit(plan, trials, pace, alike, seconds=seconds, given=self._budget.iterations, leaking=self._leaking)
        if self._budget.sets > 1:  # of other weights trials know nothing
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
    """Tell the evaluations of each search, about how long everything takes, and what there is no time for."""
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
    for line in _not_measured(short, arms):
        say(line)


def _allowance(fitted: Fitted, trials: Sequence[Trial], budget: Budget, slower: float) -> Allowance:
    """Return the time limit of the run in seconds by the clock, which work takes `slower`."""
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
    """Return the allowance of an audit that has time for no attack; what trials were refused by is no gap."""
    units = [*fitted.played, *fitted.left_out]
    if sets == 1:  # of other weights trials know nothing
        units = [refused(unit, plan, trials) for unit in units]
    left_out = {(unit.arm, name): unit.unplayed(slower) for unit in units for name in unit.titles}
    return Allowance(seconds=0.0, left_out=left_out, enough=short.enough)


def _bare(units: Sequence[Unit]) -> set[str]:
    """Return the titles of the units on the undefended arm."""
    return {name for unit in units if unit.arm == UNDEFENDED for name in unit.titles}


def _fewer_samples(plan: Plan, arms: int) -> str:
    """Return that fewer samples are attacked, at the smallest batch size, so that the arms have an answer on them."""
    many = f"so that all {arms} arms are attacked alike: " if arms > 1 else ""
    return (
        f"--batch {plan.batches[0]} --images {plan.samples}, {many}there is no time for more samples or larger "
        "batches, which are NOT MEASURED"
    )


def _attacked(plan: Plan, whole: Plan) -> str:
    """Return how many of the samples that were asked for are attacked."""
    were = "was" if plan.samples == 1 else "were"
    alone = f", at batch {plan.batches[0]} alone" * (len(whole.batches) > 1)
    return f"{plan.samples} of {whole.samples} samples (--images) {were} attacked{alone}"


def _fewer(plan: Plan, whole: Plan) -> str:
    """Return which of the default defences are audited, and that the others are not measured."""
    others = ", ".join(name for name in whole.defences if name not in plan.defences)
    return (
        f"defences: {', '.join(plan.defences)}, of {len(whole.defences)} usual ones; --defence chooses\n"
        f"NOT MEASURED for want of time: all attacks on {others}"
    )


def _pace(plan: Plan, gradient: float, budget: Budget) -> str:
    """Return that searches take long, where a gradient takes this many seconds; empty where it is next to nothing.

    How long, trials tell: an evaluation takes several times a gradient's time, how many depends on the model.
    """
    least = FEWEST * (1 + len(TWINS) * bool(plan.defences)) * gradient
    if least < budget.seconds / 10:
        return ""
    batch = min(plan.batches)
    told = f"one gradient takes about {duration(gradient)} at batch {batch}, and an evaluation several times that"
    if least > budget.seconds:
        return f"searches: {told}: --minutes {budget.seconds / 60:g} are too few to search behind a defence"
    return f"searches: {told}: how long searches take is known after the trials"


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


def _not_measured(units: Sequence[Unit], arms: Sequence[str]) -> list[str]:
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
        what = f"{names} at batch {batch} on {where}"
        if known:
            lines.append(f"NOT MEASURED unless time is left: {what}")
        else:
            untried = "not tried to their end, so nobody knows whether they apply"
            lines.append(f"NOT MEASURED for want of time: {what} ({untried})")
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


def _enough(budget: Budget, plan: Plan, fitted: Fitted, slower: float, tried: bool) -> str:
    """Return the minutes of an audit that leaves nothing out, and of the smallest that compares one defence.

    Both are of a whole command, its trials with it. Where not all was `tried`, nobody knows how long that takes.
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
    return f"about {ways[0][0]} in all ({every}, at batch {sizes}, on {arms} arm{'s' * (arms > 1)}){more}" + (
        _UNTIMED * (not tried)
    )


def _if_it_overran(budget: Budget) -> str:
    """Return what to give for all to be played which was expected to fit, and did not."""
    return f"about --minutes {ceil(budget.seconds / 30)} in all{_UNTIMED}"


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
    """Return why there is no time for any attack, with the options of the smallest audit that has it."""
    given, least = f"--minutes {budget.seconds / 60:g} is too short", fitted.smallest
    if least is None:
        said = "no attack is known to apply, for trials ended with their time, so how many it takes is not known"
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

    Where it takes none, the first error is told.
    """
    able, sizes = [size for size in plan.batches if size not in refused], ",".join(map(str, refused))
    error = next(iter(refused.values()))
    said = _refusal(error, plan, sizes)
    if not able:
        raise UserError(said) from error
    if not shrink:
        raise UserError(f"leave {sizes} out of --batch, for the model does not take batches of so many: {said}")
    say(f"--batch {','.join(map(str, able))}: without {sizes}, for the model does not take batches of so many: {said}")
    return replace(plan, batches=able)


def _refusal(error: ClientError, plan: Plan, sizes: str) -> str:
    """Return why a model does not take batches of these sizes, and what to do where batch norm is why."""
    said = str(error).partition("\n")[0]
    if _ONE_VALUE not in said:
        return said
    larger = ", a larger --size" if plan.modality == "pixels" else ""
    return (
        f"batch norm in training mode needs more than one value of each channel, and of a batch of {sizes} it sees one "
        f"alone: take larger batches (--batch 4){larger}, or batch norm as in evaluation (--set model.batch_norm=eval)"
    )


def _one_iteration(plan: Plan, changes: Sequence[str]) -> Scenario:
    """Return the audit's scenario before the iterations of searches are known."""
    return _scenario(plan, {title(*search): 1 for search in plan.searches}, changes)


def _scenario(plan: Plan, iterations: Mapping[str, int], changes: Sequence[str]) -> Scenario:
    """Return the audit's scenario; its problems have no line numbers, as there is no file."""
    document = scenarios.with_changes(load_yaml(plan.scenario_text(iterations)), list(changes))
    scenarios.find_inputs(document, [Path.cwd()])
    return scenarios.check(document, "the audit (arms: --defence; other fields: --set PATH=VALUE)")


def _applying(trials: Sequence[Trial]) -> list[str]:
    """Return a line for each attack: where it applies, and why not elsewhere."""
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
        supposed = f" (supposed at batch {', '.join(sizes)}, where a trial would take long)" if sizes else ""
        lines.append(f"{name}: {applies}" + "".join(f" ({reason})" for reason in reasons) + supposed)
    return lines
