"""Top-k re-identification metrics, based on the face recogniser in `identity`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Literal

from rayfed.metrics.base import Metric

if TYPE_CHECKING:
    from torch import Tensor

TOP = {"top1": 1, "top3": 3, "top5": 5}
"""Metric -> k, the number of most likely people among which the true one must be."""


def chance(metric: str, people: int) -> float:
    """Return a top-k metric's expected value, 0..1, for random guessing among `people`."""
    return min(1.0, TOP[metric] / people)


def _within(k: int, recogniser: str | None, people: tuple[str, ...]) -> Callable[[Tensor, Tensor], Tensor]:
    from rayfed.metrics.identity import Identity

    return partial(Identity(recogniser, people).within, k)


def _top(metric: str, description: str, tables: tuple[Literal["settings", "run"], ...] = ("run",)) -> Metric:
    k = TOP[metric]
    return Metric(
        name=metric,
        description=f"1 if {description}, else 0",
        title=f"re-identified, top {k}",
        heading=f"Top-{k}",
        short=f"top-{k}",
        function=partial(_within, k),
        compares="class",
        needs=("recogniser", "people"),
        higher_is_closer=True,
        format="hit",
        tables=tables,
        success=None,
    )


TOP_1 = _top("top1", "the true class is the recogniser's most likely one", ("settings", "run"))
TOP_3 = _top("top3", "the true class is among the recogniser's three most likely ones")
TOP_5 = _top("top5", "the true class is among the recogniser's five most likely ones")
