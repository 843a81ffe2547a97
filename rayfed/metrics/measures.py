"""Measures for comparing settings: leakage by metric, accuracy, and cost."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Literal

from rayfed.errors import UserError, nearest
from rayfed.metrics.base import Metric
from rayfed.metrics.known import METRICS


@dataclass(frozen=True)
class Measure:
    """Column of the table of outcomes by which settings can be compared."""

    title: str
    kind: Literal["leakage", "utility", "cost"]
    higher_is_better: bool
    """Whether a higher value is better for the data owner. A low PSNR is good, and so is a high accuracy."""
    unit: str = ""
    share: bool = False
    """Whether to show the value in per cent."""
    proved: bool = False
    """Whether the value is a proved upper bound instead of a measurement. The value of the weakest repeat counts."""
    bounds: tuple[float, float] = (-inf, inf)
    """Minimum and maximum possible value."""


def extreme_of(name: str) -> str:
    """Return the column name of a metric's value for the sample that leaked most: `max_psnr`, `min_mse`."""
    return f"{'max' if METRICS[name].higher_is_closer else 'min'}_{name}"


def measure_of(name: str) -> Measure:
    """Return the measure of a column of outcomes. Raises `UserError` with similar names for an unknown column."""
    if name not in MEASURES:
        raise UserError(f"unknown measure '{name}': {nearest(name, MEASURES)}")
    return MEASURES[name]


_FIRST = ("psnr", "ssim", "lpips_alex", "lpips_vgg")
"""Metrics that come first, in the order of earlier outcomes."""
JUDGED = sorted((metric for metric in METRICS.values() if metric.outcome), key=lambda metric: metric.name not in _FIRST)
"""Metrics of reconstructions with a column of means over samples and one of worst values."""


def _bounds(metric: Metric) -> tuple[float, float]:
    """Return the smallest and largest possible mean of a metric."""
    least, most = (0.0, 1.0) if metric.format in ("share", "hit") else metric.bounds
    return least, min(most, metric.ceiling)


_FROM_ZERO = (0.0, inf)
MEASURES: dict[str, Measure] = {
    **{
        metric.name: Measure(
            metric.title,
            "leakage",
            not metric.higher_is_closer,
            metric.unit,
            metric.format in ("share", "hit"),
            bounds=_bounds(metric),
        )
        for metric in JUDGED
    },
    **{
        extreme_of(metric.name): Measure(
            f"{'max' if metric.higher_is_closer else 'min'} {metric.title}",
            "leakage",
            not metric.higher_is_closer,
            metric.unit,
            metric.format == "share",
            bounds=_bounds(metric),
        )
        for metric in JUDGED
    },
    "inferred": Measure("inferred beyond chance", "leakage", False, share=True, bounds=(-1.0, 1.0)),
    "epsilon": Measure("epsilon", "leakage", False, proved=True),
    "rero": Measure("proved reconstruction, prior 1 in 100", "leakage", False, share=True, proved=True),
    "test_accuracy": Measure("test accuracy", "utility", True, share=True, bounds=(0.0, 1.0)),
    "pmm": Measure("PMM", "utility", True, share=True, bounds=_FROM_ZERO),
    "test_loss": Measure("test loss", "utility", False, "nats", bounds=_FROM_ZERO),
    "train_seconds": Measure("training time", "cost", False, "s", bounds=_FROM_ZERO),
    "simulated_seconds": Measure("simulated time", "cost", False, "s", bounds=_FROM_ZERO),
    "attack_seconds": Measure("attack time", "cost", False, "s", bounds=_FROM_ZERO),
    "bytes_up": Measure("bytes sent by clients", "cost", False, "bytes", bounds=_FROM_ZERO),
    "bytes_down": Measure("bytes sent to clients", "cost", False, "bytes", bounds=_FROM_ZERO),
}
"""Measures by column. PMM is the accuracy divided by that of an otherwise equal arm without a defence. An arm that
changes training, model, rule or malicious clients needs a reference arm with the same changes."""
