"""Empirical lower bounds on epsilon from a canary test: the largest noise consistent with the canaries' hit rates.

The scores of present and absent canaries are split in halves. The first half chooses a threshold, and the second half
gives the true and false positive rates, with exact intervals (Clopper and Pearson 1934). Under the claimed mechanism
the true positive rate is at most the trade-off curve at the false positive rate. If the rates exceed the curve of the
mechanism with s times its noise, the actual noise is smaller, so the actual epsilon exceeds that of s. For Gaussian
noise on all updates of a unit, this is the conversion through Gaussian differential privacy. Subsampling and Laplace
noise have other trade-off curves, which are used instead, because a normal curve would give false bounds.

Sources: Nasr et al. 2023, "Tight Auditing of Differentially Private Machine Learning", section 4 (conversion through
Gaussian DP); Steinke, Nasr and Jagielski 2023, "Privacy Auditing with One (1) Training Run" (many canaries in one run);
Andrew et al. 2023, "One-shot Empirical Privacy Estimation for Federated Learning" (canary clients).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf, sqrt

import numpy as np

from rayfed.metrics.roc import Estimate, share
from rayfed.privacy.accountant import Method, Release, guarantee
from rayfed.privacy.spending import Spending
from rayfed.privacy.tradeoff import TradeOff

_TAIL = 0.025
"""Probability beyond one end of each interval, so that both rates hold with 95 % confidence."""
_THRESHOLDS = 60
_NOISES = [2 ** (exponent / 4) for exponent in range(-16, 33)]
"""Noise factors tried first, relative to the claimed noise."""
_HALVINGS = 7
"""Number of bisections between two noise factors, to a precision of about 0.1 %."""


@dataclass(frozen=True)
class Shown:
    """Empirical lower bound on a mechanism's epsilon, with the claimed epsilon."""

    claimed: float
    epsilon: float
    """Lower bound with 95 % confidence; 0 if canaries are not distinguished."""
    noise: float
    """Maximum noise consistent with the rates, relative to the claimed noise; infinite if they give no bound."""
    true_positives: Estimate
    """Share of present canaries above the threshold, among those that did not choose it."""
    false_positives: Estimate

    @property
    def refuted(self) -> bool:
        """Return whether the lower bound exceeds the claimed epsilon."""
        return self.noise < 1


def shown(
    present: Sequence[float], absent: Sequence[float], spent: Spending, accountant: Method | None = None
) -> Shown:
    """Return the lower bound on a mechanism's epsilon from the scores of present and absent canaries.

    The scores must not be sorted; each sequence needs at least four.
    """
    family = _Family(spent, accountant)
    threshold = _best_threshold(np.asarray(present[::2]), np.asarray(absent[::2]), family)
    hits, alarms = (_above(np.asarray(scores[1::2]), threshold) for scores in (present, absent))
    noise = family.least(hits, alarms)
    return Shown(family.epsilon(1.0), 0.0 if noise == inf else family.epsilon(noise), noise, hits, alarms)


@dataclass(frozen=True)
class _Family:
    """The claimed mechanism with its noise multiplied by a factor."""

    spent: Spending
    accountant: Method | None

    def with_noise(self, times: float) -> list[Release]:
        return [replace(release, multiplier=release.multiplier * times) for release in self.spent.releases]

    def epsilon(self, times: float) -> float:
        return guarantee(self.with_noise(times), self.spent.delta, self.accountant).epsilon

    def excess(self, hits: Estimate, alarms: Estimate, times: float) -> float:
        """Return how far the true positive rate exceeds the trade-off curve at a noise factor, by the intervals."""
        from scipy.stats import norm  # slow import (about 1 s)

        if self.moved is not None:
            return hits.low - float(norm.cdf(norm.ppf(alarms.high) + self.moved / times))
        return hits.low - TradeOff.of(self.with_noise(times), self.accountant).at_most(alarms.high)

    @cached_property
    def moved(self) -> float | None:
        """Return the mu of Gaussian DP of the least protected unit; None for other noise or sampling."""
        releases = self.spent.releases
        if any(release.noise != "gaussian" or release.rate < 1 or release.drawn for release in releases):
            return None
        return max(sqrt(release.count) / release.multiplier for release in releases)

    def place(self, hits: Estimate, alarms: Estimate) -> int:
        """Return the index of the first of `_NOISES` whose curve the rates exceed, or `len(_NOISES)` if none."""
        if hits.low <= alarms.high:  # consistent with any noise
            return len(_NOISES)
        return bisect_left(_NOISES, True, key=lambda times: self.excess(hits, alarms, times) > 0)

    def least(self, hits: Estimate, alarms: Estimate) -> float:
        """Return the smallest noise factor at which the rates exceed the curve, rounded up; infinite without one."""
        place = self.place(hits, alarms)
        if place == len(_NOISES):
            return inf
        low, high = _NOISES[max(place - 1, 0)], _NOISES[place]
        for _ in range(_HALVINGS):
            middle = sqrt(low * high)
            low, high = (low, middle) if self.excess(hits, alarms, middle) > 0 else (middle, high)
        return high


def _above(scores: np.ndarray, threshold: float) -> Estimate:
    return share(int((scores > threshold).sum()), len(scores), _TAIL)


def _best_threshold(present: np.ndarray, absent: np.ndarray, family: _Family) -> float:
    """Return the threshold whose rates allow the least noise; ties go to the largest excess."""
    tried = np.unique(np.quantile(np.concatenate([present, absent]), np.linspace(0.002, 0.998, _THRESHOLDS)))

    def room(threshold: float) -> tuple[int, float]:
        rates = _above(present, threshold), _above(absent, threshold)
        place = family.place(*rates)
        return place, -family.excess(*rates, _NOISES[place]) if place < len(_NOISES) else rates[1].high - rates[0].low

    return float(min(tried, key=room))
