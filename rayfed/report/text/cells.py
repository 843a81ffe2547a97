"""Cells of the tables on pages: a text, and a note in small print."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rayfed.evidence.spread import Spread
from rayfed.metrics.base import Metric
from rayfed.metrics.roc import Estimate
from rayfed.report.text.formats import NONE, format_decimals, format_error, format_mean_psnr, format_share


@dataclass(frozen=True)
class PageCell:
    """Cell of a table."""

    text: str
    note: str = ""
    """Text in small print below the text."""


@dataclass(frozen=True)
class PageColumn:
    """Heading of a column of numbers, or of text if `is_text`."""

    title: str
    note: str = ""
    is_text: bool = False

    @property
    def label(self) -> str:
        """Return the heading in one line, as narrow screens show it with each cell."""
        return f"{self.title}, {self.note}" if self.note else self.title


@dataclass(frozen=True)
class PageTable:
    """Table on a page; the first column has the headings of the rows."""

    columns: Sequence[PageColumn]
    """Columns after the first."""
    rows: Sequence[tuple[str, Sequence[PageCell]]]
    """Heading and cells of each row."""
    heading: str = "Arm"
    """Heading of the first column."""
    by_arm: bool = True
    """Whether the headings of the rows are arms, which have colours."""
    label: str = ""
    """Description of a table that scrolls; empty for a table in full height."""


def spread_cell(value: Spread | None, form: Callable[[float], str], count: int = 0) -> PageCell:
    """Return a mean with its standard deviation and range; the number of values only if it is not `count`."""
    if value is None:
        return PageCell(NONE)
    deviation = "" if value.sd is None else f", sd {form(value.sd)}"
    number = "" if value.n == count else f", n = {value.n}"
    return PageCell(f"{form(value.mean)}{deviation}", f"{form(value.low)} to {form(value.high)}{number}")


def decibel_cell(value: Spread | None) -> PageCell:
    """Return the mean of a PSNR with its standard deviation, range and number of values."""
    if value is None:
        return PageCell(NONE)
    deviation = "" if value.sd is None else f", sd {format_decimals(value.sd, 1)}"
    ends = f"{format_mean_psnr(value.low)} to {format_mean_psnr(value.high)}"
    return PageCell(f"{format_mean_psnr(value.mean)}{deviation}", f"{ends}, n = {value.n}")


def score_cell(metric: Metric, value: Spread | None, count: int) -> PageCell:
    """Return the values of a metric; `count` is the number of values that other cells of the row have."""
    if value is None:
        return PageCell(NONE)
    if metric.format == "hit" or metric.compares == "labels":
        return PageCell(format_share(value.mean), f"n = {value.n}")
    if metric.unit == "dB":
        return decibel_cell(value)
    return spread_cell(value, format_error if metric.format == "error" else format_decimals, count)


def estimate_cell(value: Estimate | None, form: Callable[[float], str], unknown: str = NONE) -> PageCell:
    """Return an estimate with its interval."""
    return (
        PageCell(unknown) if value is None else PageCell(form(value.value), f"{form(value.low)} to {form(value.high)}")
    )
