"""Statistics of membership attacks: ROC curves over all victims and rounds of an arm.

The scores of each victim are standardised to mean 0 and standard deviation 1 before they are pooled; an attacker can do
the same. If a victim has the same candidates in several rounds, the scores of each candidate are averaged.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean, pstdev

from rayfed.evidence.rows import Row
from rayfed.metrics.roc import Estimate, auc, true_positives

RATES = (0.01, 0.001)
"""False positive rates at which the true positive rate is reported."""
_Candidate = tuple[str, int]
"""Kind of a candidate ('member' or 'non-member') and its sample."""


class Identification(StrEnum):
    """Whether an attack identifies members."""

    NOT_IDENTIFIED = "not_identified"
    """The interval of the AUC contains 0.5."""
    IDENTIFIED = "identified"
    ALSO_BY_CONTROL = "also_by_control"
    """The control identifies members without the update as well."""


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

    @property
    def identification(self) -> Identification:
        """Return whether members are identified, by the intervals of the AUC and of the control's AUC."""
        if self.auc.low <= 0.5 <= self.auc.high:
            return Identification.NOT_IDENTIFIED
        if self.control and not self.control.low <= 0.5 <= self.control.high:
            return Identification.ALSO_BY_CONTROL
        return Identification.IDENTIFIED

    @property
    def unknown_rates(self) -> list[float]:
        """Return the false positive rates in `RATES` for which there are too few non-members."""
        return [rate for rate, share in self.true_positives.items() if share is None]


def compute_roc(inferences: Sequence[Row]) -> Roc | None:
    """Return the ROC statistics of one attack from rows of `inferences`; None if no row has scores."""
    rows = [row for row in inferences if row.get("scores")]
    members, non_members = pool_scores(rows, "score")
    if not members:
        return None
    has_control = all(candidate.get("control") is not None for row in rows for candidate in row["scores"])
    control = auc(*pool_scores(rows, "control")) if has_control else None
    rates = {rate: true_positives(members, non_members, rate) for rate in RATES}
    return Roc(auc(members, non_members), control, rates, len(members), len(non_members))


def pool_scores(rows: Sequence[Row], column: str) -> tuple[list[float], list[float]]:
    """Return the standardised scores of all victims' members and non-members (`column`: 'score' or 'control')."""
    pooled: dict[str, list[float]] = defaultdict(list)
    for scores_by_candidate in _scores_by_victim(rows, column):
        for (kind, _), scores in scores_by_candidate.items():
            pooled[kind].append(fmean(scores))
    return pooled["member"], pooled["non-member"]


def _scores_by_victim(rows: Sequence[Row], column: str) -> list[dict[_Candidate, list[float]]]:
    """Return the standardised scores of each candidate, by victim, and by round if its candidates change."""
    groups: dict[tuple[int, frozenset[_Candidate]], dict[_Candidate, list[float]]] = {}
    for row in rows:
        scores = [candidate[column] for candidate in row["scores"]]
        mean, deviation = fmean(scores), pstdev(scores) or 1.0
        candidates = [(candidate["kind"], candidate["sample"]) for candidate in row["scores"]]
        group = groups.setdefault((row["victim"], frozenset(candidates)), defaultdict(list))
        for candidate, score in zip(candidates, scores, strict=True):
            group[candidate].append((score - mean) / deviation)
    return list(groups.values())
