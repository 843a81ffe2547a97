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
from rayfed.evidence.rows import Row, measured
from rayfed.metrics.roc import Estimate, false_positives, needed, share
from rayfed.privacy.printing import share_at_most
from rayfed.store.folder import RunFolder

RATES = (0.1, 0.01, 0.001)
"""False positive rates at which membership attacks are compared."""
_TAIL = 1e-4
"""Probability of a measurement beyond each end of its interval; small, because a run has many measurements and must not
fail by chance."""

_TELLING = 0.99
"""Bound from which on it is trivial, as no measurement could exceed it significantly."""


class BoundPassed(Exception):
    """Error for a measurement that exceeds a proved bound, which is a defect of rayfed."""


@dataclass(frozen=True)
class Comparison:
    """Comparison of one measurement of an attack with a proved bound."""

    arm: str
    attack: str
    what: str
    hits: int
    of: int
    share: Estimate
    chance: Estimate
    """Share of hits if the unit is absent or replaced by another one. The bound is computed at its upper end."""
    bound: float
    """Proved maximum of the true share."""

    @property
    def passed(self) -> bool:
        """Return whether the measurement's whole interval is above the bound."""
        return self.share.low > self.bound

    def __str__(self) -> str:
        return (
            f"{self.attack} on {self.arm}: {self.what} {self.hits:,} of {self.of:,}, {100 * self.share.value:.2f} % "
            f"(interval from {100 * self.share.low:.2f} %); proved bound {share_at_most(self.bound)}; control "
            f"{100 * self.chance.value:.2f} % (interval to {100 * self.chance.high:.2f} %)"
        )


def comparisons(proved: Sequence[Row], attacks: Sequence[Row], inferences: Sequence[Row]) -> list[Comparison]:
    """Return the comparisons of a run's measurements with their proved bounds, in the order of the table `proved`."""
    curves: dict[tuple[str, str, str], list[Row]] = {}
    for row in proved:
        curves.setdefault((row["arm"], row["attack"], row["defence"]), []).append(row)
    found = []
    for (arm, attack, _), curve in curves.items():
        mine, asked = (
            [row for row in rows if (row["arm"], row["attack"]) == (arm, attack)] for rows in (attacks, inferences)
        )
        found += _of_members(curve, asked)
        found += _of_samples(curve, mine)
    return found


def telling(found: Sequence[Comparison]) -> list[Comparison]:
    """Return the comparisons that have a non-trivial bound, or whose measurement exceeds the bound."""
    return [one for one in found if one.bound < _TELLING or one.passed]


def nearest_to_bounds(found: Sequence[Comparison]) -> list[Comparison]:
    """Return, for every arm and attack, the comparison in which the measurement is closest to a non-trivial bound."""
    nearest: dict[tuple[str, str], Comparison] = {}
    for one in telling(found):
        other = nearest.get((one.arm, one.attack))
        if other is None or one.share.value / one.bound > other.share.value / other.bound:
            nearest[one.arm, one.attack] = one
    return list(nearest.values())


def uncovered(
    privacy: Sequence[Row], proved: Sequence[Row], attacks: Sequence[Row], inferences: Sequence[Row]
) -> list[tuple[str, str]]:
    """Return pairs of arm and attack without a non-trivial proved bound, although the arm has an epsilon.

    The account does not cover what these attackers observe or know of a client, or its bounds for them are trivial.
    """
    guaranteed = {row["arm"] for row in privacy if row["epsilon"] is not None}
    played = dict.fromkeys((row["arm"], row["attack"]) for row in (*attacks, *inferences) if row["arm"] in guaranteed)
    least = min((row["chance"] for row in proved), default=0.0)
    telling = {(row["arm"], row["attack"]) for row in proved if row["chance"] == least and row["present"] < _TELLING}
    return [one for one in played if one not in telling]


def check_bounds(folder: RunFolder) -> None:
    """Raise `BoundPassed` if a measurement of a run exceeds a proved bound."""
    tables = (folder.read_table(name).to_pylist() for name in ("proved", "attacks", "inferences"))
    if above := [str(one) for one in comparisons(*tables) if one.passed]:
        raise BoundPassed(
            f"measurements in {folder.url} exceed a proved bound: {'; '.join(above)}. The noise, the account or the "
            "attacker's knowledge is wrong: do not trust the guarantees of this run"
        )


def _of_members(curve: Sequence[Row], inferences: Sequence[Row]) -> list[Comparison]:
    """Compare a membership attack with its bound, unless its control identifies members without the update."""
    told = compute_roc([row for row in inferences if row["metric"] == "auc" and row["status"] == "ok"])
    if told is None or told.control is None or not _by_chance(told.control):
        return []
    members, others = pool_scores([row for row in inferences if row.get("scores")], "score")
    found = []
    for rate in RATES:
        if len(others) < needed(rate):
            continue
        alarms, threshold = false_positives(others, rate)
        hits = sum(score > threshold for score in members)
        chance = share(alarms, len(others), _TAIL)
        what = f"members identified at {100 * rate:g} % false positive rate:"
        found.append(_compared(curve, "present", what, hits, len(members), chance))
    return found


def _by_chance(control: Estimate) -> bool:
    """Return whether a control's AUC is consistent with 0.5."""
    from scipy.stats import norm  # slow import (about 1 s)

    width = (control.high - control.value) * float(norm.isf(_TAIL) / norm.isf(0.025))
    return abs(control.value - 0.5) <= width


def _of_samples(curve: Sequence[Row], attacks: Sequence[Row]) -> list[Comparison]:
    """Compare the share of identified samples with its bound, if a control was measured on other samples."""
    asked = [row for row in attacks if row["repeat"] == 0 and measured(row.get("decoy_identified"))]
    if not asked:
        return []
    hits, decoys = (sum(row[name] == 1 for row in asked) for name in ("identified", "decoy_identified"))
    return [_compared(curve, "another", "samples identified:", hits, len(asked), share(decoys, len(asked), _TAIL))]


def _compared(curve: Sequence[Row], of: str, what: str, hits: int, count: int, chance: Estimate) -> Comparison:
    bound = min(row[of] for row in curve if row["chance"] >= chance.high)
    return Comparison(curve[0]["arm"], curve[0]["attack"], what, hits, count, share(hits, count, _TAIL), chance, bound)
