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

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from math import isnan
from statistics import fmean
from typing import Any, Literal

import numpy as np

from rayfed.analysis.gate import Played, State
from rayfed.analysis.paired import holm
from rayfed.analysis.settings import INAPPLICABLE
from rayfed.analysis.unanswered import closed_forms, unanswered
from rayfed.analysis.verdicts import criterion_of
from rayfed.evidence.bounds import lacks_metric
from rayfed.evidence.rows import Row, labels_given
from rayfed.metrics.known import METRICS
from rayfed.store.schemas import UNPLAYED

LEVEL = 0.05
Test = Literal["paired t", "Welch t"]
Key = tuple[int, int, int]
"""Round, batch size and client of an attacked update."""


def attacked(images: Iterable[Row], texts: Iterable[Row]) -> str:
    """Return the SHA-256 digest of the set of attacked samples."""
    every = {(row["round"], row["victim"], row["sample"], repr(row["true"])) for row in [*images, *texts]}
    return sha256(repr(sorted(every)).encode()).hexdigest()


def updates(played: Played, metrics: Sequence[str], arms: Sequence[str]) -> list[dict[str, Any]]:
    """Return the results on every attacked update, by arm: round, batch size, client, values by metric.

    `attacks` are those with a result, with their maximum iterations over all repeats. A value is the mean over the
    update's samples of the best result of any attack, to four digits. `leaked` is the number of samples that leak by
    the run's own criterion.
    """
    criterion, closed = criterion_of(played.scenario, played.attacks), closed_forms(played.scenario)
    leaked: dict[tuple[str, Key], set[int]] = {}
    closest: dict[tuple[str, Key], dict[str, dict[int, float]]] = {}
    answered: dict[tuple[str, Key], dict[str, dict[int, int]]] = {}
    allowed = {one.get("label") or one["name"]: one.get("iterations") for one in played.scenario.get("attacks") or []}
    for row in played.attacks:
        if row["arm"] not in arms:
            continue
        key = row["arm"], (row["round"], row["batch_size"], row["victim"])
        lacks = any(lacks_metric(row, METRICS[name]) for name in metrics)
        if row["status"] not in (INAPPLICABLE, UNPLAYED) and not unanswered(row, closed) and not lacks:
            most = allowed.get(row["attack"]) or row.get("iterations") or 0  # some attacks stop early
            repeats = answered.setdefault(key, {}).setdefault(row["attack"], {})
            repeats[row["repeat"]] = max(most, repeats.get(row["repeat"], 0))
        if criterion.leaks(row):
            leaked.setdefault(key, set()).add(row["sample"])
        for name in metrics:
            value = row.get(name)
            given = METRICS[name].of_labels and labels_given(row)
            if value is None or isnan(value) or given:
                continue
            metric, found = METRICS[name], closest.setdefault(key, {}).setdefault(name, {})
            value, sample = min(value, metric.ceiling), row["sample"]
            found[sample] = (max if metric.higher_is_closer else min)(value, found.get(sample, value))
    return [
        {"arm": arm, "round": round, "batch": batch, "victim": victim}
        | {"leaked": len(leaked.get((arm, (round, batch, victim)), ()))}
        | {"attacks": {a: sum(n.values()) for a, n in answered.get((arm, (round, batch, victim)), {}).items()}}
        | {"values": {name: float(f"{fmean(found.values()):.4g}") for name, found in values.items()}}
        for (arm, (round, batch, victim)), values in sorted(closest.items(), key=lambda one: arms.index(one[0][0]))
    ]


@dataclass(frozen=True)
class Change:
    """Change of one metric of leakage on one arm since the baseline."""

    run: int
    """Index of the run in the gate."""
    arm: str
    metric: str
    state: State
    """`failed`: significantly closer to the true samples; `inconclusive`: closer, but too few updates to test."""
    test: Test | None = None
    updates: int = 0
    """Number of pairs; without pairs, number of updates of the smaller side."""
    difference: float | None = None
    """Mean now minus mean of the baseline."""
    p: float | None = None
    """One-sided p value, corrected; None for too few updates."""
    reason: str = ""
    newly: tuple[Key, ...] = ()
    """Updates of the same samples that leak now and did not in the baseline; for the leading metric only."""

    @property
    def details(self) -> str:
        """Return the compared samples, the newly leaking updates, and the reason of the state, as text."""
        kinds: dict[Test | None, str] = {"paired t": "same samples", "Welch t": "other samples"}
        compared = (
            f"{kinds[self.test]}, {self.test} test" if self.test and self.p is not None else kinds.get(self.test, "")
        )
        leaking = [f"client {victim} (round {round + 1}, batch {batch})" for round, batch, victim in self.newly]
        new = f"leaks now, but not in the baseline: {', '.join(leaking)}" if leaking else ""
        return "; ".join(filter(None, (compared, new, self.reason)))

    @property
    def sentence(self) -> str:
        """Return a one-line description of the change."""
        title = f"{self.arm}, {METRICS[self.metric].title} since the baseline: {self.state.upper()}"
        difference = "" if self.difference is None else f"{self.difference:+.3g} over {self.updates} updates"
        p = "" if self.p is None else f"p {self.p:.2g}"
        found = "; ".join(filter(None, (difference, p, self.details)))
        return title + (f": {found}" if found else "")


def changes(now: Mapping[str, Any], then: Mapping[str, Any]) -> list[Change]:
    """Return the changes of all arms and metrics between two results of a gate (`rayfed.report.gate`)."""
    found = []
    for run, mine in enumerate(now["runs"]):
        nothing: dict[str, Any] = {"samples": "", "arms": [], "updates": [], "finished": True}
        theirs: Mapping[str, Any] = then["runs"][run] if run < len(then["runs"]) else nothing
        alike = mine["samples"] == theirs["samples"]
        for arm in mine["arms"]:
            other = _counterpart(arm, mine["arms"], theirs["arms"])
            for name in now["metrics"]:
                values, before = _values(mine["updates"], arm, name), _values(theirs["updates"], other, name)
                reason = f"compared with arm {other} of the baseline" if other != arm else ""
                newly = _newly(mine["updates"], arm, theirs["updates"], other) if alike and METRICS[name].leads else ()
                short = _short(mine["updates"], arm, theirs["updates"], other, alike)
                short = short if mine["finished"] else "the run did not finish"
                state: State = "not measured" if short else "passed"
                reason = "; ".join(filter(None, [reason, short]))
                change = Change(run, arm, name, state, reason=reason, newly=newly)
                found.append(_change(change, values, before, alike))
        for arm in theirs["arms"]:
            if arm not in {_counterpart(one, mine["arms"], theirs["arms"]) for one in mine["arms"]}:
                gone = "this arm of the baseline is missing here"
                found += [Change(run, arm, name, "not measured", reason=gone) for name in now["metrics"]]
    corrected = holm([one.p for one in found])
    return [_judged(replace(one, p=p)) for one, p in zip(found, corrected, strict=True)]


def _counterpart(arm: str, mine: Sequence[str], theirs: Sequence[str]) -> str:
    """Return the arm of the baseline that an arm is compared with: its namesake, or the only arm if both have one."""
    return theirs[0] if len(mine) == len(theirs) == 1 else arm


def _newly(
    mine: Sequence[Mapping[str, Any]], arm: str, theirs: Sequence[Mapping[str, Any]], other: str
) -> tuple[Key, ...]:
    """Return the updates of an arm that leak now but not in the baseline."""
    now, then = (
        {(one["round"], one["batch"], one["victim"]): one["leaked"] for one in updates if one["arm"] == name}
        for updates, name in ((mine, arm), (theirs, other))
    )
    return tuple(key for key, leaked in now.items() if leaked and then.get(key) == 0)


def _short(
    mine: Sequence[Mapping[str, Any]], arm: str, theirs: Sequence[Mapping[str, Any]], other: str, alike: bool
) -> str:
    """Return the attacks of the baseline that have no result here, or less than half of their iterations.

    For the same samples they are compared per update, for other samples per batch size.
    """
    then: dict[Any, dict[str, int]] = {}
    for one in theirs:
        if one["arm"] == other:
            key = (one["round"], one["batch"], one["victim"]) if alike else one["batch"]
            before = then.setdefault(key, {})
            before |= {name: min(made, before.get(name, made)) for name, made in one["attacks"].items()}
    short: dict[str, None] = {}
    for one in mine:
        if one["arm"] == arm:
            asked = then.get((one["round"], one["batch"], one["victim"]) if alike else one["batch"], {})
            short |= dict.fromkeys(name for name, made in asked.items() if 2 * one["attacks"].get(name, -1) < made)
    return (
        f"attacks of the baseline with no result here, or less than half of their iterations: {', '.join(short)}"
        if short
        else ""
    )


def _values(updates: Sequence[Mapping[str, Any]], arm: str, name: str) -> dict[Key, float]:
    mine = [one for one in updates if one["arm"] == arm and name in one["values"]]
    return {(one["round"], one["batch"], one["victim"]): one["values"][name] for one in mine}


def _change(of: Change, mine: Mapping[Key, float], theirs: Mapping[Key, float], alike: bool) -> Change:
    """Return a change with its measurements and its uncorrected p value.

    Batch sizes that only one side has are not compared. If only the baseline has an update, the change is not
    measured.
    """
    both = {batch for _, batch, _ in mine} & {batch for _, batch, _ in theirs}
    gone = theirs.keys() - mine.keys() if alike else {key for key in theirs if key[1] not in both}
    if gone and mine:
        sizes = ", ".join(map(str, sorted({batch for _, batch, _ in gone})))
        gaps = f"{len(gone)} updates of the baseline were not measured, at batch {sizes}"
        of = replace(of, state="not measured", reason="; ".join(filter(None, [of.reason, gaps])))
    mine, theirs = ({key: v for key, v in one.items() if key[1] in both} for one in (mine, theirs))
    if not mine or not theirs:
        lacking = "no values here" if not mine else "no values in the baseline"
        return replace(of, state="not measured", reason=of.reason or lacking)
    pairs = sorted(mine.keys() & theirs.keys()) if alike else []
    if pairs:
        differences = np.array([mine[key] - theirs[key] for key in pairs])
        test: Test = "paired t"
        count, difference = len(pairs), float(differences.mean())
    else:
        test, count = "Welch t", min(len(mine), len(theirs))
        difference = fmean(mine.values()) - fmean(theirs.values())
    of = replace(of, test=test, updates=count, difference=difference)
    if count < 2:
        return of
    side = "greater" if METRICS[of.metric].higher_is_closer else "less"
    p = _paired(differences, side) if pairs else _unpaired(list(mine.values()), list(theirs.values()), side)
    return replace(of, p=p)


def _paired(differences: np.ndarray, side: str) -> float:
    if not np.ptp(differences):  # all equal, so t is undefined
        return 0.0 if (differences[0] > 0) == (side == "greater") and differences[0] else 1.0
    from scipy import stats  # slow import (about 1 s)

    return float(stats.ttest_1samp(differences, 0, alternative=side).pvalue)


def _unpaired(mine: Sequence[float], theirs: Sequence[float], side: str) -> float:
    if not np.ptp(mine) and not np.ptp(theirs):
        return 0.0 if (mine[0] > theirs[0]) == (side == "greater") and mine[0] != theirs[0] else 1.0
    from scipy import stats  # slow import (about 1 s)

    return float(stats.ttest_ind(mine, theirs, equal_var=False, alternative=side).pvalue)


def _judged(one: Change) -> Change:
    """Return a change with its state, given its corrected p value."""
    if one.newly:
        return replace(one, state="failed")
    if one.difference is None:
        return one
    nearer = one.difference > 0 if METRICS[one.metric].higher_is_closer else one.difference < 0
    if one.p is None:
        few = "; ".join(filter(None, [one.reason, "one update is too few for a test"]))
        return replace(one, state="inconclusive", reason=few) if nearer else one
    return replace(one, state="failed") if nearer and one.p <= LEVEL else one
