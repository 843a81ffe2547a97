"""Cells of the tables on pages: a text, and a note in small print."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rayfed.evidence.spread import Spread
from rayfed.metrics.base import Metric
from rayfed.metrics.roc import Estimate
from rayfed.report.text.formats import NONE, decibel_mean, error, fixed, share


@dataclass(frozen=True)
class Cell:
    """Cell of a table."""

    text: str
    note: str = ""
    """Text in small print below the text."""


@dataclass(frozen=True)
class Column:
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

    columns: Sequence[Column]
    """Columns after the first."""
    rows: Sequence[tuple[str, Sequence[Cell]]]
    """Heading and cells of each row."""
    heading: str = "Arm"
    """Heading of the first column."""
    by_arm: bool = True
    """Whether the headings of the rows are arms, which have colours."""
    label: str = ""
    """Description of a table that scrolls; empty for a table in full height."""


def spread_cell(value: Spread | None, form: Callable[[float], str], count: int = 0) -> Cell:
    """Return a mean with its standard deviation and range; the number of values only if it is not `count`."""
    if value is None:
        return Cell(NONE)
    deviation = "" if value.sd is None else f", sd {form(value.sd)}"
    number = "" if value.n == count else f", n = {value.n}"
    return Cell(f"{form(value.mean)}{deviation}", f"{form(value.low)} to {form(value.high)}{number}")


def decibel_cell(value: Spread | None) -> Cell:
    """Return the mean of a PSNR with its standard deviation, range and number of values."""
    if value is None:
        return Cell(NONE)
    deviation = "" if value.sd is None else f", sd {fixed(value.sd, 1)}"
    ends = f"{decibel_mean(value.low)} to {decibel_mean(value.high)}"
    return Cell(f"{decibel_mean(value.mean)}{deviation}", f"{ends}, n = {value.n}")


def score_cell(metric: Metric, value: Spread | None, count: int) -> Cell:
    """Return the values of a metric; `count` is the number of values that other cells of the row have."""
    if value is None:
        return Cell(NONE)
    if metric.format == "hit" or metric.compares == "labels":
        return Cell(share(value.mean), f"n = {value.n}")
    if metric.unit == "dB":
        return decibel_cell(value)
    return spread_cell(value, error if metric.format == "error" else fixed, count)


def estimate_cell(value: Estimate | None, form: Callable[[float], str], unknown: str = NONE) -> Cell:
    """Return an estimate with its interval."""
    return Cell(unknown) if value is None else Cell(form(value.value), f"{form(value.low)} to {form(value.high)}")
