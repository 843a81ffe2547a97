"""Recommendation of a setting: the cheapest that satisfies all bounds, or the setting with the smallest excess.

A bound on leakage must hold for every attack on the setting. A setting satisfies no such bound if it was not attacked,
or if its attacks did not work in every repeat. If updates are hidden and no attack decrypted
them, bounds on reconstructions hold.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import hypot, inf, isfinite
from typing import NamedTuple

from rayfed.errors import UserError, nearest
from rayfed.evidence.guarantee_compat import list_kinds, mixed_guarantees
from rayfed.evidence.settings import (
    MeanEstimate,
    Setting,
    Weakness,
    describes_attacks,
    describes_samples,
    group_by_values,
)
from rayfed.metrics.known import METRICS
from rayfed.metrics.measures import MEASURES, extreme_of, measure_of

COSTS = ("train_seconds", "bytes_up")
"""Default costs: training time, then bytes sent by clients."""
SIMULATED = ("simulated_seconds", "bytes_up")
"""Default costs if all settings were simulated in virtual time."""
_BOUND = re.compile(r"\s*(\w+)\s*(<=|>=)\s*(\S+)\s*")


@dataclass(frozen=True)
class MeasureBound:
    """Upper or lower bound on a measure."""

    measure: str
    limit: float
    at_most: bool

    @property
    def on_attacks(self) -> bool:
        """Return whether the bound limits an attack's result, not a guarantee."""
        return describes_attacks(self.measure)

    def excess(self, value: float) -> float:
        """Return the amount by which a value exceeds the bound; 0 or less if the bound is satisfied."""
        return value - self.limit if self.at_most else self.limit - value

    def holds_for(self, estimate: MeanEstimate) -> bool:
        """Return whether the whole 95 % interval of an estimate satisfies the bound."""
        end = estimate.high if self.at_most else estimate.low
        return end is not None and self.excess(end) <= 0


@dataclass(frozen=True)
class BoundCheck:
    """Result of checking one bound on one arm and set of swept values."""

    bound: MeasureBound
    setting: Setting | None
    """Setting with the attack that exceeds the bound most, or is closest to it; any setting if there was nothing to
    attack; None if the measure is unknown."""
    sure: bool | None
    """Whether the whole interval satisfies the bound, for every attack; None for a single repeat."""
    share: float
    """Excess of the mean over the bound, relative to the range of all settings' values and the bound. 0 if the bound is
    satisfied, infinite if the measure is unknown."""

    @property
    def estimate(self) -> MeanEstimate | None:
        """Return the estimate that is compared with the bound."""
        return self.setting.evidence(self.bound.measure) if self.setting else None


@dataclass(frozen=True)
class ArmCandidate:
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
        low = known.mean if known.low is None else known.low
        high = known.mean if known.high is None else known.high
        return low, high


class Refusal(NamedTuple):
    """Setting that is not recommended, with the reasons."""

    setting: Setting
    weaknesses: tuple[Weakness, ...]
    idle_attacks: tuple[str, ...] = ()
    """Inference attacks that are not shown to exceed chance without a defence (`Weakness.IDLE`)."""


@dataclass(frozen=True)
class Recommendation:
    """Recommended candidate under given bounds, with alternatives and excluded settings."""

    bounds: list[MeasureBound]
    costs: tuple[str, ...]
    chosen: ArmCandidate
    """Cheapest candidate that satisfies all bounds; if none does, the one with the smallest excess."""
    meeting: int
    """Number of settings that satisfy all bounds."""
    candidates: int
    unattacked: list[ArmCandidate]
    """Candidates that were not attacked; empty if no bound is on leakage."""
    tied: list[ArmCandidate]
    """Candidates that also satisfy all bounds and cost the same within their intervals."""
    refused: list[Refusal]
    """Settings that are never recommended."""


def parse_bound(text: str) -> MeasureBound:
    """Parse `MEASURE<=VALUE` or `MEASURE>=VALUE`. Raises `UserError` for anything else."""
    match = _BOUND.fullmatch(text)
    try:
        limit = float(match[3]) if match else inf
    except ValueError:
        limit = inf
    if match is None or not isfinite(limit):
        raise UserError(f"'{text}' is not a bound: write MEASURE<=VALUE or MEASURE>=VALUE, such as 'psnr<=12'")
    measure_of(match[1])
    return MeasureBound(match[1], limit, match[2] == "<=")


def check_cost(name: str) -> str:
    """Return the name of a cost measure. Raises `UserError` for other measures, and for the time of attacks."""
    costs = [measure for measure, what in MEASURES.items() if what.kind == "cost" and measure != "attack_seconds"]
    if name not in costs:
        raise UserError(f"'{name}' is not a cost: {nearest(name, costs)}")
    return name


def default_costs(settings: Sequence[Setting]) -> tuple[str, ...]:
    """Return the default measures of cost for the settings."""
    simulated = bool(settings) and all(SIMULATED[0] in one.measures for one in settings)
    return SIMULATED if simulated else COSTS


def bound_on_best(bound: MeasureBound) -> MeasureBound:
    """Return the bound on the best reconstruction instead of the mean, if there is such a measure."""
    column = extreme_of(bound.measure) if bound.measure in METRICS else ""
    return MeasureBound(column, bound.limit, bound.at_most) if column in MEASURES else bound


def recommend_setting(
    settings: Sequence[Setting], bounds: Sequence[MeasureBound], costs: tuple[str, ...] | None = None
) -> Recommendation:
    """Return the cheapest candidate whose means satisfy all bounds, or the candidate with the smallest `miss`.

    `costs` default to `default_costs`. Raises `UserError` if there are no bounds or no settings, if a bounded measure
    is unknown for all settings, or if proved bounds of different guarantees would be compared.
    """
    _check_input(settings, bounds)
    costs = costs or default_costs(settings)
    groups = group_by_values(settings)
    candidates = _candidates(settings, groups, bounds)
    if not candidates:
        raise UserError("the accuracy of every setting is at chance level: train longer, or use weaker defences")
    chosen, *tied = _cheapest(candidates, costs)
    refused = [Refusal(group[0], (Weakness.AT_CHANCE,)) for group in groups if group[0].useless]
    for one in candidates:
        refusal = _refusal(one, bounds, one is chosen)
        if refusal.weaknesses:
            refused.append(refusal)
    return Recommendation(
        bounds=list(bounds),
        costs=costs,
        chosen=chosen,
        meeting=sum(one.meets for one in candidates),
        candidates=len(groups),
        unattacked=_unattacked(candidates, bounds),
        tied=tied,
        refused=refused,
    )


def _check_input(settings: Sequence[Setting], bounds: Sequence[MeasureBound]) -> None:
    """Raise `UserError` if the bounds cannot be checked on the settings."""
    if not bounds:
        raise UserError("no bound was given: add at least one, such as --max-psnr 12 --min-accuracy 0.97")
    if not settings:
        raise UserError("no trial has finished, so there is no setting to recommend: resume or rerun the sweep")
    known = {name for one in settings for name in one.measures}
    for bound in bounds:
        if bound.measure in known:
            continue
        if MEASURES[bound.measure].proved:
            raise UserError(f"no setting has an (epsilon, delta) guarantee: remove the bound on {bound.measure}")
        raise UserError(f"'{bound.measure}' was not measured for any setting: {nearest(bound.measure, known)}")
    for bound in bounds:
        if kinds := mixed_guarantees(settings, bound.measure):
            raise UserError(
                f"{bound.measure}: guarantees of different kinds cannot be compared ({list_kinds(kinds)}): remove the "
                f"bound on {bound.measure}, or use one kind of guarantee in all arms"
            )


def _candidates(
    settings: Sequence[Setting], groups: Sequence[list[Setting]], bounds: Sequence[MeasureBound]
) -> list[ArmCandidate]:
    """Return a candidate for each group of settings with a useful model; a group differs only in the attack."""
    spans = [_span(settings, bound) for bound in bounds]
    found = []
    for group in groups:
        if not group[0].useless:
            checks = [_check(group, bound, span) for bound, span in zip(bounds, spans, strict=True)]
            found.append(ArmCandidate(group, checks))
    return found


def _cheapest(candidates: Sequence[ArmCandidate], costs: Sequence[str]) -> list[ArmCandidate]:
    """Return the candidates with the smallest miss whose costs do not differ significantly, cheapest first."""
    miss = min(one.miss for one in candidates)
    cheapest = [one for one in candidates if one.miss == miss]
    for name in costs:
        _, high = min((one.cost(name) for one in cheapest), key=sum)
        cheapest = [one for one in cheapest if one.cost(name)[0] <= high]
    return sorted(cheapest, key=lambda one: [sum(one.cost(name)) for name in costs])


def _unattacked(candidates: Sequence[ArmCandidate], bounds: Sequence[MeasureBound]) -> list[ArmCandidate]:
    """Return the candidates that were not attacked, if any bound is on an attack's result."""
    if not any(bound.on_attacks for bound in bounds):
        return []
    return [one for one in candidates if one.settings[0].attack is None]


def _refusal(one: ArmCandidate, bounds: Sequence[MeasureBound], chosen: bool) -> Refusal:
    """Return why low leakage is no evidence for a candidate.

    For the chosen candidate, inconclusive verdicts in some repeats do not count: remarks on it list them.
    """
    setting = one.settings[0]
    weaknesses: list[Weakness] = []
    idle: tuple[str, ...] = ()
    if any(describes_samples(bound.measure) for bound in bounds):
        if setting.unproven:
            weaknesses.append(setting.unproven)
        elif setting.inconclusive and not chosen:
            weaknesses.append(Weakness.PARTLY_INCONCLUSIVE)
    if any(bound.measure == "inferred" for bound in bounds):
        inferring = [each for each in one.settings if "inferred" in each.measures]
        if inferring and all(each.idle for each in inferring):
            weaknesses.append(Weakness.IDLE)
            idle = tuple(str(each.attack) for each in inferring)
    return Refusal(setting, tuple(weaknesses), idle)


def _span(settings: Sequence[Setting], bound: MeasureBound) -> float:
    """Return the range of a bounded measure over all settings and the bound."""
    values = [one.measures[bound.measure].mean for one in settings if bound.measure in one.measures]
    return max(*values, bound.limit) - min(*values, bound.limit)


def _check(group: Sequence[Setting], bound: MeasureBound, span: float) -> BoundCheck:
    """Return the result of checking a bound on a group of settings that differ only in the attack."""
    known = [one for one in group if one.evidence(bound.measure)]
    if not known and describes_samples(bound.measure) and group[0].hidden:
        return BoundCheck(bound, group[0], None, 0.0)
    if not known:
        return BoundCheck(bound, None, False, inf)
    farthest = max(known, key=lambda one: bound.excess(one.measures[bound.measure].mean))
    excess = bound.excess(farthest.measures[bound.measure].mean)
    if excess <= 0 and _without_merit(known, bound.measure):
        return BoundCheck(bound, None, False, inf)
    estimates = [one.measures[bound.measure] for one in known]
    sure = None
    if all(estimate.n > 1 for estimate in estimates):
        sure = all(bound.holds_for(estimate) for estimate in estimates)
    return BoundCheck(bound, farthest, sure, excess / span if excess > 0 else 0.0)


def _without_merit(known: Sequence[Setting], measure: str) -> bool:
    """Return whether low leakage may be due to attacks that failed, in some repeats or without a defence."""
    if describes_samples(measure):
        return any(one.inconclusive for one in known)
    return measure == "inferred" and all(one.idle for one in known)
