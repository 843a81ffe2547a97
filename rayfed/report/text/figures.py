"""Text of measured values: cells of tables, and values with units in sentences."""

from __future__ import annotations

from math import isinf

from rayfed.evidence.figures import RoundedEstimate, round_estimate
from rayfed.evidence.settings import MeanEstimate, Setting, describes_attacks
from rayfed.metrics.measures import MEASURES
from rayfed.privacy.printing import format_upper
from rayfed.report.text.formats import NONE, format_bytes, format_duration

USELESS = "§"
"""Mark of an arm whose model is useless, in some or all repeats."""
UNPROVEN, PARTLY, OUTDONE = "†", "¶", "‖"
"""Marks of a leakage value that is no evidence of protection: because of the arm's verdict, because of its verdict in
some repeats, or because an attacker that knew less reconstructed more."""
FAILED = "‡"
"""Mark of a value that includes attacks that diverged or failed."""
FAILED_LEGEND = f"{FAILED}: the attack diverged or failed on some updates, so the value is no evidence for the defence"
"""Explanation of the mark; the settings and counts follow it."""
_UNITS = {"bytes": "MB"}
"""Units of tables that differ from the measure's unit (`rayfed.evidence.figures.SCALES`)."""


def heading(measure: str) -> str:
    """Return the column heading of a measure with the unit: `PSNR (dB)`."""
    title, unit = MEASURES[measure].title, MEASURES[measure].unit
    if unit == "bytes":
        title = title.replace("bytes sent", "sent")
    unit = _UNITS.get(unit, unit)
    return f"{title} ({unit})" if unit else title


def number_text(cell: RoundedEstimate) -> str:
    """Format a rounded number: `12.3`, `12.34 ± 0.56`, `12.3 (10.1 to 13.2)`, or `12.3 (11.8, 12.9)` for two values."""
    if cell.ends is None:
        return f"{'≥' if cell.at_ceiling else ''}{cell.value:.{cell.digits}g}"
    mean, low, high = (f"{number:.{cell.decimals}f}" for number in (cell.value, *cell.ends))
    if cell.pair:
        return f"{mean} ({low}, {high})"
    if not cell.symmetric:
        return f"{mean} ({low} to {high})"
    return f"{mean} ± {cell.half:.{cell.decimals}f}"


def cell_text(measure: str, estimate: MeanEstimate | None) -> str:
    """Format an estimate as a table cell: `12.3`, or `12.34 ± 0.56` with half the 95 % interval.

    An asymmetric interval is given by its ends. Two values have no interval and follow their mean, as in
    `12.3 (11.8, 12.9)`. A single value and equal values have only a mean.
    """
    return NONE if estimate is None else number_text(round_estimate(measure, estimate))


def marked_cell(measure: str, one: Setting) -> str:
    """Format the value of a measure, with a mark if the value is no evidence of protection."""
    estimate = one.measures.get(measure)
    text = cell_text(measure, estimate)
    if estimate is None or not describes_attacks(measure):
        return text
    if measure in one.outdone:
        text += OUTDONE
    elif one.doubted(measure):
        text += UNPROVEN
    if one.partly_doubted(measure):
        text += PARTLY
    if one.unanswered[0]:
        text += FAILED
    return text


def useless_mark(one: Setting) -> str:
    """Return the mark to append to a setting's name if the setting's model is useless, otherwise an empty string."""
    return USELESS if one.useless or one.collapsed else ""


def measure_value_text(measure: str, value: float) -> str:
    """Format the value of a measure with the unit: `12.3 dB`, `0.972`, `3 min 05 s`."""
    unit = MEASURES[measure].unit
    if MEASURES[measure].proved:
        return format_upper(value)
    if unit == "dB":
        return "exact" if isinf(value) else f"{value:.4g} dB"
    if unit == "s":
        return format_duration(value)
    if unit == "bytes":
        return format_bytes(value)
    return f"{value:.4g} {unit}".strip()


def estimate_interval_text(measure: str, estimate: MeanEstimate) -> str:
    """Format a mean with unit and 95 % interval, `12.3 dB (11.8 dB to 12.9 dB)`, or with both of two values.

    Without an interval, return only the mean.
    """
    mean = measure_value_text(measure, estimate.mean)
    if estimate.spread is None:
        return mean
    low, high = (measure_value_text(measure, end) for end in estimate.pair or estimate.spread)
    return f"{mean} ({low}, {high})" if estimate.pair else f"{mean} ({low} to {high})"
