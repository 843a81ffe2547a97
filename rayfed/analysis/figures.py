"""Figures of measures as people read them, in tables and in sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, isinf, log10

from rayfed.analysis.formats import NONE, duration, size
from rayfed.analysis.promises import mixed
from rayfed.analysis.settings import Estimate, Setting
from rayfed.metrics.images import PSNR_CEILING
from rayfed.metrics.measures import JUDGED, MEASURES, worst_of
from rayfed.privacy.printing import at_most

SHOWN = (
    "test_accuracy",
    "pmm",
    *(
        name
        for metric in JUDGED
        if "settings" in metric.tables
        for name in (metric.name, worst_of(metric.name))[: 1 + metric.worst_in_tables]
    ),
    "inferred",
    "epsilon",
    "train_seconds",
    "bytes_up",
)
"""Measures that tables of settings show, where they are known."""
SINGLE = "Every setting was played once: nothing is known of the spread over seeds."
_SCALES = {"bytes": ("MB", 1e-6)}
"""Unit in tables, and how many of it one is, by unit."""


def heading(measure: str) -> str:
    """Return a column's title with its unit: `PSNR (dB)`."""
    title, unit = MEASURES[measure].title, MEASURES[measure].unit
    title = title.replace("bytes sent", "sent") if unit == "bytes" else title
    unit = _SCALES.get(unit, (unit, 1))[0]
    return f"{title} ({unit})" if unit else title


def cell(measure: str, estimate: Estimate | None) -> str:
    """Return a figure under its `heading`: `12.3`, or `12.34 ± 0.56` with half the 95 % interval.

    Both are told to the interval's second digit.
    """
    if estimate is None:
        return NONE
    if measure == "epsilon":  # the weakest of the repeats, and no mean
        return at_most(estimate.mean, 4)
    factor = _SCALES.get(MEASURES[measure].unit, ("", 1.0))[1]
    if MEASURES[measure].unit == "dB" and estimate.mean >= PSNR_CEILING:
        return f"≥{PSNR_CEILING:g}"
    mean = estimate.mean * factor
    if estimate.high is None:
        return _plain(mean)
    half = estimate.high * factor - mean
    decimals = max(0, 1 - floor(log10(half))) if half > 1e-12 * max(1, abs(mean)) else None
    return f"{_plain(mean)} ± 0" if decimals is None else f"{mean:.{decimals}f} ± {half:.{decimals}f}"


def said(measure: str, value: float) -> str:
    """Return one value with its unit: `12.3 dB`, `0.972`, `3 min 05 s`."""
    unit = MEASURES[measure].unit
    if measure == "epsilon":
        return at_most(value, 4)
    if unit == "dB":
        return "exact" if isinf(value) else f"{_plain(value)} dB"
    if unit == "s":
        return duration(value)
    if unit == "bytes":
        return size(value)
    return f"{_plain(value)} {unit}".strip()


def said_with_interval(measure: str, estimate: Estimate) -> str:
    """Return a mean with its 95 % interval: `12.3 dB (11.8 dB to 12.9 dB)`.

    The value stands alone where there is no spread.
    """
    if estimate.low is None or estimate.high is None or estimate.low == estimate.high:
        return said(measure, estimate.mean)
    return f"{said(measure, estimate.mean)} ({said(measure, estimate.low)} to {said(measure, estimate.high)})"


@dataclass(frozen=True)
class Grid:
    """Settings as a table of text."""

    headings: list[str]
    words: int
    """Number of columns, from the left, that are words; the others are figures."""
    rows: list[list[str]]
    note: str
    """Note on what stands behind the figures."""


def grid(settings: Sequence[Setting]) -> Grid:
    """Return a table with a row for each setting; columns in which nothing is known are left out."""
    fields = list(dict.fromkeys(path for each in settings for path in each.fields))
    shown = [name for name in SHOWN if any(name in each.measures for each in settings)]
    sourced = any(each.source for each in settings)
    words = ["run"] * sourced + ["arm", *short_names(fields), "attack"]
    rows = [
        [each.source] * sourced
        + [each.arm, *(_value(each.fields.get(path)) for path in fields), each.attack or NONE]
        + [cell(name, each.measures.get(name)) for name in shown]
        for each in settings
    ]
    repeats = sorted({estimate.n for each in settings for estimate in each.measures.values()})
    most = "" if repeats[:1] == repeats[-1:] else f"{repeats[0]} to "
    note = f"Mean and half the 95 % interval over {most}{repeats[-1]} repeats." if repeats[-1:] > [1] else SINGLE
    if "epsilon" in shown and (found := mixed(settings)):
        note = f"{note} Note that {found}."
    return Grid([*words, *map(heading, shown)], len(words), rows, note)


def short_names(fields: Sequence[str]) -> list[str]:
    """Return paths by their last key, where that says which it is."""
    last = [path.rpartition(".")[2] for path in fields]
    return [name if last.count(name) == 1 else path for name, path in zip(last, fields, strict=True)]


def _value(value: object) -> str:
    return NONE if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _plain(value: float) -> str:
    return f"{value:.4g}"
