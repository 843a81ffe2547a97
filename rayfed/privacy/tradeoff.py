"""Bounds on what anybody can learn about a unit of privacy: the trade-off curve of an account (f-DP).

Of an event that has a probability of at most `a` where a unit (a sample, or a client) is hidden, the accountant's
delta(epsilon) bounds the probability T(a) where it is not, for each epsilon from 0 on:

    T(a) <= a e^epsilon + delta(epsilon),    T(a) <= 1 - e^-epsilon (1 - delta(epsilon) - a),

the second by the first for the complements. Every epsilon gives a bound, so a grid of them can only err upwards.
Three readings of T:

- **Reconstruction** (ReRo). A guess at a secret of the unit that is right with probability `a` before anything is seen
  is right with at most T(a) after. What the mechanism does without the unit must not depend on the secret: under
  zero-out, add-or-remove and replace-one adjacency there is such a reference (the unit set to zero, left out, or a
  fixed other one in its place).
- **Membership.** A test with a false positive rate of `a` for whether the unit is there has a true positive rate of at
  most T(a); the difference of both rates (the advantage) is at most delta(0).
- **Another value of the unit.** Whether it is x or y: T(a) too under replace-one adjacency; where the account hides a
  unit behind nothing at all, from x to y it is two steps, T(T(a)).

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

from rayfed.privacy.accountant import Method, Release, accountant_of, grid_of

PRIORS = (10, 100, 1000)
"""A guess is right by chance once in so many times: the priors for which bounds are stated."""
_TAIL = 1e-10
"""Delta at which grids of epsilon end: beyond, T(a) would be no smaller for any `a` that can be measured."""
_GRID, _STEPS = 1e-3, 1e5
"""Finest width of a grid of losses, and most steps of one: a tenth of an account's, for bounds of three digits."""
_MANY = 5000
"""Number of releases from which on the error of a grid adds up, and an account's width is taken."""
_LARGEST = 600.0
"""Largest epsilon of a grid: e to its power is still a number in double precision."""
_POINTS, _FEW = 2000, 200
"""Points of a grid, and those of the Renyi accountant, which looks at one after the other."""
_ROUNDING = 1e-9
"""Added to every delta: sums of losses are found by Fourier transforms in double precision."""

Profile = tuple[np.ndarray, np.ndarray]
"""Epsilons (K,), the first of which is 0, and upper bounds (K,) on delta at them."""


@dataclass(frozen=True)
class TradeOff:
    """Trade-off curve (f-DP) of the sample or client with the weakest guarantee.

    `units` are the releases of one unit each, which see that unit all together; an accountant is as for `guarantee`.
    """

    units: tuple[tuple[Release, ...], ...]
    accountant: Method | None = None

    @classmethod
    def of(cls, releases: Iterable[Release], accountant: Method | None = None) -> TradeOff:
        """Return the curve of releases, each about another unit."""
        return cls(tuple((release,) for release in releases), accountant)

    def after(self, extra: Iterable[Release]) -> TradeOff:
        """Return the curve after some more releases about every unit."""
        added = tuple(extra)
        return TradeOff(tuple((*unit, *added) for unit in self.units) or (added,), self.accountant)

    @property
    def taking_part(self) -> TradeOff:
        """The curve of a unit known to be in every release, without amplification by sampling."""
        known = (tuple(replace(release, rate=1.0, drawn=None) for release in unit) for unit in self.units)
        return TradeOff(tuple(known), self.accountant)

    def at_most(self, chance: float) -> float:
        """Return the bound at a probability 0..1, at least `chance` and at most 1."""
        return self._worst(lambda profile: _bound(profile, chance), chance)

    @property
    def advantage(self) -> float:
        """The largest difference between a membership test's true and false positive rates."""
        return self._worst(lambda profile: float(profile[1][0]), 0.0)

    def _worst(self, bound: Callable[[Profile], float], least: float) -> float:
        """Return the largest bound of any unit, each by its tightest accountant."""
        different = list(dict.fromkeys(self.units))
        quick = dict.fromkeys(different, 1.0)
        if len(different) > 1:  # the quick accountant's bound holds as well, so few of many need the tight one
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
    """Return the privacy profile of all releases about a unit, with delta 1 if nothing hides it."""
    used = [release for release in unit if release.count]
    if not used:
        return np.zeros(1), np.zeros(1)
    if any(release.multiplier == 0 for release in used):
        return np.zeros(1), np.ones(1)
    try:
        if method == "pld":
            # A draw never adds to what can be told, and these losses do not know it.
            return _tight(tuple(replace(release, drawn=None) for release in used))
        return _quick(tuple(used))
    except OverflowError:  # so little noise that losses are beyond double precision
        return np.zeros(1), np.ones(1)


def _tight(unit: tuple[Release, ...]) -> Profile:
    from dp_accounting.pld import privacy_loss_distribution as losses

    finest = _GRID if sum(release.count for release in unit) < _MANY else _GRID / 10
    interval = max(grid_of(release, _TAIL, finest, _STEPS) for release in unit)
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
    accountant = accountant_of(unit, "rdp", _TAIL)
    epsilons = _epsilons(float(accountant.get_epsilon(_TAIL)), _FEW)
    return epsilons, _upwards([accountant.get_delta(epsilon) for epsilon in epsilons])


def _epsilons(last: float, points: int) -> np.ndarray:
    return np.linspace(0.0, min(last, _LARGEST), points)


def _upwards(deltas: Iterable[float]) -> np.ndarray:
    found: np.ndarray = np.nan_to_num(np.asarray(list(deltas)), nan=1.0).clip(min=0.0) + _ROUNDING
    return found.clip(max=1.0)
