"""Compute (epsilon, delta) of a mechanism from its noise, and its noise from epsilon, with Google's dp-accounting.

There are two accountants. `pld` uses privacy loss distributions (Koskela 2020) and is numerically tight. `rdp` uses
Renyi differential privacy (Mironov 2017; for sampling without replacement Wang, Balle and Kasiviswanathan 2019). It
converts to (epsilon, delta) by proposition 12 of Canonne, Kamath and Steinke 2020. The classic conversion of Mironov
2017 gives larger epsilons: 2.92 instead of 2.52 in TF-Privacy's well-known example.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import log
from typing import TYPE_CHECKING, Literal

from rayfed.errors import UserError

if TYPE_CHECKING:  # importing it takes over a second, which runs without a guarantee avoid
    from dp_accounting import DpEvent, PrivacyAccountant

Method = Literal["pld", "rdp"]

CONVERSIONS: dict[Method, str] = {
    "pld": "hockey-stick divergence of the privacy loss distribution",
    "rdp": "Canonne, Kamath and Steinke 2020, proposition 12",
}
"""Accountant -> its conversion to an epsilon."""

_ORDERS = [2 + x / 10 for x in range(90)] + list(range(11, 64)) + [128, 256, 512, 1024]
"""Orders of Renyi divergences with sampling: those of dp-accounting except orders below 2, which may not converge."""
_GRID = 1e-4
"""Grid width of privacy losses: dp-accounting's default."""
_STEPS = 1e6
"""Maximum number of grid steps from 0 to epsilon. The grid is coarser for epsilons above 100, which guarantee
little."""
_MOST_NOISE = 1e6
_PRECISION = 1e-3
"""Relative precision of a computed noise multiplier, which is rounded towards more noise."""
_ROUNDING = 1e-6
"""Relative margin added to an epsilon. Losses are rounded up to the grid, but their sums are computed with Fourier
transforms in double precision, with observed errors of up to 1e-11."""
_TINY = 1e-12
"""Lower limit of an epsilon before a logarithm is taken."""


@dataclass(frozen=True)
class Release:
    """Noisy outputs of a mechanism about one unit of privacy (a sample or a client). Outputs are chosen adaptively."""

    noise: Literal["gaussian", "laplace"]
    multiplier: float
    """Standard deviation of the noise (for Laplace: its scale) divided by the sensitivity."""
    count: int
    """Number of outputs."""
    rate: float = 1.0
    """Probability that the unit contributes to an output, independently for each output (Poisson sampling)."""
    drawn: tuple[int, int] | None = None
    """(size, population) of sampling without replacement from a population that includes the unit."""


@dataclass(frozen=True)
class Guarantee:
    """Privacy guarantee (epsilon, delta) of a mechanism, and the accountant that computed the guarantee."""

    epsilon: float
    delta: float
    accountant: Method


def compute_guarantee(releases: Iterable[Release], delta: float, method: Method | None = None) -> Guarantee:
    """Return the (epsilon, delta) guarantee of the unit (sample or client) with the largest epsilon.

    Each release is about another unit. The default method is `pld`, or `rdp` if only that supports the sampling.
    Raises `UserError` for `pld` with sampling without replacement, and for `rdp` with a delta of 0.
    """
    return _worst(tuple(releases), delta, method)[0]


def _worst(releases: Sequence[Release], delta: float, method: Method | None) -> tuple[Guarantee, int]:
    """Return the guarantee of the unit with the largest epsilon, and the unit's index."""
    worst, found = Guarantee(0.0, delta, method or "pld"), 0
    # The fast accountant's epsilon is an upper bound, so the tight accountant is needed for few clients only.
    bounds = [_epsilon(release, delta, "rdp") if delta else float("inf") for release in releases]
    for index in sorted(range(len(releases)), key=lambda i: -bounds[i]):
        if bounds[index] <= worst.epsilon:
            break
        used = method or _best(releases[index])
        epsilon = _epsilon(releases[index], delta, used)
        if epsilon > worst.epsilon:
            worst, found = Guarantee(epsilon, delta, used), index
    return worst, found


def find_least_noise(
    releases: Callable[[float], Sequence[Release]], epsilon: float, delta: float, method: Method | None
) -> float:
    """Return the smallest noise multiplier with which the releases satisfy (epsilon, delta), to about three digits.

    Returns 0 if nothing is released. Raises `UserError` if a million times the sensitivity is not enough noise.
    """
    if not any(release.count for release in releases(1.0)):
        return 0.0
    looked_at = [_worst(releases(1.0), delta, method)[1]]
    while True:  # the client with the largest epsilon may change with the noise, but rarely does
        noise = _least_noise(lambda z: [releases(z)[i] for i in looked_at], epsilon, delta, method)
        found, index = _worst(releases(noise), delta, method)
        if found.epsilon <= epsilon:
            return noise
        looked_at.append(index)


def _least_noise(
    releases: Callable[[float], Sequence[Release]], epsilon: float, delta: float, method: Method | None
) -> float:
    from scipy.optimize import brentq

    def excess(multiplier: float, used: Method | None) -> float:
        return log(max(compute_guarantee(releases(multiplier), delta, used).epsilon, _TINY) / epsilon)

    quick: Method = "rdp"  # its noise suffices for the tight accountant, too, and is fast to compute
    high = 1.0
    while excess(high, quick) > 0:
        high *= 2
        if high > _MOST_NOISE:
            raise UserError(
                f"no noise reaches epsilon {epsilon:g} at delta {delta:g}: increase epsilon or delta, or reduce "
                f"the number of rounds"
            )
    low = high / 2
    while excess(low, method) <= 0:
        low, high = low / 2, low
    found = float(brentq(excess, low, high, args=(method,), rtol=_PRECISION / 2))
    while excess(found, method) > 0:
        found *= 1 + _PRECISION / 2
    return found


def analytic_gaussian(epsilon: float, delta: float) -> float:
    """Return the exact noise multiplier at which one Gaussian release satisfies (epsilon, delta).

    Source: Balle and Wang 2018, theorem 8.
    """
    from dp_accounting.gaussian_mechanism import get_sigma_gaussian

    return float(get_sigma_gaussian(epsilon, delta))


def _best(release: Release) -> Method:
    return "pld" if release.drawn is None else "rdp"


@lru_cache(maxsize=4096)
def _epsilon(release: Release, delta: float, method: Method) -> float:
    if release.count == 0:
        return 0.0
    if release.multiplier == 0:
        return float("inf")
    if delta == 0:
        if release.noise == "laplace" and method == "pld":
            return release.count / release.multiplier  # basic composition is exact for pure privacy
        raise UserError("a delta of 0 needs Laplace noise and privacy.accountant: pld")
    try:
        found = float(make_accountant((release,), method, delta).get_epsilon(delta)) * (1 + _ROUNDING)
    except (ArithmeticError, MemoryError) as error:  # numbers outside the range of its grids
        raise UserError(
            f"no accountant supports {release.count} releases with a noise multiplier of {release.multiplier:.3g}: "
            f"{error}; set a multiplier between 0.01 and 1000000, or fewer rounds"
        ) from error
    # Sampling never increases the loss (divergences are jointly convex), but its bound for large losses does.
    return found if release.drawn is None else min(found, _epsilon(replace(release, drawn=None), delta, method))


def make_accountant(unit: Sequence[Release], method: Method, delta: float) -> PrivacyAccountant:
    """Return a dp-accounting accountant with all releases about one unit, for queries near the given `delta`."""
    accountant = _accountant(unit, method, delta)
    for release in unit:
        accountant.compose(_event(release), release.count)
    return accountant


def _accountant(unit: Sequence[Release], method: Method, delta: float) -> PrivacyAccountant:
    from dp_accounting import NeighboringRelation
    from dp_accounting.pld import PLDAccountant
    from dp_accounting.rdp import RdpAccountant

    if all(release.drawn is None for release in unit):
        if method == "rdp":
            return RdpAccountant(None if all(release.rate == 1 for release in unit) else _ORDERS)
        return PLDAccountant(value_discretization_interval=max(choose_grid(release, delta) for release in unit))
    if method == "pld":
        raise UserError(
            "privacy.accountant: pld does not support sampling a fixed number of clients: "
            "use rdp, or federation.sampling: poisson"
        )
    return RdpAccountant(neighboring_relation=NeighboringRelation.REPLACE_ONE)


def choose_grid(release: Release, delta: float, finest: float = _GRID, steps: float = _STEPS) -> float:
    """Return the interval at which privacy losses are discretised: larger for large losses, to limit memory."""
    return max(finest, _epsilon(replace(release, drawn=None), delta, "rdp") / steps)


def _event(release: Release) -> DpEvent:
    from dp_accounting import dp_event

    plain = dp_event.GaussianDpEvent if release.noise == "gaussian" else dp_event.LaplaceDpEvent
    event: DpEvent = plain(release.multiplier)
    if release.drawn is not None:
        size, population = release.drawn
        return dp_event.SampledWithoutReplacementDpEvent(population, size, event)
    return event if release.rate == 1 else dp_event.PoissonSampledDpEvent(release.rate, event)
