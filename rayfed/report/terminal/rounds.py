"""Printed lines on a run's rounds: one line per round with a column per arm, or one line per arm for many arms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rayfed.report.text.formats import NONE, format_share

_WIDTH = 16
"""Minimum width of an arm's column."""
_QUALITIES = {"test_accuracy": "acc", "test_error": "error", "test_iou": "IoU", "test_perplexity": "perplexity"}
"""Measures of a model on the test set, with their headings; a run has one of them."""


class RoundLines:
    """Formatter of the printed lines on the rounds of one run; the first call also returns the heading."""

    def __init__(self, rounds: int, width: int, opponents: bool = False) -> None:
        """Create a formatter for a run of `rounds` rounds and a terminal of `width` characters.

        If arms have `opponents`, there are many, and rounds without a test are left out.
        """
        self._rounds, self._width, self._opponents = rounds, width, opponents
        self._columns: dict[str, int] = {}

    def lines(self, rows: Sequence[Mapping[str, Any]], left: str) -> list[str]:
        """Return the lines on one round; `left` is the estimated time left as text."""
        if not rows:
            return []
        number = f"{rows[0]['round'] + 1:>3}/{self._rounds}"
        if not self._fits([row["arm"] for row in rows]):
            shown = [row for row in rows if not self._opponents or row.get("test_accuracy") is not None]
            return [
                f"{number}  {row['arm']}  loss {_loss(row)}  {_named_quality(row)}  {left}".rstrip() for row in shown
            ]
        heading = [] if self._columns else self._heading(rows)
        cells = [f"{_loss(row, NONE):>{self._columns[row['arm']] - 8}}{_quality(row):>8}" for row in rows]
        return [*heading, f"{number}{''.join(cells)}   {left}".rstrip()]

    def _fits(self, arms: Sequence[str]) -> bool:
        known = set(arms) <= self._columns.keys()
        return known or (not self._columns and sum(max(_WIDTH, len(arm) + 2) for arm in arms) + 20 <= self._width)

    def _heading(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        self._columns = {row["arm"]: max(_WIDTH, len(row["arm"]) + 2) for row in rows}
        indent = " " * (4 + len(str(self._rounds)))
        name = next((_QUALITIES[key] for row in rows for key in _QUALITIES if row.get(key) is not None), "acc")
        arms = "".join(f"{arm:>{width}}" for arm, width in self._columns.items())
        names = "".join(f"{'loss':>{width - 8}}{name[:7]:>8}" for width in self._columns.values())
        return [f"round{indent[5:]}{arms}", f"{indent}{names}"]


def _loss(row: Mapping[str, Any], missing: str = "no client") -> str:
    """Return the training loss, or `missing`: a round with Poisson sampling may have no client."""
    return missing if row["train_loss"] is None else f"{row['train_loss']:.3f}"


def _quality(row: Mapping[str, Any]) -> str:
    """Return the measure of the model on the test set, empty for a round that was not evaluated."""
    key = next((key for key in _QUALITIES if row.get(key) is not None), "")
    if not key:
        return ""
    return format_share(row[key]) if key in ("test_accuracy", "test_iou") else f"{row[key]:.4g}"


def _named_quality(row: Mapping[str, Any]) -> str:
    key = next((key for key in _QUALITIES if row.get(key) is not None), "")
    return f"{_QUALITIES[key]} {_quality(row)}" if key else ""
