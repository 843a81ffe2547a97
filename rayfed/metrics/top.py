"""The names of the re-identification metrics, for those who fill their columns and those who read them."""

from __future__ import annotations

TOP = {"top1": 1, "top3": 3, "top5": 5}
"""Metric -> k: whether the true person is among the k whom a recogniser holds likeliest."""


def chance(metric: str, people: int) -> float:
    """What guessing among so many people gets by a metric of `TOP`, 0..1."""
    return min(1.0, TOP[metric] / people)
