"""Re-identification: whether the true person is among the likeliest. The recogniser is asked in `identity`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from rayfed.metrics.base import Metric

if TYPE_CHECKING:
    from torch import Tensor

TOP = {"top1": 1, "top3": 3, "top5": 5}
"""Number k by metric: whether the true person is among the k whom a recogniser holds likeliest."""


def chance(metric: str, people: int) -> float:
    """Return what guessing among so many people gets by a metric of `TOP`, 0..1."""
    return min(1.0, TOP[metric] / people)


def _top(k: int, recogniser: str | None, people: tuple[str, ...]) -> Callable[[Tensor, Tensor], Tensor]:
    from rayfed.metrics.identity import Identity

    return partial(Identity(recogniser, people).within, k)


TOP_1 = Metric(
    name="top1",
    description="1 where a recogniser holds the reconstruction for the true class, else 0",
    title="re-identified, top 1",
    heading="Top-1",
    short="top-1",
    function=partial(_top, 1),
    compares="class",
    needs=("recogniser", "people"),
    higher_is_closer=True,
    format="hit",
    tables=("settings", "run"),
    success=None,
)
TOP_3 = Metric(
    name="top3",
    description="1 where the true class is among the recogniser's three likeliest, else 0",
    title="re-identified, top 3",
    heading="Top-3",
    short="top-3",
    function=partial(_top, 3),
    compares="class",
    needs=("recogniser", "people"),
    higher_is_closer=True,
    format="hit",
    tables=("run",),
    success=None,
)
TOP_5 = Metric(
    name="top5",
    description="1 where the true class is among the recogniser's five likeliest, else 0",
    title="re-identified, top 5",
    heading="Top-5",
    short="top-5",
    function=partial(_top, 5),
    compares="class",
    needs=("recogniser", "people"),
    higher_is_closer=True,
    format="hit",
    tables=("run",),
    success=None,
)
