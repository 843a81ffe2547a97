"""Comparison of a gate's result with the result of an earlier gate: whether significantly more leaks.

Each attacked update has one value: the mean over its samples of the best result of any attack. Values of the same
samples are compared by the paired t test (Student 1908), values of other samples by Welch's test (1947). Both are
one-sided, at a level of 5 % over all comparisons (Holm 1979).

One changed update among many is never significant: if one of n differences is not 0, t is 1. Therefore a rule is
added. If the same samples were attacked, an update that did not leak then and leaks now is a failure, and is listed.

If an attack of the baseline has no result here, or less than half of its iterations over all repeats, or if the run did
not finish, a missing increase is not measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from rayfed.evidence.checks import GateState
from rayfed.evidence.paired import holm
from rayfed.evidence.updates import AttackedUpdate
from rayfed.metrics.known import METRICS

LEVEL = 0.05
Updates = Sequence[Mapping[str, Any]]
"""Results on attacked updates, as in the gate's JSON document."""


class SignificanceTest(StrEnum):
    """Test of a difference between two results."""

    PAIRED_T = "paired t"
    """For the same samples."""
    WELCH_T = "Welch t"
    """For other samples."""


class ChangeReasonKind(StrEnum):
    """Kind of a reason of a change; the type of its fact is in brackets."""

    OTHER_ARM = "other_arm"
    """The arm is compared with an arm of another name (str)."""
    UNFINISHED = "unfinished"
    """The run did not finish."""
    FEWER_ITERATIONS = "fewer_iterations"
    """Attacks of the baseline have no result, or less than half of their iterations (a tuple of titles)."""
    ARM_MISSING = "arm_missing"
    """The run has no such arm of the baseline."""
    UPDATES_MISSING = "updates_missing"
    """Updates of the baseline were not measured (`MissingUpdates`)."""
    NO_VALUES = "no_values"
    """The run has no values that can be compared."""
    NO_BASELINE_VALUES = "no_baseline_values"
    """The baseline has no values that can be compared."""
    ONE_UPDATE = "one_update"
    """One update is too few for a test."""


class MissingUpdates(NamedTuple):
    """Updates of the baseline that were not measured."""

    number: int
    batches: tuple[int, ...]


class ChangeReason(NamedTuple):
    """Reason of the state of a change, or limit of the comparison."""

    kind: ChangeReasonKind
    fact: str | tuple[str, ...] | MissingUpdates | None = None


@dataclass(frozen=True)
class Change:
    """Change of one metric of leakage on one arm since the baseline."""

    run: int
    """Index of the run in the gate."""
    arm: str
    metric: str
    state: GateState
    """`FAILED`: significantly closer to the true samples; `INCONCLUSIVE`: closer, but too few updates to test."""
    test: SignificanceTest | None = None
    updates: int = 0
    """Number of pairs; without pairs, number of updates of the smaller side."""
    difference: float | None = None
    """Mean now minus mean of the baseline."""
    p: float | None = None
    """One-sided p value, corrected; None for too few updates."""
    reasons: tuple[ChangeReason, ...] = ()
    newly: tuple[AttackedUpdate, ...] = ()
    """Updates of the same samples that leak now and did not in the baseline; for the leading metric only."""

    @property
    def closer(self) -> bool:
        """Return whether results are closer to the true samples than in the baseline."""
        if self.difference is None:
            return False
        return self.difference > 0 if METRICS[self.metric].higher_is_closer else self.difference < 0

    def with_reason(self, reason: ChangeReason, state: GateState) -> Change:
        """Return the change with one more reason and another state."""
        return replace(self, state=state, reasons=(*self.reasons, reason))


class _Sides(NamedTuple):
    """Updates of an arm, now and in the baseline."""

    now: Updates
    then: Updates
    alike: bool
    """Whether the same samples were attacked."""


def compare_with_baseline(now: Mapping[str, Any], then: Mapping[str, Any]) -> list[Change]:
    """Return the changes of all arms and metrics between two results of a gate (`rayfed.report.gate`)."""
    found: list[Change] = []
    for index, run in enumerate(now["runs"]):
        nothing: dict[str, Any] = {"samples": "", "arms": [], "updates": [], "finished": True}
        baseline: Mapping[str, Any] = then["runs"][index] if index < len(then["runs"]) else nothing
        for arm in run["arms"]:
            found += _changes_of_arm(index, run, baseline, arm, now["metrics"])
        compared = {_counterpart(arm, run["arms"], baseline["arms"]) for arm in run["arms"]}
        missing = (ChangeReason(ChangeReasonKind.ARM_MISSING),)
        for arm in baseline["arms"]:
            if arm not in compared:
                found += [Change(index, arm, name, GateState.NOT_MEASURED, reasons=missing) for name in now["metrics"]]
    corrected = holm([change.p for change in found])
    return [_with_state(replace(change, p=p)) for change, p in zip(found, corrected, strict=True)]


def _changes_of_arm(
    index: int, run: Mapping[str, Any], baseline: Mapping[str, Any], arm: str, metrics: Sequence[str]
) -> list[Change]:
    """Return the changes of one arm, with uncorrected p values."""
    other = _counterpart(arm, run["arms"], baseline["arms"])
    mine = [update for update in run["updates"] if update["arm"] == arm]
    theirs = [update for update in baseline["updates"] if update["arm"] == other]
    sides = _Sides(mine, theirs, run["samples"] == baseline["samples"])
    weaker = _attacks_with_fewer_iterations(sides)
    found = []
    for name in metrics:
        newly = _newly_leaking(sides) if sides.alike and METRICS[name].leads else ()
        change = Change(index, arm, name, GateState.PASSED, newly=newly)
        if other != arm:
            change = change.with_reason(ChangeReason(ChangeReasonKind.OTHER_ARM, other), change.state)
        if not run["finished"]:
            change = change.with_reason(ChangeReason(ChangeReasonKind.UNFINISHED), GateState.NOT_MEASURED)
        elif weaker:
            reason = ChangeReason(ChangeReasonKind.FEWER_ITERATIONS, weaker)
            change = change.with_reason(reason, GateState.NOT_MEASURED)
        found.append(_with_difference(change, sides))
    return found


def _counterpart(arm: str, mine: Sequence[str], theirs: Sequence[str]) -> str:
    """Return the arm of the baseline that an arm is compared with: its namesake, or the only arm if both have one."""
    return theirs[0] if len(mine) == len(theirs) == 1 else arm


def _key(update: Mapping[str, Any]) -> AttackedUpdate:
    return AttackedUpdate(update["round"], update["batch"], update["victim"])


def _newly_leaking(sides: _Sides) -> tuple[AttackedUpdate, ...]:
    """Return the updates of an arm that leak now but not in the baseline."""
    then = {_key(update): update["leaked"] for update in sides.then}
    return tuple(_key(update) for update in sides.now if update["leaked"] and then.get(_key(update)) == 0)


def _attacks_with_fewer_iterations(sides: _Sides) -> tuple[str, ...]:
    """Return the attacks of the baseline that have no result here, or less than half of their iterations.

    For the same samples they are compared per update, for other samples per batch size.
    """
    needed: dict[AttackedUpdate | int, dict[str, int]] = {}
    for update in sides.then:
        least = needed.setdefault(_key(update) if sides.alike else update["batch"], {})
        for attack, iterations in update["attacks"].items():
            least[attack] = min(iterations, least.get(attack, iterations))
    weaker: dict[str, None] = {}
    for update in sides.now:
        least = needed.get(_key(update) if sides.alike else update["batch"], {})
        for attack, iterations in least.items():
            if 2 * update["attacks"].get(attack, -1) < iterations:
                weaker[attack] = None
    return tuple(weaker)


def _values(updates: Updates, name: str) -> dict[AttackedUpdate, float]:
    """Return the values of a metric by update."""
    return {_key(update): update["values"][name] for update in updates if name in update["values"]}


def _with_difference(change: Change, sides: _Sides) -> Change:
    """Return a change with its difference and its uncorrected p value.

    Batch sizes that only one side has are not compared. If only the baseline has an update, the change is not
    measured.
    """
    mine, theirs = _values(sides.now, change.metric), _values(sides.then, change.metric)
    batches = {key.batch for key in mine} & {key.batch for key in theirs}
    gone = theirs.keys() - mine.keys() if sides.alike else {key for key in theirs if key.batch not in batches}
    if gone and mine:
        missing = MissingUpdates(len(gone), tuple(sorted({key.batch for key in gone})))
        reason = ChangeReason(ChangeReasonKind.UPDATES_MISSING, missing)
        change = change.with_reason(reason, GateState.NOT_MEASURED)
    mine = {key: value for key, value in mine.items() if key.batch in batches}
    theirs = {key: value for key, value in theirs.items() if key.batch in batches}
    if not mine or not theirs:
        kind = ChangeReasonKind.NO_BASELINE_VALUES if mine else ChangeReasonKind.NO_VALUES
        measured_before = change.state != GateState.NOT_MEASURED
        return change.with_reason(ChangeReason(kind), GateState.NOT_MEASURED) if measured_before else change
    pairs = sorted(mine.keys() & theirs.keys()) if sides.alike else []
    side = "greater" if METRICS[change.metric].higher_is_closer else "less"
    if pairs:
        differences = np.array([mine[key] - theirs[key] for key in pairs])
        p = _paired_p(differences, side) if len(pairs) > 1 else None
        mean = float(differences.mean())
        return replace(change, test=SignificanceTest.PAIRED_T, updates=len(pairs), difference=mean, p=p)
    now, then = list(mine.values()), list(theirs.values())
    fewer = min(len(now), len(then))
    p = _welch_p(now, then, side) if fewer > 1 else None
    mean = fmean(now) - fmean(then)
    return replace(change, test=SignificanceTest.WELCH_T, updates=fewer, difference=mean, p=p)


def _paired_p(differences: np.ndarray, side: str) -> float:
    if not np.ptp(differences):  # all equal, so t is undefined
        return 0.0 if (differences[0] > 0) == (side == "greater") and differences[0] else 1.0
    from scipy import stats  # slow import (about 1 s)

    return float(stats.ttest_1samp(differences, 0, alternative=side).pvalue)


def _welch_p(mine: Sequence[float], theirs: Sequence[float], side: str) -> float:
    if not np.ptp(mine) and not np.ptp(theirs):
        return 0.0 if (mine[0] > theirs[0]) == (side == "greater") and mine[0] != theirs[0] else 1.0
    from scipy import stats  # slow import (about 1 s)

    return float(stats.ttest_ind(mine, theirs, equal_var=False, alternative=side).pvalue)


def _with_state(change: Change) -> Change:
    """Return a change with its state, given its corrected p value."""
    if change.newly:
        return replace(change, state=GateState.FAILED)
    if not change.closer:
        return change
    if change.p is None:
        return change.with_reason(ChangeReason(ChangeReasonKind.ONE_UPDATE), GateState.INCONCLUSIVE)
    return replace(change, state=GateState.FAILED) if change.p <= LEVEL else change
