"""A measure's figures as people read them, in tables and in sentences."""

from __future__ import annotations

from math import floor, log10

from rayfed.results.formats import NONE, duration, size
from rayfed.results.outcomes import MEASURES
from rayfed.results.settings import Estimate

_SCALES = {"bytes": ("MB", 1e-6)}
"""Unit -> the unit in tables, and how many of it one is."""


def heading(measure: str) -> str:
    """A column's title with its unit: `PSNR (dB)`."""
    title, unit = MEASURES[measure].title, MEASURES[measure].unit
    title = title.replace("bytes sent", "sent") if unit == "bytes" else title
    unit = _SCALES.get(unit, (unit, 1))[0]
    return f"{title} ({unit})" if unit else title


def cell(measure: str, estimate: Estimate | None) -> str:
    """A figure under its `heading`: `12.3`, or `12.34 ± 0.56` with half the 95 % interval, both to its second digit."""
    if estimate is None:
        return NONE
    factor = _SCALES.get(MEASURES[measure].unit, ("", 1.0))[1]
    mean = estimate.mean * factor
    if estimate.high is None:
        return _plain(mean)
    half = estimate.high * factor - mean
    decimals = max(0, 1 - floor(log10(half))) if half > 1e-12 * max(1, abs(mean)) else None
    return f"{_plain(mean)} ± 0" if decimals is None else f"{mean:.{decimals}f} ± {half:.{decimals}f}"


def said(measure: str, value: float) -> str:
    """One value with its unit: `12.3 dB`, `0.972`, `3 min 05 s`."""
    unit = MEASURES[measure].unit
    if unit == "s":
        return duration(value)
    if unit == "bytes":
        return size(value)
    return f"{_plain(value)} {unit}".strip()


def said_with_interval(measure: str, estimate: Estimate) -> str:
    """A mean with its 95 % interval: `12.3 dB (11.8 dB to 12.9 dB)`; of a single run the value alone."""
    if estimate.low is None or estimate.high is None:
        return said(measure, estimate.mean)
    return f"{said(measure, estimate.mean)} ({said(measure, estimate.low)} to {said(measure, estimate.high)})"


def _plain(value: float) -> str:
    return f"{value:.4g}"
