"""Statistics of membership attacks: ROC curves over all victims and rounds of an arm.

The scores of each victim are standardised to mean 0 and standard deviation 1 before they are pooled; an attacker can do
the same. If a victim has the same candidates in several rounds, the scores of each candidate are averaged.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Any

from rayfed.metrics.roc import Estimate, auc, needed, true_positives

RATES = (0.01, 0.001)
"""False positive rates at which the true positive rate is reported."""


@dataclass(frozen=True)
class Roc:
    """Statistics of a membership attack's ROC curve: area, and true positive rates at low false positive rates."""

    auc: Estimate
    control: Estimate | None
    """AUC of the same candidates on updates without any of them; None if some candidates have no such score.

    If it differs from 0.5 significantly, members differ from non-members even without the update.
    """
    true_positives: dict[float, Estimate | None]
    """Share of members identified at each of `RATES`; None if there are too few non-members."""
    members: int
    non_members: int


def roc(inferences: Sequence[Mapping[str, Any]]) -> Roc | None:
    """Return the ROC statistics of one attack from rows of `inferences`; None if no row has scores."""
    rows = [row for row in inferences if row.get("scores")]
    members, others = pooled(rows, "score")
    if not members:
        return None
    scored = all(one.get("control") is not None for row in rows for one in row["scores"])
    control = auc(*pooled(rows, "control")) if scored else None
    at = {rate: true_positives(members, others, rate) for rate in RATES}
    return Roc(auc(members, others), control, at, len(members), len(others))


def area(found: Estimate) -> str:
    """Format the area under a ROC curve (AUC) with the 95 % interval."""
    return f"{found.value:.3f} ({found.low:.3f} to {found.high:.3f})"


def in_words(found: Roc) -> str:
    """Return a text on whether members are identified, judged by the intervals of the AUC and of the control's AUC."""
    if found.auc.low <= 0.5 <= found.auc.high:
        return "members not identified within this budget (the interval of the AUC contains 0.5)"
    lower = ", by lower scores" if found.auc.high < 0.5 else ""
    without = found.control and not found.control.low <= 0.5 <= found.control.high
    alike = ", but the control identifies them without the update as well" if without else ""
    return f"MEMBERS IDENTIFIED{lower}{alike}"


def untold(found: Roc) -> list[str]:
    """Return a sentence for each false positive rate in `RATES` for which there are too few non-members."""
    return [stated(found, rate) for rate, share in found.true_positives.items() if share is None]


def stated(found: Roc, rate: float) -> str:
    """Format the true positive rate of a ROC curve at the false positive rate `rate`."""
    share = found.true_positives[rate]
    if share is None:
        few = f"it needs at least {needed(rate):,} non-members, but there are {found.non_members:,}"
        return f"TPR at {100 * rate:g} % FPR not measurable: {few}"
    low, value, high = (f"{100 * one:.1f} %" for one in (share.low, share.value, share.high))
    return f"TPR at {100 * rate:g} % FPR {value} ({low} to {high})"


def pooled(rows: Sequence[Mapping[str, Any]], of: str) -> tuple[list[float], list[float]]:
    """Return the standardised scores of all victims' members and non-members (`of`: 'score' or 'control')."""
    pooled: dict[str, list[float]] = defaultdict(list)
    for victim in _of_victims(rows, of):
        for (kind, _), found in victim.items():
            pooled[kind].append(fmean(found))
    return pooled["member"], pooled["non-member"]


def _of_victims(rows: Sequence[Mapping[str, Any]], of: str) -> list[dict[tuple[str, int], list[float]]]:
    """Return the standardised scores of each candidate, by victim, and by round if its candidates change."""
    asked: dict[tuple[int, frozenset[tuple[str, int]]], dict[tuple[str, int], list[float]]] = {}
    for row in rows:
        scores = [one[of] for one in row["scores"]]
        mean, deviation = fmean(scores), pstdev(scores) or 1.0
        keys = [(one["kind"], one["sample"]) for one in row["scores"]]
        found = asked.setdefault((row["victim"], frozenset(keys)), defaultdict(list))
        for key, score in zip(keys, scores, strict=True):
            found[key].append((score - mean) / deviation)
    return list(asked.values())
