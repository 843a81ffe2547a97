"""Empirical lower bounds on epsilon from a canary test: the largest noise consistent with its hit rates.

The scores of canaries that were there and of others that were not are cut in halves. The first chooses a threshold, the
second is judged by it, with exact intervals for both rates (Clopper and Pearson 1934). Under the claimed mechanism the
true positive rate is at most the trade-off curve of the false one. So where the rates are beyond the curve of the same
mechanism with s times its noise, for some s, less noise than that was drawn, and its epsilon is more than that of s. Of
Gaussian noise on all of a unit's answers this is the conversion through Gaussian differential privacy; drawn samples
and Laplace noise, whose curves are others, have their own: through a normal one they would be accused of what they
never claimed.

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
"""Probability beyond the end that counts of each interval: both hold with 95 %."""
_THRESHOLDS = 60
_NOISES = [2 ** (exponent / 4) for exponent in range(-16, 33)]
"""Noises that are tried first, in units of what is claimed."""
_HALVINGS = 7
"""Halvings between two of them: to a thousandth."""


@dataclass(frozen=True)
class Shown:
    """Empirical lower bound on a mechanism's epsilon, beside the claimed one."""

    claimed: float
    epsilon: float
    """Lower bound, with 95 % confidence: 0 where nothing is told apart."""
    noise: float
    """The most noise that the hits leave room for, in units of what is claimed; infinite where they show nothing."""
    true_positives: Estimate
    """Share of canaries that were there above the threshold, of those that it was not chosen by."""
    false_positives: Estimate

    @property
    def refuted(self) -> bool:
        """Whether the lower bound exceeds the claimed epsilon."""
        return self.noise < 1


def shown(
    present: Sequence[float], absent: Sequence[float], spent: Spending, accountant: Method | None = None
) -> Shown:
    """Return the lower bound on a mechanism's epsilon from the scores of present and absent canaries.

    Scores are in no order; both have four at least.
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
        """Return how far the rates, with their intervals, lie above the trade-off curve at a noise factor."""
        from scipy.stats import norm  # an import of a second

        if self.moved is not None:
            return hits.low - float(norm.cdf(norm.ppf(alarms.high) + self.moved / times))
        return hits.low - TradeOff.of(self.with_noise(times), self.accountant).at_most(alarms.high)

    @cached_property
    def moved(self) -> float | None:
        """The mu of Gaussian DP of the worst-off unit; None for other noise or sampling."""
        releases = self.spent.releases
        if any(release.noise != "gaussian" or release.rate < 1 or release.drawn for release in releases):
            return None
        return max(sqrt(release.count) / release.multiplier for release in releases)

    def place(self, hits: Estimate, alarms: Estimate) -> int:
        """Return the index of the first of `_NOISES` whose curve the rates exceed; their number for none."""
        if hits.low <= alarms.high:  # no noise is so large
            return len(_NOISES)
        return bisect_left(_NOISES, True, key=lambda times: self.excess(hits, alarms, times) > 0)

    def least(self, hits: Estimate, alarms: Estimate) -> float:
        """Return a noise factor, never too small, at which the rates exceed the curve; infinite for none."""
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
