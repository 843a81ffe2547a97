"""Mean, standard deviation and range of measured values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf, isfinite
from statistics import fmean, stdev

from rayfed.evidence.rows import is_measured


@dataclass(frozen=True)
class Spread:
    """Mean, standard deviation and range of some values."""

    mean: float
    sd: float | None
    """Sample standard deviation (n - 1); None for a single value."""
    low: float
    high: float
    n: int


def measure_spread(values: Iterable[float | None], ceiling: float = inf) -> Spread | None:
    """Return mean, standard deviation and range of the measured values, clipped at `ceiling`; None without values.

    The standard deviation is None if a value is infinite.
    """
    known = [min(float(value), ceiling) for value in values if is_measured(value)]
    if not known:
        return None
    finite = all(map(isfinite, known))
    mean = fmean(known) if finite else sum(known) / len(known)  # NaN for infinite values of both signs
    deviation = stdev(known) if finite and len(known) > 1 else None
    return Spread(mean, deviation, min(known), max(known), len(known))
