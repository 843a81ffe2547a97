"""Statistics of membership attacks: ROC curves over all victims and rounds of an arm.

Scores of different victims are compared after each victim's have been brought to mean 0 and deviation 1, which an
attacker can do. Where a victim's candidates are the same in several rounds, the scores of each are added up.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Any

from rayfed.metrics.roc import Estimate, auc, needed, true_positives

RATES = (0.01, 0.001)
"""False positive rates at which the share of members that are found is stated."""


@dataclass(frozen=True)
class Roc:
    """Figures of a ROC curve: area, and true positive rates at low false positive rates."""

    auc: Estimate
    control: Estimate | None
    """AUC of the same candidates on updates behind which none of them is; None where some were not scored so.

    Where it is not 0.5 but for chance, members differ from non-members without the update.
    """
    true_positives: dict[float, Estimate | None]
    """Share of members found at each of `RATES`; None where there are too few non-members to tell."""
    members: int
    non_members: int


def roc(inferences: Sequence[Mapping[str, Any]]) -> Roc | None:
    """Return the figures of one attack's rows of `inferences`; None if no row has scores."""
    rows = [row for row in inferences if row.get("scores")]
    members, others = pooled(rows, "score")
    if not members:
        return None
    scored = all(one.get("control") is not None for row in rows for one in row["scores"])
    control = auc(*pooled(rows, "control")) if scored else None
    at = {rate: true_positives(members, others, rate) for rate in RATES}
    return Roc(auc(members, others), control, at, len(members), len(others))


def area(found: Estimate) -> str:
    """Format an AUC with its interval."""
    return f"{found.value:.3f} ({found.low:.3f} to {found.high:.3f})"


def in_words(found: Roc) -> str:
    """Return whether members are told from non-members, by the AUC's interval and that of its control."""
    if found.auc.low <= 0.5 <= found.auc.high:
        return "members are not told from non-members within this budget (the interval of the AUC has 0.5 in it)"
    lower = ", by lower scores" if found.auc.high < 0.5 else ""
    without = found.control and not found.control.low <= 0.5 <= found.control.high
    alike = ", which the control does without the update, too" if without else ""
    return f"MEMBERS ARE TOLD from non-members{lower}{alike}"


def untold(found: Roc) -> list[str]:
    """Return of each of `RATES` that too few non-members tell nothing of that they do not."""
    return [stated(found, rate) for rate, share in found.true_positives.items() if share is None]


def stated(found: Roc, rate: float) -> str:
    """Format the share of members found at a false positive rate."""
    share = found.true_positives[rate]
    if share is None:
        few = f"it needs at least {needed(rate):,} non-members, these are {found.non_members:,}"
        return f"TPR at {100 * rate:g} % FPR not measurable: {few}"
    return f"TPR at {100 * rate:g} % FPR {share.value:.1%} ({share.low:.1%} to {share.high:.1%})"


def pooled(rows: Sequence[Mapping[str, Any]], of: str) -> tuple[list[float], list[float]]:
    """Return the scores of all victims' members and non-members (`of`: 'score' or 'control')."""
    pooled: dict[str, list[float]] = defaultdict(list)
    for victim in _of_victims(rows, of):
        for (kind, _), found in victim.items():
            pooled[kind].append(fmean(found))
    return pooled["member"], pooled["non-member"]


def _of_victims(rows: Sequence[Mapping[str, Any]], of: str) -> list[dict[tuple[str, int], list[float]]]:
    """Return each candidate's scores by victim, and by round if candidates change between rounds."""
    asked: dict[tuple[int, frozenset[tuple[str, int]]], dict[tuple[str, int], list[float]]] = {}
    for row in rows:
        scores = [one[of] for one in row["scores"]]
        mean, deviation = fmean(scores), pstdev(scores) or 1.0
        keys = [(one["kind"], one["sample"]) for one in row["scores"]]
        found = asked.setdefault((row["victim"], frozenset(keys)), defaultdict(list))
        for key, score in zip(keys, scores, strict=True):
            found[key].append((score - mean) / deviation)
    return list(asked.values())
