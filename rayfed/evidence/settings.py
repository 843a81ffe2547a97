"""Settings: outcomes grouped over repeats, with the uncertainty of each value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import isfinite, sqrt
from statistics import fmean, stdev
from typing import Any, Literal

from rayfed.evidence.arms import pairs_by_name
from rayfed.evidence.rows import Row
from rayfed.metrics.measures import MEASURES, measure_of
from rayfed.store.arms import find_owner
from rayfed.store.finding import State
from rayfed.store.schemas import INAPPLICABLE

CONFIDENCE = 0.95


class Weakness(StrEnum):
    """Reason why low leakage of a setting is no evidence of protection, or why its model is useless."""

    AT_CHANCE = "at_chance"
    """The accuracy does not exceed that of the majority class."""
    UNFINISHED = "unfinished"
    """A run of the setting did not finish, so attacks may be missing."""
    NO_RESULT = "no_result"
    """The verdict is "not measured": a decisive attack returned no result."""
    INCONCLUSIVE = "inconclusive"
    """The verdict is inconclusive in all repeats."""
    PARTLY_INCONCLUSIVE = "partly_inconclusive"
    """The verdict is inconclusive in some repeats."""
    IDLE = "idle"
    """No inference attack on the setting is shown to exceed chance without a defence."""


def describes_samples(measure: str) -> bool:
    """Return whether a measure describes reconstructed samples, not inferences or guarantees."""
    return describes_attacks(measure) and measure != "inferred"


def describes_attacks(measure: str) -> bool:
    """Return whether a measure is the result of an attack, not a guarantee."""
    return MEASURES[measure].kind == "leakage" and not MEASURES[measure].proved


@dataclass(frozen=True)
class MeanEstimate:
    """Estimate of one value: mean with interval."""

    mean: float
    low: float | None
    """Lower end of the 95 % interval of the mean (Student's t); None for a single repeat."""
    high: float | None
    n: int
    over: Literal["repeats", "victims", "rounds"] = "repeats"
    """Unit that the interval is over; each repeat has its own seed."""
    cut: bool = False
    """Whether an end of the interval was clipped to the possible values."""
    pair: tuple[float, float] | None = None
    """Both values, sorted, if there are two. Decisions use their interval; tables show the two values instead."""

    def within(self, measure: str) -> MeanEstimate:
        """Return the estimate with the interval clipped to the possible values of a measure."""
        if self.low is None or self.high is None:
            return self
        least, most = MEASURES[measure].bounds
        low, high = max(self.low, least), min(self.high, most)
        return replace(self, low=low, high=high, cut=(low, high) != (self.low, self.high))

    @property
    def spread(self) -> tuple[float, float] | None:
        """Return the ends of the interval; None for a single value or equal values."""
        if self.low is None or self.high is None or self.high - self.low <= 2e-12 * max(1, abs(self.mean)):
            return None
        return self.low, self.high

    @property
    def interval(self) -> tuple[float, float] | None:
        """Return the ends of the interval; None also for two values, whose interval is too wide to be useful."""
        return None if self.pair else self.spread


@dataclass(frozen=True)
class Setting:
    """Arm with one set of values of the swept fields, under one attack or none."""

    source: str
    """Name of the run of this setting if several runs are compared, else empty."""
    arm: str
    attack: str | None
    fields: dict[str, Any]
    """Values of swept fields, without fields of other arms."""
    measures: dict[str, MeanEstimate]
    """Estimates by name in `rayfed.metrics.measures.MEASURES`; measures without a value are missing."""
    rows: list[Row]
    """Outcomes of the repeats."""
    outdone: Mapping[str, str] = field(default_factory=dict)
    """By measure, an attack with less knowledge and a better result: it failed (`rayfed.evidence.knowledge_pairs`)."""
    idle: bool = False
    """Whether no undefended arm shows that the attack infers more than chance (`rayfed.evidence.baseline_check`)."""

    @property
    def title(self) -> str:
        """Return the name of the setting: `noise, sigma 0.1`."""
        values = [f"{path.rpartition('.')[2]} {_short(value)}" for path, value in self.fields.items()]
        source = [self.source] if self.source else []
        return ", ".join([*source, self.arm, *values])

    @property
    def applies(self) -> bool:
        """Return whether the attack applies to at least one update; also true without an attack."""
        return self.attack is None or any(row.get("result") != INAPPLICABLE for row in self.rows)

    @property
    def hidden(self) -> bool:
        """Return whether updates are encrypted or masked, so that attacks cannot use their values."""
        return any(row.get("verdict") == State.NOTHING_TO_ATTACK for row in self.rows)

    @property
    def unproven(self) -> Weakness | None:
        """Return why poor reconstructions are no evidence of protection; None if they are evidence."""
        if self.unfinished:
            return Weakness.UNFINISHED
        verdicts = [row.get("verdict") for row in self.rows if row.get("attack")]
        if State.NOT_MEASURED in verdicts:
            return Weakness.NO_RESULT
        if verdicts and all(verdict == State.INCONCLUSIVE for verdict in verdicts):
            return Weakness.INCONCLUSIVE
        return None

    @property
    def unfinished(self) -> bool:
        """Return whether a run of the setting did not finish, so that attacks may be missing."""
        return any(row.get("state") not in (None, "finished") for row in self.rows)

    def doubted(self, measure: str) -> bool:
        """Return whether a low value of a leakage measure is no evidence of protection."""
        if measure in self.outdone:
            return True
        if describes_samples(measure) and self.unproven:
            return True
        return describes_attacks(measure) and self.unfinished

    @property
    def unanswered(self) -> tuple[int, int]:
        """Return the number of updates, over all repeats, on which the attack diverged or failed, and their total."""
        without_result = sum(row.get("without_result") or 0 for row in self.rows)
        return without_result, sum(row.get("attacked") or 0 for row in self.rows)

    @property
    def useless(self) -> bool:
        """Return whether the trained model is useless: its mean accuracy does not exceed the majority class's."""
        accuracy = estimate_mean([row.get("test_accuracy") for row in self.rows])
        majority = estimate_mean([row.get("baseline_accuracy") for row in self.rows])
        return accuracy is not None and majority is not None and accuracy.mean <= majority.mean

    @property
    def weaknesses(self) -> list[Weakness]:
        """Return why the setting is not compared with others; empty if it is."""
        found = [Weakness.AT_CHANCE] if self.useless else []
        return [*found, self.unproven] if self.unproven else found

    @property
    def collapsed(self) -> int:
        """Return the number of repeats that do not exceed the majority class, if the mean does; otherwise 0."""
        if self.useless:
            return 0
        count = 0
        for row in self.rows:
            accuracy, majority = row.get("test_accuracy"), row.get("baseline_accuracy")
            if accuracy is not None and majority is not None and accuracy <= majority:
                count += 1
        return count

    @property
    def inconclusive(self) -> int:
        """Return the number of repeats with an inconclusive verdict; 0 if all repeats are inconclusive."""
        count = sum(row.get("verdict") == State.INCONCLUSIVE for row in self.rows if row.get("attack"))
        return count if count < len(self.rows) else 0

    def partly_doubted(self, measure: str) -> bool:
        """Return whether a low value of a measure is no evidence of protection in some repeats."""
        return describes_samples(measure) and self.inconclusive > 0

    def evidence(self, measure: str) -> MeanEstimate | None:
        """Return the estimate of a measure; None if the estimate is unknown or no evidence of protection."""
        return None if self.doubted(measure) else self.measures.get(measure)

    def seeds(self, measure: str) -> frozenset[int]:
        """Return the seeds for which a measure is known; empty for a run, whose outcomes have no seed."""
        known = (row for row in self.rows if row.get(measure) is not None)
        return frozenset(row["seed"] for row in known if row.get("seed") is not None)

    @property
    def identity(self) -> tuple[str, str, str]:
        """Return a key that is equal for all attacks on the same arm and swept values."""
        return self.source, self.arm, repr(self.fields)


def group_settings(
    rows: Sequence[Row], fields: Sequence[str] = (), source: str = "", scenario: Row | None = None
) -> list[Setting]:
    """Return the outcomes grouped by arm, attack and swept values; exclude failed and stopped trials.

    Swept `fields` of an arm are values of this arm only. Without a scenario, arms have no opponents.
    """
    arms = {row["arm"]: row["arm"] for row in rows}
    if scenario is not None:
        arms = {name: arm for name, (arm, _) in pairs_by_name(scenario).items()}
    owners = {path: find_owner(path, set(arms.values()))[0] for path in fields}
    found = []
    for group in _group_repeats(rows, fields):
        arm = group[0]["arm"]
        own = [path for path, owner in owners.items() if owner in (None, arms.get(arm, arm))]
        found.append(_setting(group, own, source))
    return found


def _group_repeats(rows: Sequence[Row], fields: Sequence[str]) -> list[list[Row]]:
    """Return the rows of finished trials by arm, attack and swept values; rows with equal seeds are equal runs."""
    groups: dict[tuple[Any, ...], dict[Any, Row]] = {}
    for row in rows:
        if row.get("status", "finished") != "finished":
            continue
        values = [repr(row.get(path)) for path in fields]
        group = groups.setdefault((row["arm"], row["attack"], *values), {})
        seed = row.get("seed")
        repeat = len(group) if seed is None else ("seed", seed)
        group.setdefault(repeat, row)
    return [list(group.values()) for group in groups.values()]


def _setting(group: list[Row], fields: Sequence[str], source: str) -> Setting:
    first = group[0]
    values = {path: first.get(path) for path in fields}
    measures = {}
    for name in MEASURES:
        value = _over_repeats(name, group)
        if value is not None:
            measures[name] = value
    return Setting(source, first["arm"], first["attack"], values, measures, group)


def _over_repeats(name: str, group: Sequence[Row]) -> MeanEstimate | None:
    """Return an estimate over repeats; for a proved bound, the weakest bound.

    A single training time has the interval over its rounds.
    """
    values = [row.get(name) for row in group]
    if MEASURES[name].proved:
        bounds = [float(value) for value in values if value is not None and isfinite(value)]
        if len(bounds) < len(values):
            return None
        return MeanEstimate(max(bounds), max(bounds), max(bounds), len(bounds))
    found = estimate_mean(values)
    if found is None:
        return None
    half = group[0].get("train_seconds_half")
    if name == "train_seconds" and len(group) == 1 and half:
        found = replace(found, low=found.mean - half, high=found.mean + half, over="rounds")
    return found.within(name)


def estimate_mean(values: Sequence[float | None]) -> MeanEstimate | None:
    """Return the mean of the finite values with an interval; None without finite values."""
    known = [float(v) for v in values if v is not None and isfinite(v)]
    if not known:
        return None
    mean = fmean(known)
    if len(known) == 1:
        return MeanEstimate(mean, None, None, 1)
    from scipy.stats import t  # slow import (about 1 s)

    half = float(t.ppf((1 + CONFIDENCE) / 2, len(known) - 1)) * stdev(known) / sqrt(len(known))
    return MeanEstimate(mean, mean - half, mean + half, len(known), pair=sort_pair(known))


def sort_pair(values: Sequence[float]) -> tuple[float, float] | None:
    """Return exactly two values, sorted; None for any other number of values."""
    return (min(values), max(values)) if len(values) == 2 else None


def select_strongest(settings: Sequence[Setting], measure: str) -> list[Setting]:
    """Return each arm and set of swept values once, with the attack that leaks most by a measure.

    Ties go to the first attack. Settings without a value of the measure are excluded, so an arm that was not attacked
    has no leakage. Raises `UserError` for an unknown measure.
    """
    sign = -1 if measure_of(measure).higher_is_better else 1
    known = [each for each in settings if measure in each.measures]
    found = []
    for group in group_by_values(known):
        found.append(max(group, key=lambda one: sign * one.measures[measure].mean))
    return found


def worst_verdict(settings: Sequence[Setting]) -> State | None:
    """Return the worst verdict over the attacks and repeats of some settings; None if no attack was run."""
    verdicts = {row.get("verdict") for one in settings if one.attack for row in one.rows}
    return next((state for state in State if state in verdicts), None)


def group_by_values(settings: Sequence[Setting]) -> list[list[Setting]]:
    """Group the settings that differ only in the attack."""
    groups: dict[tuple[str, str, str], list[Setting]] = {}
    for each in settings:
        groups.setdefault(each.identity, []).append(each)
    return list(groups.values())


def _short(value: Any) -> str:
    if value is None:
        return "null"
    return f"{value:g}" if isinstance(value, float) else str(value)
