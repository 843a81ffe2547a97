"""ROC analysis of membership scores: area under the curve, and true positive rates at low false positive rates.

Sources: Carlini et al. 2022, "Membership Inference Attacks From First Principles", section 4, on low
false positive rates; DeLong et al. 1988, "Comparing the Areas under Two or More Correlated ROC Curves";
Clopper and Pearson 1934, "The Use of Confidence or Fiducial Limits Illustrated in the Case of the Binomial".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, sqrt

import numpy as np

_NORMAL = 1.96
_TAIL = 0.025


@dataclass(frozen=True)
class Estimate:
    """Estimated share with its 95 % confidence interval."""

    value: float
    low: float
    high: float


def auc(members: Sequence[float], others: Sequence[float]) -> Estimate:
    """Return the area under the ROC curve: the probability that a member's score exceeds a non-member's score.

    Equal scores count half. The interval is DeLong's. If the scores do not overlap, its width would be zero, and the
    exact interval for the smaller number of scores is used.
    """
    above, below = _placements(members, others), _placements(others, members)
    value, fewer = float(above.mean()), min(len(above), len(below))
    if fewer < 2:
        return Estimate(value, 0.0, 1.0)
    width = _NORMAL * sqrt(above.var(ddof=1) / len(above) + below.var(ddof=1) / len(below))
    if value in (0.0, 1.0):
        return share(round(value) * fewer, fewer)
    return Estimate(value, max(0.0, value - width), min(1.0, value + width))


def true_positives(members: Sequence[float], others: Sequence[float], rate: float) -> Estimate | None:
    """Return the true positive rate at a false positive rate of at most `rate`.

    Returns None if there are fewer non-members than `needed`. The interval is exact for the threshold
    (Clopper-Pearson).
    """
    if len(others) < needed(rate):
        return None
    _, threshold = false_positives(others, rate)
    return share(int((np.asarray(members) > threshold).sum()), len(members))


def false_positives(others: Sequence[float], rate: float) -> tuple[int, float]:
    """Return the number of false positives at the lowest threshold with a rate of at most `rate`, and the threshold.

    Needs at least as many non-members as `needed` returns.
    """
    ordered = np.sort(others)[::-1]
    threshold = float(ordered[floor(rate * len(others) + 1e-9)])
    return int((ordered > threshold).sum()), threshold


def needed(rate: float) -> int:
    """Return the minimum number of non-members to distinguish a false positive rate from 0."""
    return ceil(1 / rate - 1e-9)


def share(hits: int, of: int, tail: float = _TAIL) -> Estimate:
    """Return hits / of with its exact (Clopper-Pearson) interval, with probability `tail` beyond each end."""
    from scipy.stats import beta  # takes 1 s to import

    low = float(beta.ppf(tail, hits, of - hits + 1)) if hits else 0.0
    high = float(beta.ppf(1 - tail, hits + 1, of - hits)) if hits < of else 1.0
    return Estimate(hits / of, low, high)


def _placements(scores: Sequence[float], among: Sequence[float]) -> np.ndarray:
    """Return the share of other scores below each score, ties counting half, (n,)."""
    ordered, own = np.sort(among), np.asarray(scores)
    found: np.ndarray = (np.searchsorted(ordered, own) + np.searchsorted(ordered, own, "right")) / (2 * len(ordered))
    return found
