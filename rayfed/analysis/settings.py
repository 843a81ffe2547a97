"""Settings: outcomes grouped over repeats, with the uncertainty of each value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite, sqrt
from statistics import fmean, stdev
from typing import Any, Literal

from rayfed.evidence.arms import pairs_by_name
from rayfed.evidence.rows import Row
from rayfed.metrics.measures import MEASURES, measure_of
from rayfed.store.arms import owner_of

CONFIDENCE = 0.95
INAPPLICABLE = "not applicable"
"""Result of an attack that applies to no update of an arm."""
UNFINISHED = "A run did not finish, so attacks may be missing"
_ACCURACIES = "test_accuracy", "baseline_accuracy"


def of_rebuilt(measure: str) -> bool:
    """Return whether a measure describes reconstructed samples, not inferences or guarantees."""
    return of_attacks(measure) and measure != "inferred"


def of_attacks(measure: str) -> bool:
    """Return whether a measure is the result of an attack, not a guarantee."""
    return MEASURES[measure].kind == "leakage" and not MEASURES[measure].proved


@dataclass(frozen=True)
class Estimate:
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

    def within(self, measure: str) -> Estimate:
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
    measures: dict[str, Estimate]
    """Estimates by column of `outcomes.MEASURES`; measures without a value are missing."""
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
        return ", ".join([*filter(None, [self.source]), self.arm, *values])

    @property
    def applies(self) -> bool:
        """Return whether the attack applies to at least one update; also true without an attack."""
        return self.attack is None or any(row.get("result") != INAPPLICABLE for row in self.rows)

    @property
    def hidden(self) -> bool:
        """Return whether updates are encrypted or masked, so that attacks cannot use their values."""
        return any(row.get("verdict") == "nothing to attack" for row in self.rows)

    @property
    def unproven(self) -> str:
        """Return why poor reconstructions are no evidence of protection; empty if they are evidence."""
        if self.unfinished:
            return "its run did not finish"
        told = [row.get("verdict") for row in self.rows if row.get("attack")]
        if "not measured" in told:
            return f"a decisive attack returned no result{self._why('not measured')}"
        if told and all(verdict == "inconclusive" for verdict in told):
            why = self._why("inconclusive") or ": no attack is shown to work without a defence"
            return f"its verdict is inconclusive{why}"
        return ""

    def _why(self, answer: str) -> str:
        """Return the reasons of attacks with this result or verdict, after a colon; empty without reasons."""
        told = [row for row in self.rows if answer in (row.get("result"), row.get("verdict"))]
        reasons = dict.fromkeys(row["reason"] for row in told if row.get("reason"))
        return f": {'; '.join(reasons)}" if reasons else ""

    @property
    def unfinished(self) -> bool:
        """Return whether a run of the setting did not finish, so that attacks may be missing."""
        return any(row.get("state") not in (None, "finished") for row in self.rows)

    def doubted(self, measure: str) -> bool:
        """Return whether a low value of a leakage measure is no evidence of protection."""
        unknown = (of_rebuilt(measure) and bool(self.unproven)) or (of_attacks(measure) and self.unfinished)
        return unknown or measure in self.outdone

    @property
    def unanswered(self) -> tuple[int, int]:
        """Return the number of updates, over all repeats, on which the attack diverged or failed, and their total."""
        counts = [[row.get(name) or 0 for row in self.rows] for name in ("without_result", "attacked")]
        return sum(counts[0]), sum(counts[1])

    @property
    def useless(self) -> str:
        """Return the reason why the trained model is useless; empty if the model is useful."""
        accuracy, guessing = (estimate([row.get(name) for row in self.rows]) for name in _ACCURACIES)
        useless = accuracy and guessing and accuracy.mean <= guessing.mean
        return "its accuracy does not beat the majority class" if useless else ""

    @property
    def collapsed(self) -> int:
        """Return the number of repeats that do not beat the majority class, if the mean does; otherwise 0."""
        known = [row for row in self.rows if None not in map(row.get, _ACCURACIES)]
        return 0 if self.useless else sum(row["test_accuracy"] <= row["baseline_accuracy"] for row in known)

    @property
    def inconclusive(self) -> int:
        """Return the number of repeats with an inconclusive verdict; 0 if all repeats are inconclusive."""
        count = sum(row.get("verdict") == "inconclusive" for row in self.rows if row.get("attack"))
        return count if count < len(self.rows) else 0

    @property
    def unproven_in_part(self) -> str:
        """Return a sentence on the inconclusive repeats with reasons; empty if none or all are inconclusive."""
        count = self.inconclusive
        said = f"{count} of {len(self.rows)} repeats {'is' if count == 1 else 'are'} inconclusive"
        return f"{said}{self._why('inconclusive')}" if count else ""

    def evidence(self, measure: str) -> Estimate | None:
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


def settings(
    rows: Sequence[Row], fields: Sequence[str] = (), source: str = "", scenario: Row | None = None
) -> list[Setting]:
    """Return the outcomes grouped by arm, attack and swept values; exclude failed and stopped trials.

    Swept `fields` of an arm are values of this arm only. Without a scenario, arms have no opponents.
    """
    pairs = {row["arm"]: (row["arm"], "") for row in rows} if scenario is None else pairs_by_name(scenario)
    owners = {path: owner_of(path, {arm for arm, _ in pairs.values()})[0] for path in fields}
    groups: dict[tuple[Any, ...], dict[Any, Row]] = {}
    for row in rows:
        if row.get("status", "finished") == "finished":
            key = row["arm"], row["attack"], *(repr(row.get(f)) for f in fields)
            mine = groups.setdefault(key, {})
            seed = row.get("seed")
            mine.setdefault(len(mine) if seed is None else ("seed", seed), row)  # equal seeds give equal runs
    found = []
    for (name, *_), group in groups.items():
        own = [path for path, owner in owners.items() if owner in (None, pairs.get(name, (name, ""))[0])]
        found.append(_setting(list(group.values()), own, source))
    return found


def _setting(group: list[Row], fields: Sequence[str], source: str) -> Setting:
    first = group[0]
    mine = {path: first.get(path) for path in fields}
    measures = {name: e for name in MEASURES if (e := _over_repeats(name, group)) is not None}
    return Setting(source, first["arm"], first["attack"], mine, measures, group)


def _over_repeats(name: str, group: Sequence[Row]) -> Estimate | None:
    """Return an estimate over repeats; for a proved bound, the weakest bound.

    A single training time has the interval over its rounds.
    """
    values = [row.get(name) for row in group]
    found = estimate(values)
    if name == "train_seconds" and found and len(group) == 1 and (half := group[0].get("train_seconds_half")):
        return replace(found, low=found.mean - half, high=found.mean + half, over="rounds").within(name)
    if not MEASURES[name].proved:
        return found and found.within(name)
    promised = [float(value) for value in values if value is not None and isfinite(value)]
    if len(promised) < len(values):
        return None
    return Estimate(max(promised), max(promised), max(promised), len(promised))


def estimate(values: Sequence[float | None]) -> Estimate | None:
    """Return the mean of the finite values with an interval; None without finite values."""
    known = [float(v) for v in values if v is not None and isfinite(v)]
    if not known:
        return None
    mean = fmean(known)
    if len(known) == 1:
        return Estimate(mean, None, None, 1)
    from scipy.stats import t  # slow import (about 1 s)

    half = float(t.ppf((1 + CONFIDENCE) / 2, len(known) - 1)) * stdev(known) / sqrt(len(known))
    return Estimate(mean, mean - half, mean + half, len(known), pair=pair_of(known))


def pair_of(values: Sequence[float]) -> tuple[float, float] | None:
    """Return exactly two values, sorted; None for any other number of values."""
    return (min(values), max(values)) if len(values) == 2 else None


def strongest(settings: Sequence[Setting], measure: str) -> list[Setting]:
    """Return each arm and set of swept values once, with the attack that leaks most by a measure.

    Ties go to the first attack. Settings without a value of the measure are excluded, so an arm that was not attacked
    has no leakage. Raises `UserError` for an unknown measure.
    """
    sign = -1 if measure_of(measure).higher_is_better else 1
    known = [each for each in settings if measure in each.measures]
    return [max(group, key=lambda s: sign * s.measures[measure].mean) for group in by_values(known)]


def by_values(settings: Sequence[Setting]) -> list[list[Setting]]:
    """Group the settings that differ only in the attack."""
    groups: dict[tuple[str, str, str], list[Setting]] = {}
    for each in settings:
        groups.setdefault(each.identity, []).append(each)
    return list(groups.values())


def _short(value: Any) -> str:
    return "null" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
