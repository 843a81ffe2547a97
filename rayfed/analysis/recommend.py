"""Recommendation of a setting: the cheapest that satisfies all bounds, or the setting with the smallest excess.

A bound on leakage must hold for every attack on the setting. A setting that was not attacked satisfies no such bound,
and neither does a setting whose attacks did not work in every repeat. If updates are hidden and no attack decrypted
them, bounds on reconstructions hold.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from math import hypot, inf, isfinite
from typing import TYPE_CHECKING

from rayfed.analysis.figures import said
from rayfed.analysis.outcomes import yaml_line
from rayfed.analysis.promises import mixed
from rayfed.analysis.settings import Estimate, Setting, by_values, of_rebuilt
from rayfed.errors import UserError, nearest
from rayfed.evidence.arms import arm_and_opponent
from rayfed.metrics.known import METRICS
from rayfed.metrics.measures import MEASURES, extreme_of, measure_of
from rayfed.store.folder import SCENARIO

if TYPE_CHECKING:
    from rayfed.analysis.loading import Results

COSTS = ("train_seconds", "bytes_up")
"""Default costs: training time, then bytes sent by clients."""
SIMULATED = ("simulated_seconds", "bytes_up")
"""Default costs if all settings were simulated in virtual time."""
_BOUND = re.compile(r"\s*(\w+)\s*(<=|>=)\s*(\S+)\s*")


@dataclass(frozen=True)
class Bound:
    """Upper or lower bound on a measure."""

    measure: str
    limit: float
    at_most: bool

    def __str__(self) -> str:
        sign = "≤" if self.at_most else "≥"
        return f"{MEASURES[self.measure].title} {sign} {said(self.measure, self.limit)}"

    @property
    def on_attacks(self) -> bool:
        """Return whether the bound limits an attack's result, not a guarantee."""
        return MEASURES[self.measure].kind == "leakage" and not MEASURES[self.measure].proved

    def excess(self, value: float) -> float:
        """Return the amount by which a value exceeds the bound; 0 or less if the bound is satisfied."""
        return value - self.limit if self.at_most else self.limit - value

    def holds_for(self, estimate: Estimate) -> bool:
        """Return whether the whole 95 % interval of an estimate satisfies the bound."""
        end = estimate.high if self.at_most else estimate.low
        return end is not None and self.excess(end) <= 0


@dataclass(frozen=True)
class BoundCheck:
    """Result of checking one bound on one arm and set of swept values."""

    bound: Bound
    setting: Setting | None
    """Setting with the attack that exceeds the bound most, or is closest to it; any setting if there was nothing to
    attack; None if the measure is unknown."""
    sure: bool | None
    """Whether the whole interval satisfies the bound, for every attack; None for a single repeat."""
    share: float
    """Excess of the mean over the bound, relative to the range of all settings' values and the bound. 0 if the bound is
    satisfied, infinite if the measure is unknown."""

    @property
    def estimate(self) -> Estimate | None:
        """Return the estimate that is compared with the bound."""
        return self.setting.evidence(self.bound.measure) if self.setting else None


@dataclass(frozen=True)
class Candidate:
    """Candidate for a recommendation: one arm with one set of swept values, over all attacks."""

    settings: list[Setting]
    """One setting per attack, or one without an attack if it was not attacked."""
    checks: list[BoundCheck]

    @property
    def miss(self) -> tuple[int, float]:
        """Return the number of bounds on unknown measures, and the Euclidean norm of the other bounds' excesses."""
        known = [check.share for check in self.checks if check.setting]
        return len(self.checks) - len(known), hypot(*known)

    @property
    def meets(self) -> bool:
        """Return whether the candidate satisfies all bounds."""
        return self.miss == (0, 0.0)

    @property
    def title(self) -> str:
        """Return the name of the candidate: the arm with the swept values."""
        return self.settings[0].title

    def cost(self, measure: str) -> tuple[float, float]:
        """Return the ends of a cost's interval; the mean twice without an interval; infinity if unknown."""
        known = self.settings[0].measures.get(measure)
        if known is None:
            return inf, inf
        return (known.mean if known.low is None else known.low), (known.mean if known.high is None else known.high)


@dataclass(frozen=True)
class Recommendation:
    """Recommended candidate under given bounds, with alternatives and excluded settings."""

    bounds: list[Bound]
    costs: tuple[str, ...]
    chosen: Candidate
    """Cheapest candidate that satisfies all bounds; if none does, the one with the smallest excess."""
    meeting: int
    """Number of settings that satisfy all bounds."""
    candidates: int
    unattacked: list[str]
    """Titles of settings that were not attacked; empty if no bound is on leakage."""
    tied: list[str]
    """Titles of settings that also satisfy all bounds and cost the same within their intervals."""
    refused: dict[str, str]
    """Title -> reason of settings that are never recommended."""


def bound(text: str) -> Bound:
    """Parse `MEASURE<=VALUE` or `MEASURE>=VALUE`. Raises `UserError` for anything else."""
    match = _BOUND.fullmatch(text)
    try:
        limit = float(match[3]) if match else inf
    except ValueError:
        limit = inf
    if match is None or not isfinite(limit):
        raise UserError(f"'{text}' is not a bound: write MEASURE<=VALUE or MEASURE>=VALUE, such as 'psnr<=12'")
    measure_of(match[1])
    return Bound(match[1], limit, match[2] == "<=")


def cost(name: str) -> str:
    """Return the name of a cost measure. Raises `UserError` for other measures, and for the time of attacks."""
    costs = [measure for measure, what in MEASURES.items() if what.kind == "cost" and measure != "attack_seconds"]
    if name not in costs:
        raise UserError(f"'{name}' is not a cost: {nearest(name, costs)}")
    return name


def usual_costs(settings: Sequence[Setting]) -> tuple[str, ...]:
    """Return the default measures of cost for the settings."""
    return SIMULATED if settings and all(SIMULATED[0] in each.measures for each in settings) else COSTS


def of_worst_image(given: Bound) -> Bound:
    """Return the bound on the best reconstruction instead of the mean, if there is such a measure."""
    column = extreme_of(given.measure) if given.measure in METRICS else ""
    return Bound(column, given.limit, given.at_most) if column in MEASURES else given


def recommend(
    settings: Sequence[Setting], bounds: Sequence[Bound], costs: tuple[str, ...] | None = None
) -> Recommendation:
    """Return the cheapest candidate whose means satisfy all bounds, or the candidate with the smallest `miss`.

    `costs` default to `usual_costs`. Raises `UserError` if there are no bounds or no settings, if a bounded measure is
    unknown for all settings, or if proved bounds of different guarantees would be compared.
    """
    if not bounds:
        raise UserError("no bound was given: add at least one, such as --max-psnr 12 --min-accuracy 0.97")
    if not settings:
        raise UserError("no trial has finished, so there is no setting to recommend: resume or rerun the sweep")
    costs = costs or usual_costs(settings)
    known = {name for each in settings for name in each.measures}
    for each in bounds:
        if each.measure not in known and MEASURES[each.measure].proved:
            raise UserError(f"no setting has an (epsilon, delta) guarantee: remove the bound on {each.measure}")
        if each.measure not in known:
            raise UserError(f"'{each.measure}' was not measured for any setting: {nearest(each.measure, known)}")
    for each in bounds:
        if found := mixed(settings, each.measure):
            raise UserError(f"{found}: remove the bound on {each.measure}, or use one kind of guarantee in all arms")
    spans = [_span(settings, each) for each in bounds]
    groups, leaks = by_values(settings), any(each.on_attacks for each in bounds)
    candidates = [
        Candidate(group, [_check(group, each, span) for each, span in zip(bounds, spans, strict=True)])
        for group in groups
        if not group[0].useless
    ]
    if not candidates:
        raise UserError("the accuracy of every setting is at chance level: train longer, or use weaker defences")
    meeting = [each for each in candidates if each.meets]
    least = min(each.miss for each in candidates)
    cheapest = [each for each in candidates if each.miss == least]
    for name in costs:
        bar = min((each.cost(name) for each in cheapest), key=lambda ends: sum(ends))[1]
        cheapest = [each for each in cheapest if each.cost(name)[0] <= bar]
    chosen, *tied = sorted(cheapest, key=lambda each: [sum(each.cost(name)) for name in costs])
    unattacked = [each.title for each in candidates if leaks and each.settings[0].attack is None]
    refused = {group[0].title: group[0].useless for group in groups if group[0].useless}
    refused |= {each.title: why for each in candidates if (why := _unproven(each, chosen, bounds))}
    names = [each.title for each in tied]
    return Recommendation(list(bounds), costs, chosen, len(meeting), len(groups), unattacked, names, refused)


def _unproven(each: Candidate, chosen: Candidate, bounds: Sequence[Bound]) -> str:
    """Return why low leakage is no evidence for a candidate; for the chosen one, only if it holds in all repeats."""
    one, reasons = each.settings[0], []
    if any(of_rebuilt(bound.measure) for bound in bounds):
        reasons.append(one.unproven or one.unproven_in_part * (each is not chosen))
    if any(bound.measure == "inferred" for bound in bounds):
        asked = [met for met in each.settings if "inferred" in met.measures]
        names = " or ".join(str(met.attack) for met in asked if met.idle)
        shown = f"{names} is not shown to exceed chance without a defence"
        reasons.append(shown * (bool(asked) and all(met.idle for met in asked)))
    return "; ".join(filter(None, reasons))


def _span(settings: Sequence[Setting], bound: Bound) -> float:
    values = [each.measures[bound.measure].mean for each in settings if bound.measure in each.measures]
    return max(*values, bound.limit) - min(*values, bound.limit)


def _check(group: Sequence[Setting], bound: Bound, span: float) -> BoundCheck:
    known = [each for each in group if each.evidence(bound.measure)]
    if not known and of_rebuilt(bound.measure) and group[0].hidden:
        return BoundCheck(bound, group[0], None, 0.0)
    if not known:
        return BoundCheck(bound, None, False, inf)
    estimates = [each.measures[bound.measure] for each in known]
    farthest = max(known, key=lambda each: bound.excess(each.measures[bound.measure].mean))
    excess = bound.excess(farthest.measures[bound.measure].mean)
    if excess <= 0 and _without_merit(known, bound.measure):
        return BoundCheck(bound, None, False, inf)
    sure = None if any(each.n == 1 for each in estimates) else all(map(bound.holds_for, estimates))
    return BoundCheck(bound, farthest, sure, excess / span if excess > 0 else 0.0)


def _without_merit(known: Sequence[Setting], measure: str) -> bool:
    """Return whether low leakage may be due to attacks that failed, in some repeats or without a defence."""
    if of_rebuilt(measure):
        return any(each.inconclusive for each in known)
    return measure == "inferred" and all(each.idle for each in known)


def rerun(results: Results, chosen: Candidate) -> dict[str, str]:
    """Return the shell commands that rerun a candidate; keys describe what each command runs."""
    row, scenario = chosen.settings[0].rows[0], f"{results.url}/{SCENARIO}"
    arms = results.scenario.get("arms") or {}
    if row.get("run"):
        values = [f"{path}={yaml_line(value)}" for path, value in chosen.settings[0].fields.items()]
        single = {"this setting, with the seed of its first repeat": _launch(f"{results.url}/{row['run']}/{SCENARIO}")}
        return single | {"all arms, with these values": _launch(scenario, "sweep=null", *values)}
    if len(arms) < 2:
        return {"the run": _launch(scenario)}
    name = row["arm"] if row["arm"] in arms else arm_and_opponent(results.scenario, row["arm"])[0]
    own = {key: value for key, value in arms[name].items() if value} if isinstance(arms[name], dict) else arms[name]
    return {"this arm": _launch(scenario, f"arms={yaml_line({name: own})}"), "all arms": _launch(scenario)}


def _launch(scenario: str, *changes: str) -> str:
    return shlex.join(["rayfed", "launch", scenario, *(part for change in changes for part in ("--set", change))])
