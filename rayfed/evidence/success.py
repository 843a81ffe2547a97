"""Success rates: the share of attacked images that reach a threshold, as a function of the threshold.

The probability of reconstruction success (PoRS) is the value at the threshold of `metrics.success`. Source: Ren 2022
(thesis), section 3.3.2.2 and figure 3.5.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from rayfed.errors import UserError, nearest
from rayfed.evidence.rows import Row, group_rows, is_measured
from rayfed.metrics.known import METRICS

_FIRST = ("psnr", "ssim")
_CURVES = [name for name, metric in METRICS.items() if metric.success == "curve"]
CURVE_METRICS = (*_FIRST, *(name for name in _CURVES if name not in _FIRST))
"""Metrics with success curves."""
_COLUMNS = pa.schema(
    [
        pa.field("setting", pa.string()),
        pa.field("arm", pa.string()),
        pa.field("attack", pa.string()),
        pa.field("batch_size", pa.int32()),
        pa.field("metric", pa.string()),
        pa.field("threshold", pa.float64()),
        pa.field("images", pa.int64()),
        pa.field("share", pa.float64()),
    ]
)


@dataclass(frozen=True)
class AttackGroup:
    """Rows of `attacks` for one success curve: one attack on one arm and, in a sweep, in one setting."""

    setting: str
    arm: str
    attack: str
    rows: Sequence[Row]


@dataclass(frozen=True)
class SuccessCurve:
    """Success rate of one attack as a function of the threshold."""

    group: AttackGroup
    metric: str
    thresholds: list[float]
    """Thresholds from the easiest to the hardest."""
    shares: list[float]
    """Shares of all attacked images, 0..1; an image without a value counts as a failure."""


def group_by_attack(attacks: Iterable[Row]) -> list[AttackGroup]:
    """Return the rows of `attacks` of one run, grouped by arm and attack, in the order of the table."""
    groups = group_rows(attacks, "arm", "attack")
    return [AttackGroup(arm, arm, attack, rows) for (arm, attack), rows in groups.items()]


def success_curve(group: AttackGroup, metric: str, thresholds: Sequence[float] | None = None) -> SuccessCurve | None:
    """Return the success curve of one metric; None if no image has a value. PSNR is clipped at its ceiling.

    `thresholds` default to all measured values, which describe the curve completely. Raises `UserError` for a metric
    without curves.
    """
    if metric not in CURVE_METRICS:
        raise UserError(f"'{metric}' has no success rates: {nearest(metric, CURVE_METRICS)}")
    sign = 1 if METRICS[metric].higher_is_closer else -1
    values = np.array([row[metric] for row in group.rows if is_measured(row.get(metric))], np.float64)
    if not len(values):
        return None
    values = np.sort(sign * values.clip(max=METRICS[metric].ceiling))
    steps = np.unique(values) if thresholds is None else np.sort(sign * np.asarray(thresholds, np.float64))
    successes = len(values) - np.searchsorted(values, steps, side="left")
    return SuccessCurve(group, metric, (sign * steps).tolist(), (successes / len(group.rows)).tolist())


def success_share(rows: Sequence[Row], metric: str, threshold: float) -> float | None:
    """Return the probability of reconstruction success (PoRS): the share of images that reach the threshold.

    The share is of all attacked images, and an image without a value counts as a failure. None if no image has a value.
    """
    values = [row[metric] for row in rows if is_measured(row.get(metric))]
    successes = sum(METRICS[metric].passes(value, threshold) for value in values)
    return successes / len(rows) if values else None


def success_table(curves: Iterable[SuccessCurve]) -> pa.Table:
    """Return an Arrow table with one row for every point of every success curve.

    Columns: `setting` (for a run, the arm), `arm`, `attack`, `batch_size` (null if it varies), `metric`, `threshold`,
    `images` (number attacked) and `share`.
    """
    rows = []
    for curve in curves:
        group = curve.group
        batch_sizes = {row["batch_size"] for row in group.rows}
        shared = {
            "setting": group.setting,
            "arm": group.arm,
            "attack": group.attack,
            "batch_size": batch_sizes.pop() if len(batch_sizes) == 1 else None,
            "metric": curve.metric,
            "images": len(group.rows),
        }
        for threshold, share in zip(curve.thresholds, curve.shares, strict=True):
            rows.append({**shared, "threshold": threshold, "share": share})
    return pa.Table.from_pylist(rows, schema=_COLUMNS)
