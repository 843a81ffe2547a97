"""Text on the checks of a gate."""

from __future__ import annotations

from rayfed.analysis.membership import RATES
from rayfed.evidence.bounds import Bound, BoundedShare

SHARES = {
    BoundedShare.AUC: "AUC of the membership attack",
    BoundedShare.TPR: f"members identified at {100 * RATES[-1]:g} % FPR",
    BoundedShare.IDENTITY: "people identified, top 1",
}
"""Titles of estimated shares."""


def bound_text(bound: Bound) -> str:
    """Return the requirement of a bound, such as `PSNR below 15.0 dB`."""
    metric = bound.metric
    title = metric.title if metric else SHARES[BoundedShare(bound.name)]
    side = "above" if metric and not metric.higher_is_closer else "below"
    return f"{title} {side} {bound_value_text(bound, bound.limit)}"


def bound_value_text(bound: Bound, value: float) -> str:
    """Format a value of the bounded measure with the measure's unit."""
    if bound.name == BoundedShare.AUC:
        return f"{value:.3f}"
    metric = bound.metric
    if metric is None or metric.format == "share":
        return f"{100 * value:.1f} %"
    return f"{value:.1f} {metric.unit}" if metric.unit else f"{value:.3g}"
