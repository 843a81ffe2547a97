"""Kinds of sizes, comparisons and attackers of reproductions."""

from __future__ import annotations

from enum import StrEnum


class Size(StrEnum):
    """Size of a reproduction."""

    REDUCED = "reduced"
    """For two cores and about 15 minutes."""
    PAPER = "paper"
    """The paper's size."""
    GPU = "gpu"
    """For a GPU."""


class Comparison(StrEnum):
    """What of the paper's figures is compared."""

    VALUES = "values"
    """The figures, and the order of figures that differ by more than the tolerance."""
    ORDER = "order"
    """Only the order: the paper gives no numbers, and `paper` is a rank, 1 for the lowest."""
    DIFFERENCES = "differences"
    """The differences between figures, not the figures."""


class Direction(StrEnum):
    """Direction in which a figure is better than the paper's."""

    HIGHER = "higher"
    LOWER = "lower"


class Attacker(StrEnum):
    """Attacker of the compared figures."""

    PAPER = "paper"
    """The attacker of the paper."""
    ADAPTIVE = "adaptive"
    """The adaptive attacker, which knows the defence."""
