"""Top-k re-identification metrics, from the recogniser in `identity`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Literal

from rayfed.metrics.base import Metric

if TYPE_CHECKING:
    from torch import Tensor

TOP = {"top1": 1, "top3": 3, "top5": 5}
"""Number k by metric: whether the true person is among the k whom a recogniser holds likeliest."""


def chance(metric: str, people: int) -> float:
    """Return the value of guessing among this many people by a metric of `TOP`, 0..1."""
    return min(1.0, TOP[metric] / people)


def _within(k: int, recogniser: str | None, people: tuple[str, ...]) -> Callable[[Tensor, Tensor], Tensor]:
    from rayfed.metrics.identity import Identity

    return partial(Identity(recogniser, people).within, k)


def _top(metric: str, description: str, tables: tuple[Literal["settings", "run"], ...] = ("run",)) -> Metric:
    k = TOP[metric]
    return Metric(
        name=metric,
        description=f"1 where {description}, else 0",
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


TOP_1 = _top("top1", "a recogniser holds the reconstruction for the true class", ("settings", "run"))
TOP_3 = _top("top3", "the true class is among the recogniser's three likeliest")
TOP_5 = _top("top5", "the true class is among the recogniser's five likeliest")
