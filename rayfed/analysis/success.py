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
from rayfed.evidence.rows import Row, measured
from rayfed.metrics.known import METRICS

_FIRST = ("psnr", "ssim")
MEASURED = tuple(
    sorted((name for name, m in METRICS.items() if m.success == "curve"), key=lambda name: name not in _FIRST)
)
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


def attack_groups(attacks: Iterable[Row]) -> list[AttackGroup]:
    """Return the rows of `attacks` of one run, grouped by arm and attack, in the order of the table."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in attacks:
        found.setdefault((row["arm"], row["attack"]), []).append(row)
    return [AttackGroup(arm, arm, attack, rows) for (arm, attack), rows in found.items()]


def success_curve(group: AttackGroup, metric: str, thresholds: Sequence[float] | None = None) -> SuccessCurve | None:
    """Return the success curve of one metric; None if no image has a value. PSNR is clipped at its ceiling.

    `thresholds` default to all measured values, which describe the curve completely. Raises `UserError` for a metric
    without curves.
    """
    if metric not in MEASURED:
        raise UserError(f"'{metric}' has no success rates: {nearest(metric, MEASURED)}")
    sign = 1 if METRICS[metric].higher_is_closer else -1
    values = np.array([row[metric] for row in group.rows if measured(row.get(metric))], np.float64)
    if not len(values):
        return None
    values = np.sort(sign * values.clip(max=METRICS[metric].ceiling))
    asked = np.unique(values) if thresholds is None else np.sort(sign * np.asarray(thresholds, np.float64))
    passed = len(values) - np.searchsorted(values, asked, side="left")
    return SuccessCurve(group, metric, (sign * asked).tolist(), (passed / len(group.rows)).tolist())


def success_table(curves: Iterable[SuccessCurve]) -> pa.Table:
    """Return an Arrow table with one row for every point of every success curve.

    Columns: `setting` (for a run, the arm), `arm`, `attack`, `batch_size` (null if it varies), `metric`, `threshold`,
    `images` (number attacked) and `share`.
    """
    return pa.Table.from_pylist(
        [
            {
                "setting": each.group.setting,
                "arm": each.group.arm,
                "attack": each.group.attack,
                "batch_size": _only({row["batch_size"] for row in each.group.rows}),
                "metric": each.metric,
                "threshold": threshold,
                "images": len(each.group.rows),
                "share": share,
            }
            for each in curves
            for threshold, share in zip(each.thresholds, each.shares, strict=True)
        ],
        schema=_COLUMNS,
    )


def _only(values: set[int | None]) -> int | None:
    return next(iter(values)) if len(values) == 1 else None
