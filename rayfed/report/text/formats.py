"""Formatting of numbers as text."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite, isinf
from typing import Any

from rayfed.evidence.rows import is_measured
from rayfed.evidence.spread import Spread
from rayfed.metrics.images import PSNR_CEILING
from rayfed.metrics.known import NOUNS, leading
from rayfed.metrics.measures import MEASURES
from rayfed.privacy.printing import format_share_bound, format_upper

NONE = "–"
"""Text for a value that was not measured."""
MAX_NAMES = 10
"""Maximum number of names that a line lists."""
LEFT_OUT = "left out of this copy"
"""Text of a value, such as the message of an error, that is left out of a copy."""
_FOUND = {leading(form): noun for form, noun in NOUNS.items() if form != "pixels"}
"""Noun for samples other than images, by their leading metric."""


def format_count(count: int, noun: str) -> str:
    """Return a number with its noun in the singular or plural: `1 round`, `2 rounds`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def format_share(value: float | None) -> str:
    """Format a share as a percentage: 0.9123 -> '91.2 %'."""
    return f"{100 * value:.1f} %" if value is not None and is_measured(value) else NONE


def format_points(value: float | None) -> str:
    """Format a difference of two shares in percentage points: -0.013 -> '−1.3'."""
    if value is None or not is_measured(value):
        return NONE
    rounded = round(100 * value, 1)
    return f"{rounded:+.1f}".replace("-", "−") if rounded else "±0.0"


def format_psnr(value: float | None) -> str:
    """Format a PSNR in dB: 'exact' for infinity, '>100' above the ceiling."""
    if value is None or not is_measured(value):
        return NONE
    if isinf(value) and value > 0:
        return "exact"
    return f">{PSNR_CEILING:.0f}" if value > PSNR_CEILING else f"{value:.1f}".replace("-", "−")


def noun_of_sample(row: Mapping[str, Any]) -> str:
    """Return the noun for the sample in a row of `attacks`: image, text or record."""
    return next((noun for metric, noun in _FOUND.items() if is_measured(row.get(metric.name))), NOUNS["pixels"])


def format_similarity(row: Mapping[str, Any]) -> str:
    """Format the similarity of a row's reconstruction: '12.3 dB', 'exact', '75.0 % of its tokens in place'."""
    for metric in _FOUND:
        if is_measured(row.get(metric.name)):
            return f"{format_share(row[metric.name])} of its {metric.title}"
    value = format_psnr(row["psnr"])
    return value if value in ("exact", NONE) else f"{value} dB"


def format_mean_psnr(value: float) -> str:
    """Format a mean of clipped PSNR values; a mean at the ceiling begins with '≥'."""
    return f"≥{PSNR_CEILING:.0f}" if value >= PSNR_CEILING else f"{value:.1f}".replace("-", "−")


def format_number(value: float | None, digits: int = 3) -> str:
    """Format a number with `digits` significant digits: 0.01234 -> '0.0123'; small numbers as '1.2e-09'."""
    return f"{value:.{digits}g}".replace("-", "−") if value is not None and is_measured(value) else NONE


def format_error(value: float | None) -> str:
    """Format a mean squared error with three significant digits and trailing zeros: '0.0600', '1.20e-09'."""
    return f"{value:#.3g}" if value is not None and is_measured(value) else NONE


def format_decimals(value: float | None, digits: int = 3) -> str:
    """Format a number with `digits` decimals."""
    return f"{value:.{digits}f}".replace("-", "−") if value is not None and is_measured(value) else NONE


def format_duration(seconds: float | None) -> str:
    """Format seconds as '0.42 s', '3 min 05 s' or '2 h 10 min'."""
    if seconds is None or not isfinite(seconds):
        return NONE
    if seconds < 60:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def format_bytes(count: float | None) -> str:
    """Format a number of bytes in decimal units: 1234567 -> '1.23 MB'."""
    if count is None or not is_measured(count):
        return NONE
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def format_counts(value: Spread | None) -> str:
    """Format several whole numbers by their range: '300', '3 to 4'."""
    if value is None:
        return NONE
    return f"{value.low:,.0f}" if value.low == value.high else f"{value.low:,.0f} to {value.high:,.0f}"


def format_mean_bytes(value: Spread | None) -> str:
    """Format the mean of several numbers of bytes."""
    return format_bytes(value.mean if value else None)


def format_mean_duration(value: Spread | None) -> str:
    """Format the mean of several durations in seconds."""
    return format_duration(value.mean if value else None)


def format_measure(name: str, value: float | None) -> str:
    """Format a value of the measure `name` with the measure's unit: ('psnr', 21.34) -> '21.3 dB'."""
    if value is None or not is_measured(value):
        return NONE
    if MEASURES[name].proved:
        return format_share_bound(value) if MEASURES[name].share else format_upper(value)
    if MEASURES[name].share:
        return format_share(value)
    unit = MEASURES[name].unit
    if unit == "dB":
        return f"{format_mean_psnr(value)} dB"
    return {"s": format_duration, "bytes": format_bytes}.get(unit, format_number)(value)
