"""Selection of the attacks that fit into an audit's time, based on the duration of their trials."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import floor, inf, log10

from rayfed.analysis.audit import TWINS, UNDEFENDED, Plan, title
from rayfed.engine.attacking import want_of_time
from rayfed.engine.rehearsing import TIMED, Pace, Trial
from rayfed.evidence.methods import FEWEST, METHODS, MOST, USEFUL, Method
from rayfed.scenario import AttackSpec
from rayfed.store.schemas import UNPLAYED

_CHEAP = 0.01
"""Maximum share of the time that an attack on an arm may take to have priority over longer ones."""
SHARE = 0.75
"""Share of the time that is planned. The rest is a reserve, as some searches take longer under a defence."""
SHORT_SHARE = 0.5
"""Planned share if there is no time for all samples; a short audit needs a larger reserve."""


@dataclass(frozen=True)
class Unit:
    """An attack on one arm at one batch size, which is run completely or not at all.

    Under a defence a unit has all attackers, because a verdict needs all. On the undefended arm the non-adaptive
    attacker is one unit, and the attackers with more knowledge are another.
    """

    arm: str
    method: Method
    batch: int
    titles: tuple[str, ...]
    seconds: float | None
    """Estimated seconds with the fewest iterations; None if the attack was not tried."""
    applies: bool
    obstacle: str = ""
    """Why it does not apply to the undefended model or others of the same form; empty if it may apply."""
    scoring: float = 0.0
    """Estimated seconds of its scores."""
    beyond: bool = False
    """Whether these are the undefended arm's attackers with more knowledge, which no verdict on a defence needs."""

    def unplayed(self, slower: float) -> tuple[str, str]:
        """Return the status and message of an attack that is left out; elapsed time is `slower` times CPU time."""
        if self.obstacle:
            return "not applicable", self.obstacle
        return UNPLAYED, want_of_time(None if self.seconds is None else slower * self.seconds)


@dataclass(frozen=True)
class Smallest:
    """The smallest audit with a result: one attack on one sample, without and with one defence."""

    batch: int
    attack: str
    evaluation: float
    """Seconds of one evaluation of the objective on one sample; 0 for a closed form."""
    arms: Sequence[str]
    seconds: float
    """Estimated seconds of its attacks."""
    untried: float
    """Estimated seconds of the trials at this batch size that were not made."""


@dataclass(frozen=True)
class Fitted:
    """Selection of attacks that fits into an audit's time."""

    iterations: Mapping[str, int]
    """Iterations of each search, by title (`rayfed.analysis.audit.title`)."""
    played: Sequence[Unit]
    """Selected units, in the order in which they are run, except that those of `first` come before the others."""
    first: Sequence[Unit]
    """Selected units for a first verdict on the undefended arm: all quick attacks and one long one."""
    left_out: Sequence[Unit]
    seconds: float
    """Estimated seconds of all selected units, one after another."""
    scoring: float
    """Estimated seconds of their scores, included in `seconds`."""
    smallest: Smallest | None
    """The smallest audit with a result; None if no applicable attack was tried."""
    whole: float
    """Estimated seconds of all units, with `USEFUL` evaluations for searches at the smallest batch size."""
    first_batch: float
    """Estimated seconds of all units at the smallest batch size, with as many evaluations."""
    compares: bool
    """Whether an applicable attack is run at the smallest batch size on each of the first two arms, or on all arms if
    the user named them."""
    answers: bool
    """Whether all tried units are run that verdicts on the user's defences need (`_asked`)."""

    @property
    def says_anything(self) -> bool:
        """Return whether any attack that applies is run."""
        return any(unit.applies for unit in self.played)


def fit(
    plan: Plan,
    trials: Sequence[Trial],
    pace: Pace,
    arms: Mapping[str, bool],
    seconds: float,
    given: int | None = None,
    leaking: Collection[str] = (),
) -> Fitted:
    """Select the attacks of an audit that fit into about `seconds` seconds.

    Attacks are selected in the order of `_selected`.
    At the smallest batch size searches have at least `USEFUL` evaluations, if a verdict on the first defence (or on
    all that the user named) then fits into the time. Otherwise, and at larger batch sizes, they have `FEWEST`.
    `arms` maps each arm to whether its model has the form of the undefended one. If so, attacks that did not apply in
    their trials are not run on that arm. The remaining time is distributed to the searches by the `share` of their
    method, unless it is reserved for a defence (`_waits`) or missing for the user's defences. Iterations are rounded to
    two digits, so that repeated audits often agree. With `given`, every search makes this many evaluations.
    """
    least = {title(m, b): fewest(m, FEWEST if given is None else given) for m, b in plan.searches}
    every = _units(plan, trials, pace, arms, least)
    asked = _asked(plan, every, leaking)
    units, played = _selected(every, seconds, leaking, asked)
    smallest, two = min(plan.batches), list(arms)[: None if plan.asked else 2]
    richer = every
    if given is None:
        useful = least | _useful(plan, trials)
        richer = _units(plan, trials, pace, arms, useful)
        richer_asked = _asked(plan, richer, leaking)
        first_units, first_played = _selected(richer, seconds, leaking, richer_asked)
        later = _later(richer, leaking)
        first = [u for u in richer if u.batch == smallest and u.arm in two and not u.obstacle]
        if all(unit in first_played for unit in first if unit not in later):
            least, units, played, asked = useful, first_units, first_played, richer_asked
    answers = _all_played(asked, played)
    known = [(unit, unit.seconds) for unit in richer if unit.seconds is not None and not unit.obstacle]
    spent = sum(unit.seconds or 0.0 for unit in played)
    iterations = dict(least)
    steps: dict[str, float] = {}
    for unit in played:
        name = title(unit.method, unit.batch)
        steps[name] = steps.get(name, 0.0) + _step(plan, trials, unit)
    searches = {title(*search): search[0] for search in plan.searches if steps.get(title(*search))}
    waits = not answers or _waits(units, played, seconds / SHARE - spent)
    if given is None and searches and seconds < inf and not waits:
        weights = sum(method.share for method in searches.values())
        each = (seconds - spent) / weights
        for name, method in searches.items():
            more = floor(each * method.share / steps[name])
            most = max(MOST // method.evaluations, iterations[name])
            chosen = _two_digits(min(iterations[name] + more, most))
            spent += (chosen - iterations[name]) * steps[name]
            iterations[name] = chosen

    def longer(unit: Unit) -> Unit:
        name = title(unit.method, unit.batch)
        more = iterations.get(name, 0) - least.get(name, 0)
        return unit if unit.seconds is None else replace(unit, seconds=unit.seconds + more * _step(plan, trials, unit))

    return Fitted(
        iterations=iterations,
        played=played,
        first=_first(played, _later(units, leaking), _CHEAP * seconds),
        left_out=[longer(unit) for unit in units if unit not in played],
        seconds=spent,
        scoring=sum(unit.scoring for unit in played),
        smallest=_smallest(plan, trials, pace, arms, FEWEST if given is None else given),
        whole=sum(needed for _, needed in known),
        first_batch=sum(needed for unit, needed in known if unit.batch == smallest),
        compares=set(two) <= {unit.arm for unit in played if unit.applies and unit.batch == smallest},
        answers=answers,
    )


def refused(unit: Unit, plan: Plan, trials: Sequence[Trial]) -> Unit:
    """Return a left-out attack, with the reason if its trials show that the attack applies to none of its victims.

    Trials show this only for the undefended arm, the initial weights and the victims of one call.
    """
    own = [trial for trial in trials if trial.title in unit.titles]
    known = unit.arm == UNDEFENDED and _calls(plan, unit.batch) == 1
    if not known or not all(trial.obstacle and trial.tried and not trial.raised for trial in own):
        return unit
    return replace(unit, obstacle="; ".join(dict.fromkeys(trial.obstacle for trial in own)))


def answerable(fitted: Fitted, arms: Sequence[str], leaking: Collection[str]) -> set[str]:
    """Return the names of the defended arms on which the selected attacks may find a leak, at least the first arm.

    On these arms a search is run at the smallest batch size, or an attack that leaked in its trial (`leaking`).
    """
    smallest = min(unit.batch for unit in [*fitted.played, *fitted.left_out])
    telling = [u for u in fitted.played if u.applies and (u.method.evaluations or set(leaking) & set(u.titles))]
    found = {unit.arm for unit in telling if unit.batch == smallest}
    defended = [arm for arm in arms if arm != UNDEFENDED]
    return found & set(defended) | set(defended[:1])


def _useful(plan: Plan, trials: Sequence[Trial]) -> dict[str, int]:
    """Return the iterations that give `USEFUL` evaluations, for timed searches at the smallest batch size."""
    return {
        title(method, batch): fewest(method, max(FEWEST, round(USEFUL * method.share)))
        for method, batch in plan.searches
        if batch == min(plan.batches) and _each(_twins(trials, title(method, batch)))
    }


def _asked(plan: Plan, every: Sequence[Unit], leaking: Collection[str]) -> list[Unit]:
    """Return the units that verdicts on the user's defences need; empty if the user named none.

    These are all attacks on the defences at the smallest batch size, and those without a defence that are not `_later`.
    """
    later = _later(every, leaking)
    return [unit for unit in every if plan.asked and unit.batch == min(plan.batches) and unit not in later]


def _selected(
    every: Sequence[Unit], seconds: float, leaking: Collection[str], asked: Collection[Unit]
) -> tuple[list[Unit], list[Unit]]:
    """Return all units in order of priority, and the selected units.

    The order is:

    1. `asked` units, sorted by attack: quick ones, then those `leaking` in their trials. No other unit is selected
       before all of these.
    2. Quick units, small batches first.
    3. A leaking attack on the undefended model and, if they fit, all attacks on the first defence.
    4. The leaking attack on the other defences, and then their other attacks.
    5. Units that no verdict on a defence needs (`_later`).
    """
    cheap, later = _CHEAP * seconds, _later(every, leaking)
    whole = _on_first_defence(every, seconds, leaking)

    def place(unit: Unit) -> tuple[int, ...]:
        quick = unit.seconds is not None and unit.seconds <= cheap
        leaks = bool(set(leaking) & set(unit.titles))
        if unit in asked:
            return 0, not quick, not (leaks or quick), METHODS.index(unit.method)
        if quick:
            return (1,)
        bare = leaks and unit.arm == UNDEFENDED
        return 2, unit in later, not (bare or unit in whole), not leaks

    units = sorted(every, key=place)
    spent, played = 0.0, list[Unit]()
    for unit in units:
        if unit.seconds is None or unit.obstacle or spent + unit.seconds > seconds:
            continue
        if unit not in asked and not _all_played(asked, played):
            continue
        if unit.seconds <= cheap or unit not in later or not _waits(units, played, seconds / SHARE - spent):
            spent += unit.seconds
            played.append(unit)
    return units, played


def _all_played(asked: Collection[Unit], played: Collection[Unit]) -> bool:
    """Return whether all `asked` units that were tried and may apply are selected."""
    return all(unit in played for unit in asked if unit.seconds is not None and not unit.obstacle)


def _on_first_defence(every: Sequence[Unit], seconds: float, leaking: Collection[str]) -> list[Unit]:
    """Return all attacks on the first defence at the smallest batch size, if an attack leaked without a defence.

    The list is empty if they need more than half of the time.
    """
    smallest = min(unit.batch for unit in every)
    small = [unit for unit in every if unit.batch == smallest]
    arm = next((unit.arm for unit in small if unit.arm != UNDEFENDED), None)
    shown = any(unit.arm == UNDEFENDED and set(leaking) & set(unit.titles) for unit in small)
    own = [unit for unit in small if unit.arm == arm and unit.applies]
    needed = [unit.seconds for unit in own if unit.seconds is not None]
    return own if shown and len(needed) == len(own) and sum(needed) <= seconds / 2 else []


def _first(played: Sequence[Unit], later: Sequence[Unit], cheap: float) -> list[Unit]:
    """Return the units to run first on the undefended arm: those of at most `cheap` seconds, and one longer attack."""
    smallest = min((unit.batch for unit in played), default=0)
    bare = [u for u in played if u.arm == UNDEFENDED and u.batch == smallest and u.applies and u not in later]
    quick = [unit for unit in bare if (unit.seconds or 0.0) <= cheap]
    return quick + [unit for unit in bare if unit not in quick][:1]


def _waits(units: Sequence[Unit], played: Sequence[Unit], spare: float) -> bool:
    """Return whether a left-out attack on a defence, at the smallest batch size, would fit into `spare` seconds.

    It is run after all selected units, in the unplanned time.
    """
    smallest = min(unit.batch for unit in units)
    waiting = [u for u in units if u.arm != UNDEFENDED and u.batch == smallest and u.applies and u not in played]
    return any(unit.seconds is not None and unit.seconds <= spare for unit in waiting)


def _later(every: Sequence[Unit], leaking: Collection[str]) -> list[Unit]:
    """Return the units of the undefended arm that no verdict on a defence needs.

    One leaking unit per batch size is needed, to show that attacks work. If no trial leaked, the non-adaptive units
    are all needed.
    """
    bare = [unit for unit in every if unit.arm == UNDEFENDED]
    leaked = [(unit.seconds, unit) for unit in bare if unit.seconds is not None and set(leaking) & set(unit.titles)]
    shown = {unit.batch: unit for _, unit in sorted(leaked, key=lambda one: -one[0])}
    return [unit for unit in bare if unit != shown.get(unit.batch) and (unit.beyond or unit.batch in shown)]


def _smallest(
    plan: Plan, trials: Sequence[Trial], pace: Pace, arms: Mapping[str, bool], evaluations: int
) -> Smallest | None:
    """Return the smallest audit with a result, on one sample; None if no applicable attack was tried."""
    batch, two = min(plan.batches), dict(list(arms.items())[:2])
    one, alone = of_samples(plan, trials, 1)
    costs: dict[str, float] = {}
    for unit in _units(one, alone, pace, two, {title(m, b): fewest(m, evaluations) for m, b in one.searches}):
        if unit.applies and unit.seconds is not None and not unit.beyond:
            costs[unit.method.name] = costs.get(unit.method.name, 0.0) + unit.seconds
    if not costs:
        return None
    attack = min(costs, key=costs.__getitem__)
    timed = {t.title.partition(" ")[0]: t for t in reversed(alone) if t.tried}
    late = dict.fromkeys(t.title.partition(" ")[0] for t in alone if not t.tried)
    step, start = (max((getattr(t, n) for t in timed.values()), default=0.0) for n in ("evaluation", "start"))
    untried = sum(start + max(TIMED, m.evaluations) * step for m in METHODS if m.name in late)
    return Smallest(batch, attack, timed[attack].evaluation, list(two), costs[attack], untried)


def of_samples(plan: Plan, trials: Sequence[Trial], samples: int) -> tuple[Plan, list[Trial]]:
    """Return the plan reduced to `samples` samples at the smallest batch size, and the plan's trials.

    The time of a call is scaled by its number of samples.
    """
    size: int = AttackSpec.model_fields["victims_per_call"].default
    batch = min(plan.batches)
    fewer = replace(plan, batches=[batch], samples=samples)
    share = min(_victims(fewer, batch), size) / min(_victims(plan, batch), size)
    own = [trial for trial in trials if f" batch {batch}, " in trial.title]
    return fewer, [replace(t, start=share * t.start, each=share * t.each, evaluation=share * t.evaluation) for t in own]


def crowded(plan: Plan, trials: Sequence[Trial], seconds: float) -> bool:
    """Return whether `seconds` are too few for the user's defences, so that larger batches should not be tried.

    Returns False until all attacks have been tried at the smallest batch size.
    """
    batch = min(plan.batches)
    titles = {f"{title(m, batch)}, {twin}" for m in METHODS if m.takes(plan.modality, batch) for twin in TWINS}
    if not plan.asked or not titles <= {trial.title for trial in trials}:
        return False
    arms = dict.fromkeys((UNDEFENDED, *plan.defences), True)
    return not fit(replace(plan, batches=[batch]), trials, Pace(), arms, seconds).answers


def _units(
    plan: Plan, trials: Sequence[Trial], pace: Pace, arms: Mapping[str, bool], iterations: Mapping[str, int]
) -> list[Unit]:
    """Return all units in their default order; `iterations` maps titles of searches to their iterations.

    Small batches come first. Within a batch size the order is: all attacks on the undefended model and the first
    defence, on the other defences, and the undefended arm's attackers with more knowledge.
    """
    found, blind = [], list(TWINS)[:1]
    beyond = [twin for twin in TWINS if twin not in blind]
    for batch in plan.batches:
        methods = [method for method in METHODS if method.takes(plan.modality, batch)]
        groups = [(m, arm, blind if arm == UNDEFENDED else [*TWINS]) for m, arm in product(methods, list(arms)[:2])]
        groups += [(m, arm, [*TWINS]) for arm in list(arms)[2:] for m in methods]
        groups += [(m, UNDEFENDED, beyond) for m in methods]
        for method, arm, twins in groups:
            name, victims = title(method, batch), _victims(plan, batch)
            titles = tuple(f"{name}, {twin}" for twin in twins)
            own = [trial for trial in _twins(trials, name) if trial.title in titles]
            took = _seconds(own, iterations.get(name, 0)) * _calls(plan, batch)
            beside = sum(pace.observing.get((arm, twin), 0.0) + pace.scoring for twin in twins) * victims
            needed = took + beside if all(trial.tried for trial in own) else None
            obstacles = dict.fromkeys(trial.obstacle for trial in own)
            never = arms[arm] and all(trial.never for trial in own)
            obstacle = "; ".join(obstacles) if never else ""
            scoring = pace.scoring * len(titles) * victims
            applies, more = "" in obstacles, twins == beyond
            found.append(Unit(arm, method, batch, titles, needed, applies, obstacle, scoring, more))
    return found


def _seconds(twins: Sequence[Trial], iterations: int) -> float:
    """Return the estimated seconds of one call of each of an attack's attackers, in total.

    For searches the shortest start is used, because the first call may have loaded files. The slowest pace is used,
    because only the start of the other searches may have been timed.
    """
    able = [trial for trial in twins if not trial.obstacle and trial.each]
    start = min((trial.start for trial in able), default=0.0)
    return sum(start + _each(able) * iterations if t in able else t.start for t in twins)


def _step(plan: Plan, trials: Sequence[Trial], unit: Unit) -> float:
    """Return the estimated seconds of one iteration of all searches of a unit, on all samples."""
    able = [trial for trial in trials if trial.title in unit.titles and not trial.obstacle and trial.each]
    return len(able) * _each(able) * _calls(plan, unit.batch)


def _each(twins: Sequence[Trial]) -> float:
    return max((trial.each for trial in twins), default=0.0)


def too_slow_to_compare(plan: Plan, trials: Sequence[Trial], seconds: float) -> bool:
    """Return whether `seconds` are too few to compare two arms with the searches that were timed.

    The estimate is for the fastest search on one sample of the smallest batch, without a defence and by all attackers
    under one. Returns False if a closed form applies or no search was timed.
    """
    own = [trial for trial in trials if f" batch {min(plan.batches)}, " in trial.title]
    if any(not trial.obstacle and not trial.each for trial in own):
        return False
    evaluations = {method.name: fewest(method) for method in METHODS if method.evaluations}
    alone = of_samples(plan, [trial for trial in own if trial.each], 1)[1]
    least = min((evaluations[trial.title.partition(" ")[0]] * trial.each for trial in alone), default=0.0)
    return (1 + len(TWINS)) * least > seconds


def untimed(plan: Plan, trials: Sequence[Trial]) -> list[str]:
    """Return the titles of the searches that no trial timed, and that therefore have `FEWEST` evaluations."""
    twins = {title(*search): _twins(trials, title(*search)) for search in plan.searches}
    return [
        name
        for name, own in twins.items()
        if not any(trial.each for trial in own) and not all(trial.raised or not trial.tried for trial in own)
    ]


def of_calls(trials: Sequence[Trial], iterations: Mapping[str, int]) -> dict[str, float]:
    """Return the estimated seconds of one call of each attack, by the attack's title."""
    found = {}
    for trial in trials:
        name = trial.title.partition(",")[0]
        twins = [t for t in _twins(trials, name) if not t.obstacle and t.each]
        start = min((t.start for t in twins), default=trial.start) if trial in twins else trial.start
        found[trial.title] = start + (_each(twins) if trial in twins else 0.0) * iterations.get(name, 0)
    return found


def _twins(trials: Sequence[Trial], name: str) -> list[Trial]:
    return [trial for trial in trials if trial.title.startswith(f"{name},")]


def fewest(method: Method, evaluations: int = FEWEST) -> int:
    """Return the number of iterations, at least one, in which a method makes `evaluations` evaluations."""
    return max(1, -(-evaluations // method.evaluations))


def _victims(plan: Plan, batch: int) -> int:
    return -(-plan.samples // batch)


def _calls(plan: Plan, batch: int) -> int:
    """Return the number of calls of one attack on one arm."""
    size: int = AttackSpec.model_fields["victims_per_call"].default
    return -(-_victims(plan, batch) // size)


def _two_digits(number: int) -> int:
    unit: int = 10 ** max(floor(log10(number)) - 1, 0)
    return number // unit * unit
