"""Numbers of tables: rounding to significant digits, and the best values of a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Context
from math import floor, isfinite, log10

from rayfed.evidence.guarantee_compat import mixed_guarantees
from rayfed.evidence.settings import MeanEstimate, Setting, describes_attacks
from rayfed.metrics.images import PSNR_CEILING
from rayfed.metrics.measures import JUDGED, MEASURES, extreme_of
from rayfed.privacy.printing import round_up

SHOWN = (
    "test_accuracy",
    "pmm",
    *(
        name
        for metric in JUDGED
        if "settings" in metric.tables
        for name in (metric.name, extreme_of(metric.name))[: 1 + metric.worst_in_tables]
    ),
    "inferred",
    "epsilon",
    "rero",
    "train_seconds",
    "simulated_seconds",
    "bytes_up",
)
"""Measures in tables of settings, if they are known."""
SCALES = {"bytes": 1e-6}
"""Conversion factors to the units of tables, by unit; 1 for other units."""


@dataclass(frozen=True)
class RoundedEstimate:
    """Rounded number of a table, in the unit of tables, with the ends of its interval."""

    value: float
    """Mean before rounding. A proved bound is rounded up already, and a value at the ceiling is the ceiling."""
    digits: int = 4
    """Number of significant digits of a value without an interval."""
    at_ceiling: bool = False
    """Whether the mean is at least the ceiling of its measure."""
    ends: tuple[float, float] | None = None
    pair: bool = False
    """Whether the ends are both of two values instead of the ends of an interval."""

    @property
    def decimals(self) -> int:
        """Return the number of decimals, negative if digits before the point are rounded."""
        if self.ends is None:
            return _count_decimals(self.value, self.digits)
        return max(0, (0 if self.pair else 1) - floor(log10(self.half)))

    @property
    def half(self) -> float:
        """Return the distance of the farther end from the value; 0 without ends."""
        low, high = self.ends or (self.value, self.value)
        return max(self.value - low, high - self.value)

    @property
    def symmetric(self) -> bool:
        """Return whether both ends are equally far from the value, within 1 %."""
        low, high = self.ends or (self.value, self.value)
        return abs((high - self.value) - (self.value - low)) <= 0.01 * self.half

    def equals(self, other: RoundedEstimate) -> bool:
        """Return whether both values are equal to the number of decimals that both cells have."""
        decimals = min(self.decimals, other.decimals)
        return round(self.value, decimals) == round(other.value, decimals)


def round_estimate(measure: str, estimate: MeanEstimate) -> RoundedEstimate:
    """Return the number that tables show for an estimate, in their unit.

    Means with an interval are rounded to the second significant digit of the interval, others to the fourth of the
    mean.
    """
    if MEASURES[measure].proved:  # the weakest bound of the repeats, not a mean
        return RoundedEstimate(round_up(estimate.mean), digits=3)
    if MEASURES[measure].unit == "dB" and estimate.mean >= PSNR_CEILING:
        return RoundedEstimate(PSNR_CEILING, at_ceiling=True)
    factor = SCALES.get(MEASURES[measure].unit, 1.0)
    if estimate.spread is None:
        return RoundedEstimate(estimate.mean * factor)
    low, high = estimate.pair or estimate.spread
    return RoundedEstimate(estimate.mean * factor, ends=(low * factor, high * factor), pair=estimate.pair is not None)


def _count_decimals(value: float, digits: int) -> int:
    """Return the number of decimals of a value that is rounded to some significant digits, without trailing zeros."""
    if not isfinite(value):
        return 0
    rounded = Context(prec=digits).create_decimal(value).normalize()
    exponent = int(rounded.as_tuple().exponent)
    return -exponent if exponent < 0 or rounded.adjusted() >= digits else 0  # large ones print in powers of ten


def best_rows(measure: str, settings: Sequence[Setting]) -> set[int]:
    """Return the rows with the best mean for the data's owner: for leakage per attack, else over all rows.

    Useless models and values that are no evidence are not compared. No row is best if all values are equal, or if the
    settings were run with different seeds.
    """
    best: set[int] = set()
    for means in _compared(measure, settings):
        if not _equal_seeds(measure, (settings[row] for row in means)):
            continue
        choose = max if MEASURES[measure].higher_is_better else min
        leading = choose(means, key=means.__getitem__)
        cells = {row: round_estimate(measure, settings[row].measures[measure]) for row in means}
        ties = {row for row, cell in cells.items() if cell.equals(cells[leading])}
        if len(ties) < len(means):
            best |= ties
    return best


def seeds_differ(measure: str, settings: Sequence[Setting]) -> bool:
    """Return whether settings that are compared by a measure were run with different seeds."""
    return not all(_equal_seeds(measure, (settings[row] for row in means)) for means in _compared(measure, settings))


def _compared(measure: str, settings: Sequence[Setting]) -> list[dict[int, float]]:
    """Return groups of means that are compared, by row; for leakage, one group per attack."""
    if mixed_guarantees(settings, measure):
        return []
    by_attack: dict[str | None, dict[int, float]] = {}
    for row, one in enumerate(settings):
        value = _comparable_value(measure, one)
        if value is not None:
            attack = one.attack if MEASURES[measure].kind == "leakage" else None
            by_attack.setdefault(attack, {})[row] = value.mean
    return list(by_attack.values())


def _comparable_value(measure: str, one: Setting) -> MeanEstimate | None:
    """Return the estimate of a measure if it is evidence in all repeats, of a useful model; otherwise None."""
    if one.useless or one.collapsed or one.partly_doubted(measure):
        return None
    if describes_attacks(measure) and one.unanswered[0]:
        return None
    return one.evidence(measure)


def _equal_seeds(measure: str, settings: Iterable[Setting]) -> bool:
    return len({one.seeds(measure) for one in settings}) <= 1
