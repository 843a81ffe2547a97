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
from rayfed.privacy.accountant import Method, Release, compute_guarantee
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
class EmpiricalEpsilon:
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
    def refutes_claim(self) -> bool:
        """Return whether the lower bound exceeds the claimed epsilon."""
        return self.noise < 1


def bound_epsilon(
    present: Sequence[float], absent: Sequence[float], spent: Spending, accountant: Method | None = None
) -> EmpiricalEpsilon:
    """Return the lower bound on a mechanism's epsilon from the scores of present and absent canaries.

    The scores must not be sorted; each sequence needs at least four.
    """
    mechanism = _Mechanism(spent, accountant)
    threshold = _best_threshold(np.asarray(present[::2]), np.asarray(absent[::2]), mechanism)
    hits, alarms = (_share_above(np.asarray(scores[1::2]), threshold) for scores in (present, absent))
    noise = mechanism.max_noise(hits, alarms)
    epsilon = 0.0 if noise == inf else mechanism.epsilon(noise)
    return EmpiricalEpsilon(mechanism.epsilon(1.0), epsilon, noise, hits, alarms)


@dataclass(frozen=True)
class _Mechanism:
    """The claimed mechanism with its noise multiplied by a factor."""

    spent: Spending
    accountant: Method | None

    def scale_noise(self, times: float) -> list[Release]:
        return [replace(release, multiplier=release.multiplier * times) for release in self.spent.releases]

    def epsilon(self, times: float) -> float:
        return compute_guarantee(self.scale_noise(times), self.spent.delta, self.accountant).epsilon

    def excess(self, hits: Estimate, alarms: Estimate, times: float) -> float:
        """Return how far the true positive rate exceeds the trade-off curve at a noise factor, by the intervals."""
        from scipy.stats import norm  # slow import (about 1 s)

        if self.gaussian_mu is not None:
            return hits.low - float(norm.cdf(norm.ppf(alarms.high) + self.gaussian_mu / times))
        return hits.low - TradeOff.from_releases(self.scale_noise(times), self.accountant).at_most(alarms.high)

    @cached_property
    def gaussian_mu(self) -> float | None:
        """Return the mu of Gaussian DP of the least protected unit; None for other noise or sampling."""
        releases = self.spent.releases
        if any(release.noise != "gaussian" or release.rate < 1 or release.drawn for release in releases):
            return None
        return max(sqrt(release.count) / release.multiplier for release in releases)

    def noise_index(self, hits: Estimate, alarms: Estimate) -> int:
        """Return the index of the first of `_NOISES` whose curve the rates exceed, or `len(_NOISES)` if none."""
        if hits.low <= alarms.high:  # consistent with any noise
            return len(_NOISES)
        return bisect_left(_NOISES, True, key=lambda times: self.excess(hits, alarms, times) > 0)

    def max_noise(self, hits: Estimate, alarms: Estimate) -> float:
        """Return the smallest noise factor at which the rates exceed the curve, rounded up; infinite without one."""
        index = self.noise_index(hits, alarms)
        if index == len(_NOISES):
            return inf
        low, high = _NOISES[max(index - 1, 0)], _NOISES[index]
        for _ in range(_HALVINGS):
            middle = sqrt(low * high)
            if self.excess(hits, alarms, middle) > 0:
                high = middle
            else:
                low = middle
        return high


def _share_above(scores: np.ndarray, threshold: float) -> Estimate:
    return share(int((scores > threshold).sum()), len(scores), _TAIL)


def _best_threshold(present: np.ndarray, absent: np.ndarray, mechanism: _Mechanism) -> float:
    """Return the threshold whose rates allow the least noise; ties go to the largest excess."""
    quantiles = np.linspace(0.002, 0.998, _THRESHOLDS)
    thresholds = np.unique(np.quantile(np.concatenate([present, absent]), quantiles))

    def sort_key(threshold: float) -> tuple[int, float]:
        hits, alarms = _share_above(present, threshold), _share_above(absent, threshold)
        index = mechanism.noise_index(hits, alarms)
        if index == len(_NOISES):
            return index, alarms.high - hits.low
        return index, -mechanism.excess(hits, alarms, _NOISES[index])

    return float(min(thresholds, key=sort_key))
