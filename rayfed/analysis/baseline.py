"""Comparison of a gate's result with an earlier one: whether attacks get more than before, beyond chance.

One value is an attacked update's: the mean over its samples of what the best attack on each got. Where the same samples
were attacked, updates are paired, and the test is the paired t test (Student 1908); where others were, Welch's (1947).
Both are one-sided, at 5 % over all that is compared (Holm 1979).

One update among many moves no mean by more than chance, however far it goes: of n differences of which one is not 0, t
is 1. No test of one value against itself tells chance from a cause, so there is a rule beside the tests. On the same
samples, an update of which nothing leaked then and something leaks now is a failure, and is named.

Where attacks of the baseline had no answer here, or less than half of their iterations over all repeats, and where the
run did not come to its end, that no more was found is not measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from math import isnan
from statistics import fmean
from typing import Any, Literal

import numpy as np

from rayfed.analysis.gate import Played, State, uncomputed
from rayfed.analysis.paired import holm
from rayfed.analysis.settings import INAPPLICABLE
from rayfed.analysis.summary import Row, labels_given
from rayfed.analysis.unanswered import closed_forms, unanswered
from rayfed.analysis.verdicts import criterion_of
from rayfed.metrics.known import METRICS
from rayfed.store.schemas import UNPLAYED

LEVEL = 0.05
Test = Literal["paired t", "Welch t"]
Key = tuple[int, int, int]
"""Round, batch size and client of an attacked update."""


def attacked(images: Iterable[Row], texts: Iterable[Row]) -> str:
    """Return the SHA-256 of the set of attacked samples, equal for equal sets."""
    every = {(row["round"], row["victim"], row["sample"], repr(row["true"])) for row in [*images, *texts]}
    return sha256(repr(sorted(every)).encode()).hexdigest()


def updates(played: Played, metrics: Sequence[str], arms: Sequence[str]) -> list[dict[str, Any]]:
    """Return the results of attacks on every attacked update, by arm: round, batch size, client, values by metric.

    `attacks` are those that answered, with the iterations that they may make, over all repeats.

    A value is the mean over the update's samples of the nearest that any attack got to each, to four digits; `leaked`
    is of how many of them a reconstruction is a leak, by the run's own criterion.
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
        lacks = any(uncomputed(row, METRICS[name]) for name in metrics)
        if row["status"] not in (INAPPLICABLE, UNPLAYED) and not unanswered(row, closed) and not lacks:
            most = allowed.get(row["attack"]) or row.get("iterations") or 0  # some end where nothing improves
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
    """Change of one metric on one arm since the baseline."""

    run: int
    """Place of the run among those of the gate."""
    arm: str
    metric: str
    state: State
    """`failed`: nearer to the truth by more than chance; `inconclusive`: nearer, of too few updates to test."""
    test: Test | None = None
    updates: int = 0
    """Pairs; without pairs, updates of the smaller of both sides."""
    difference: float | None = None
    """Mean now less the mean then."""
    p: float | None = None
    """One-sided p value, corrected; None where there are too few to test."""
    reason: str = ""
    newly: tuple[Key, ...] = ()
    """Updates of the same samples of which something leaks now and nothing did then; of the leading metric alone."""

    @property
    def sentence(self) -> str:
        """One-line description of the change."""
        told = f"{self.arm}, {METRICS[self.metric].title} since the baseline: {self.state.upper()}"
        if self.difference is not None:
            kind = "pairs of the same samples" if self.test == "paired t" else "updates of other samples"
            told += f": {self.difference:+.3g} over {self.updates} {kind}"
            told += "" if self.p is None else f" ({self.test} test, p {self.p:.2g})"
        leaking = [f"client {victim} (round {round + 1}, batch {batch})" for round, batch, victim in self.newly]
        told += f"; leaks now, and did not then: {', '.join(leaking)}" if leaking else ""
        return told + (f"; {self.reason}" if self.reason else "")


def changes(now: Mapping[str, Any], then: Mapping[str, Any]) -> list[Change]:
    """Return the change of every arm and metric between two documents of a gate (`rayfed.report.gate`)."""
    found = []
    for run, mine in enumerate(now["runs"]):
        nothing: dict[str, Any] = {"samples": "", "arms": [], "updates": [], "finished": True}
        theirs: Mapping[str, Any] = then["runs"][run] if run < len(then["runs"]) else nothing
        alike = mine["samples"] == theirs["samples"]
        for arm in mine["arms"]:
            other = _counterpart(arm, mine["arms"], theirs["arms"])
            for name in now["metrics"]:
                values, before = _values(mine["updates"], arm, name), _values(theirs["updates"], other, name)
                reason = f"the baseline's arm is {other}" if other != arm else ""
                newly = _newly(mine["updates"], arm, theirs["updates"], other) if alike and METRICS[name].leads else ()
                short = _short(mine["updates"], arm, theirs["updates"], other, alike)
                short = short if mine["finished"] else "the run did not come to its end"
                state: State = "not measured" if short else "passed"
                reason = "; ".join(filter(None, [reason, short]))
                change = Change(run, arm, name, state, reason=reason, newly=newly)
                found.append(_change(change, values, before, alike))
        for arm in theirs["arms"]:
            if arm not in {_counterpart(one, mine["arms"], theirs["arms"]) for one in mine["arms"]}:
                gone = "it is in the baseline, and not here"
                found += [Change(run, arm, name, "not measured", reason=gone) for name in now["metrics"]]
    corrected = holm([one.p for one in found])
    return [_judged(replace(one, p=p)) for one, p in zip(found, corrected, strict=True)]


def _counterpart(arm: str, mine: Sequence[str], theirs: Sequence[str]) -> str:
    """Return the baseline's arm to compare an arm with: that of its name, or the only arm if both have one."""
    return theirs[0] if len(mine) == len(theirs) == 1 else arm


def _newly(
    mine: Sequence[Mapping[str, Any]], arm: str, theirs: Sequence[Mapping[str, Any]], other: str
) -> tuple[Key, ...]:
    """Return the updates of an arm that leak now and did not leak in the baseline."""
    now, then = (
        {(one["round"], one["batch"], one["victim"]): one["leaked"] for one in updates if one["arm"] == name}
        for updates, name in ((mine, arm), (theirs, other))
    )
    return tuple(key for key, leaked in now.items() if leaked and then.get(key) == 0)


def _short(
    mine: Sequence[Mapping[str, Any]], arm: str, theirs: Sequence[Mapping[str, Any]], other: str, alike: bool
) -> str:
    """Return which attacks of the baseline had no answer here, or less than half of their iterations.

    Of the same samples they are those on each update, of others those on any update of a batch size.
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
        f"attacks of the baseline had no answer here, or less than half of their iterations: {', '.join(short)}"
        if short
        else ""
    )


def _values(updates: Sequence[Mapping[str, Any]], arm: str, name: str) -> dict[Key, float]:
    mine = [one for one in updates if one["arm"] == arm and name in one["values"]]
    return {(one["round"], one["batch"], one["victim"]): one["values"][name] for one in mine}


def _change(of: Change, mine: Mapping[Key, float], theirs: Mapping[Key, float], alike: bool) -> Change:
    """Return a change with its measurements and its uncorrected p value.

    Updates of other batch sizes are not compared, and what the baseline has and this run lacks is not measured.
    """
    both = {batch for _, batch, _ in mine} & {batch for _, batch, _ in theirs}
    gone = theirs.keys() - mine.keys() if alike else {key for key in theirs if key[1] not in both}
    if gone and mine:
        sizes = ", ".join(map(str, sorted({batch for _, batch, _ in gone})))
        gaps = f"{len(gone)} updates of the baseline were not measured, at batch {sizes}"
        of = replace(of, state="not measured", reason="; ".join(filter(None, [of.reason, gaps])))
    mine, theirs = ({key: v for key, v in one.items() if key[1] in both} for one in (mine, theirs))
    if not mine or not theirs:
        lacking = "nothing was measured of it" if not mine else "the baseline has nothing of it"
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
    if not np.ptp(differences):  # all alike: no spread that a t would be measured by
        return 0.0 if (differences[0] > 0) == (side == "greater") and differences[0] else 1.0
    from scipy import stats  # an import of a second

    return float(stats.ttest_1samp(differences, 0, alternative=side).pvalue)


def _unpaired(mine: Sequence[float], theirs: Sequence[float], side: str) -> float:
    if not np.ptp(mine) and not np.ptp(theirs):
        return 0.0 if (mine[0] > theirs[0]) == (side == "greater") and mine[0] != theirs[0] else 1.0
    from scipy import stats  # an import of a second

    return float(stats.ttest_ind(mine, theirs, equal_var=False, alternative=side).pvalue)


def _judged(one: Change) -> Change:
    """Return a change with its state, given its corrected p value."""
    if one.newly:
        return replace(one, state="failed")
    if one.difference is None:
        return one
    nearer = one.difference > 0 if METRICS[one.metric].higher_is_closer else one.difference < 0
    if one.p is None:
        few = "; ".join(filter(None, [one.reason, "one update is too few to tell it from chance"]))
        return replace(one, state="inconclusive", reason=few) if nearer else one
    return replace(one, state="failed") if nearer and one.p <= LEVEL else one
