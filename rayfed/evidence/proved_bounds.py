"""Comparison of measurements with proved bounds, for attacks covered by a privacy account, with exact intervals.

A membership attack is compared at several false positive rates, each at the upper end of its interval. A reconstruction
attack is compared by the share of identified samples. Its control is how often the same reconstructions identify a
decoy: another sample of the victim that is not in the update. A measurement whose whole interval is above its bound
shows a defect of rayfed: in the noise, the account, or the knowledge of the attackers.

Intervals assume independent trials (Clopper and Pearson 1934). Samples of one update share its noise, so their results
are correlated. For non-trivial bounds this effect is small compared with the intervals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rayfed.evidence.membership import compute_roc, pool_scores
from rayfed.evidence.rows import Row, group_rows, is_measured
from rayfed.metrics.roc import Estimate, false_positives, needed, share

RATES = (0.1, 0.01, 0.001)
"""False positive rates at which membership attacks are compared."""
_TAIL = 1e-4
"""Probability of a measurement beyond each end of its interval; small, because a run has many measurements and must not
fail by chance."""
_MAX_BOUND = 0.99
"""Bound from which on it is trivial, as no measurement could exceed it significantly."""


@dataclass(frozen=True)
class BoundComparison:
    """Comparison of one measurement of an attack with a proved bound."""

    arm: str
    attack: str
    rate: float | None
    """False positive rate at which members are identified; None if samples are identified."""
    hits: int
    count: int
    share: Estimate
    chance: Estimate
    """Share of hits if the unit is absent or replaced by another one. The bound is computed at its upper end."""
    bound: float
    """Proved maximum of the true share."""

    @property
    def exceeds(self) -> bool:
        """Return whether the measurement's whole interval is above the bound."""
        return self.share.low > self.bound


def compare_bounds(proved: Sequence[Row], attacks: Sequence[Row], inferences: Sequence[Row]) -> list[BoundComparison]:
    """Return the comparisons of a run's measurements with their proved bounds, in the order of the table `proved`."""
    attack_rows, inference_rows = (group_rows(rows, "arm", "attack") for rows in (attacks, inferences))
    comparisons = []
    for (arm, attack, _), curve in group_rows(proved, "arm", "attack", "defence").items():
        comparisons += _compare_members(curve, inference_rows.get((arm, attack), []))
        comparisons += _compare_samples(curve, attack_rows.get((arm, attack), []))
    return comparisons


def nontrivial_comparisons(comparisons: Sequence[BoundComparison]) -> list[BoundComparison]:
    """Return the comparisons that have a non-trivial bound, or whose measurement exceeds the bound."""
    return [one for one in comparisons if one.bound < _MAX_BOUND or one.exceeds]


def closest_comparisons(comparisons: Sequence[BoundComparison]) -> list[BoundComparison]:
    """Return, for every arm and attack, the comparison in which the measurement is closest to a non-trivial bound."""
    closest: dict[tuple[str, str], BoundComparison] = {}
    for one in nontrivial_comparisons(comparisons):
        other = closest.get((one.arm, one.attack))
        if other is None or one.share.value / one.bound > other.share.value / other.bound:
            closest[one.arm, one.attack] = one
    return list(closest.values())


def attacks_without_bound(
    privacy: Sequence[Row], proved: Sequence[Row], attacks: Sequence[Row], inferences: Sequence[Row]
) -> list[tuple[str, str]]:
    """Return pairs of arm and attack without a non-trivial proved bound, although the arm has an epsilon.

    The account does not cover these attackers' observations or knowledge of a client, or its bounds are trivial.
    """
    arms = {row["arm"] for row in privacy if row["epsilon"] is not None}
    min_chance = min((row["chance"] for row in proved), default=0.0)
    bounded = set()
    for row in proved:
        if row["chance"] == min_chance and row["present"] < _MAX_BOUND:
            bounded.add((row["arm"], row["attack"]))
    pairs = dict.fromkeys((row["arm"], row["attack"]) for row in (*attacks, *inferences) if row["arm"] in arms)
    return [pair for pair in pairs if pair not in bounded]


def _compare_members(curve: Sequence[Row], inferences: Sequence[Row]) -> list[BoundComparison]:
    """Compare a membership attack with its bound, unless its control identifies members without the update."""
    roc = compute_roc([row for row in inferences if row["metric"] == "auc" and row["status"] == "ok"])
    if roc is None or roc.control is None or not _is_chance(roc.control):
        return []
    members, non_members = pool_scores([row for row in inferences if row.get("scores")], "score")
    comparisons = []
    for rate in RATES:
        if len(non_members) < needed(rate):
            continue
        alarms, threshold = false_positives(non_members, rate)
        hits = sum(score > threshold for score in members)
        chance = share(alarms, len(non_members), _TAIL)
        comparisons.append(_compare(curve, rate, hits, len(members), chance))
    return comparisons


def _is_chance(control: Estimate) -> bool:
    """Return whether a control's AUC is consistent with 0.5."""
    from scipy.stats import norm  # slow import (about 1 s)

    width = (control.high - control.value) * float(norm.isf(_TAIL) / norm.isf(0.025))
    return abs(control.value - 0.5) <= width


def _compare_samples(curve: Sequence[Row], attacks: Sequence[Row]) -> list[BoundComparison]:
    """Compare the share of identified samples with its bound, if a control was measured on other samples."""
    rows = [row for row in attacks if row["repeat"] == 0 and is_measured(row.get("decoy_identified"))]
    if not rows:
        return []
    hits, decoys = (sum(row[name] == 1 for row in rows) for name in ("identified", "decoy_identified"))
    return [_compare(curve, None, hits, len(rows), share(decoys, len(rows), _TAIL))]


def _compare(curve: Sequence[Row], rate: float | None, hits: int, count: int, chance: Estimate) -> BoundComparison:
    column = "another" if rate is None else "present"
    bound = min(row[column] for row in curve if row["chance"] >= chance.high)
    hit_share = share(hits, count, _TAIL)
    return BoundComparison(curve[0]["arm"], curve[0]["attack"], rate, hits, count, hit_share, chance, bound)
