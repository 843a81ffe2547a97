"""Mean, standard deviation and range of measured values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf, isfinite, isnan
from statistics import fmean, stdev


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
    measured = [min(float(value), ceiling) for value in values if value is not None and not isnan(value)]
    if not measured:
        return None
    finite = all(map(isfinite, measured))
    deviation = stdev(measured) if finite and len(measured) > 1 else None
    return Spread(_mean(measured), deviation, min(measured), max(measured), len(measured))


def _mean(values: Sequence[float]) -> float:
    """Return the mean of some values; NaN if they contain infinite values of both signs."""
    return fmean(values) if all(map(isfinite, values)) else sum(values) / len(values)
