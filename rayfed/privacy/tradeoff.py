"""Bounds on what any attacker can learn about a unit of privacy: the trade-off curve of the accounting (f-DP).

Consider an event that has probability at most `a` if a unit (a sample or a client) is hidden. The accountant's
delta(epsilon) bounds its probability T(a) if the unit is present, for each epsilon >= 0:

    T(a) <= a e^epsilon + delta(epsilon),    T(a) <= 1 - e^-epsilon (1 - delta(epsilon) - a),

The second bound is the first one for the complements. Every epsilon gives a valid bound, so a grid of epsilons can only
overestimate. T has three interpretations:

- **Reconstruction** (reconstruction robustness, ReRo). An attacker that guesses a secret of the unit with prior
  probability `a` succeeds with probability at most T(a) after the release. The mechanism without the unit must not
  depend on the secret. Zero-out, add-or-remove and replace-one adjacency provide such a reference: the unit set to
  zero, left out, or replaced by a fixed unit.
- **Membership.** A membership test with a false positive rate of `a` has a true positive rate of at most T(a). The
  difference of both rates (the advantage) is at most delta(0).
- **Another value of the unit.** To distinguish x from y, the bound is also T(a) under replace-one adjacency. If the
  accounting hides only the presence of a unit, the change from x to y takes two steps: T(T(a)).

Sources: Hayes, Mahloujifar and Balle 2023, "Bounding Training Data Reconstruction in DP-SGD", definition 2 and theorem
2; Balle, Cherubin and Hayes 2022, "Reconstructing Training Data with Informed Adversaries"; Dong, Roth and Su 2022,
"Gaussian Differential Privacy", proposition 6 (the curve from all (epsilon, delta)); Kairouz, Oh and Viswanath 2015,
"The Composition Theorem for Differential Privacy", for the two sides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from rayfed.privacy.accountant import Method, Release, choose_grid, make_accountant

PRIORS = (10, 100, 1000)
"""Priors 1/N for which bounds are reported: a random guess is correct once in N times."""
_TAIL = 1e-10
"""Delta at which grids of epsilon end. A longer grid would not reduce T(a) for any measurable `a`."""
_GRID, _STEPS = 1e-3, 1e5
"""Minimum width and maximum number of steps of a loss grid: coarser than `accountant`, for bounds of three digits."""
_MANY = 5000
"""Number of releases from which grid errors add up, so that a finer grid is used."""
_LARGEST = 600.0
"""Maximum epsilon of a grid, for which exp(epsilon) is finite in double precision."""
_POINTS, _FEW = 2000, 200
"""Points of a grid, and of the slower Renyi accountant, which evaluates them one by one."""
_ROUNDING = 1e-9
"""Margin added to every delta, because sums of losses are computed with Fourier transforms in double precision."""

Profile = tuple[np.ndarray, np.ndarray]
"""Epsilons (K,), starting at 0, and upper bounds (K,) on delta at these."""


@dataclass(frozen=True)
class TradeOff:
    """Trade-off curve (f-DP) of the sample or client with the weakest guarantee.

    `units` holds the releases about each unit, which are composed. `accountant` is as for `guarantee`.
    """

    units: tuple[tuple[Release, ...], ...]
    accountant: Method | None = None

    @classmethod
    def from_releases(cls, releases: Iterable[Release], accountant: Method | None = None) -> TradeOff:
        """Return the trade-off curve of releases, each about another unit of privacy."""
        return cls(tuple((release,) for release in releases), accountant)

    def after(self, extra: Iterable[Release]) -> TradeOff:
        """Return the trade-off curve after additional releases about every unit of privacy."""
        added = tuple(extra)
        return TradeOff(tuple((*unit, *added) for unit in self.units) or (added,), self.accountant)

    @property
    def taking_part(self) -> TradeOff:
        """Return the trade-off curve of a unit known to be in every release, without amplification by sampling."""
        known = (tuple(replace(release, rate=1.0, drawn=None) for release in unit) for unit in self.units)
        return TradeOff(tuple(known), self.accountant)

    def at_most(self, chance: float) -> float:
        """Return an upper bound on an attacker's success probability, given a success probability `chance` before."""
        return self._worst(lambda profile: _bound(profile, chance), chance)

    @property
    def advantage(self) -> float:
        """Return an upper bound on the difference between a membership test's true and false positive rates."""
        return self._worst(lambda profile: float(profile[1][0]), 0.0)

    def _worst(self, bound: Callable[[Profile], float], least: float) -> float:
        """Return the largest bound of any unit, each from its tightest accountant."""
        different = list(dict.fromkeys(self.units))
        quick = dict.fromkeys(different, 1.0)
        if len(different) > 1:  # the fast accountant's bound is valid, too, so few units need the tight one
            quick = {unit: bound(_profile(unit, "rdp")) for unit in different}
        found = least
        for unit in sorted(quick, key=lambda unit: -quick[unit]):
            if quick[unit] <= found:
                break
            methods: tuple[Method, ...] = ("rdp",) if self.accountant == "rdp" else ("pld",)
            if any(release.drawn for release in unit):
                methods = ("rdp", "pld")
            found = max(found, min(quick[unit], *(bound(_profile(unit, method)) for method in methods)))
        return found


def _bound(profile: Profile, chance: float) -> float:
    epsilons, deltas = profile
    up = chance * np.exp(epsilons) + deltas
    down = 1 - np.exp(-epsilons) * (1 - deltas - chance)
    return float(min(1.0, max(chance, min(up.min(), down.min()))))


@lru_cache(maxsize=256)
def _profile(unit: tuple[Release, ...], method: Method) -> Profile:
    """Return the privacy profile of all releases about a unit, with delta 1 if there is no noise."""
    used = [release for release in unit if release.count]
    if not used:
        return np.zeros(1), np.zeros(1)
    if any(release.multiplier == 0 for release in used):
        return np.zeros(1), np.ones(1)
    try:
        if method == "pld":
            # Sampling never increases leakage, and these losses do not support it.
            return _tight(tuple(replace(release, drawn=None) for release in used))
        return _quick(tuple(used))
    except OverflowError:  # with so little noise that losses overflow
        return np.zeros(1), np.ones(1)


def _tight(unit: tuple[Release, ...]) -> Profile:
    from dp_accounting.pld import privacy_loss_distribution as losses

    finest = _GRID if sum(release.count for release in unit) < _MANY else _GRID / 10
    interval = max(choose_grid(release, _TAIL, finest, _STEPS) for release in unit)
    whole = None
    for release in unit:
        if release.noise == "gaussian":
            one = losses.from_gaussian_mechanism(
                release.multiplier, sampling_prob=release.rate, value_discretization_interval=interval
            )
        else:
            one = losses.from_laplace_mechanism(
                release.multiplier, sampling_prob=release.rate, value_discretization_interval=interval
            )
        one = one.self_compose(release.count)
        whole = one if whole is None else whole.compose(one)
    assert whole is not None
    epsilons = _epsilons(float(whole.get_epsilon_for_delta(_TAIL)), _POINTS)
    return epsilons, _upwards(whole.get_delta_for_epsilon(epsilons))


def _quick(unit: tuple[Release, ...]) -> Profile:
    accountant = make_accountant(unit, "rdp", _TAIL)
    epsilons = _epsilons(float(accountant.get_epsilon(_TAIL)), _FEW)
    return epsilons, _upwards([accountant.get_delta(epsilon) for epsilon in epsilons])


def _epsilons(last: float, points: int) -> np.ndarray:
    return np.linspace(0.0, min(last, _LARGEST), points)


def _upwards(deltas: Iterable[float]) -> np.ndarray:
    found: np.ndarray = np.nan_to_num(np.asarray(list(deltas)), nan=1.0).clip(min=0.0) + _ROUNDING
    return found.clip(max=1.0)
