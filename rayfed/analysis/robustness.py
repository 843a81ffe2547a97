"""Robustness: the test accuracy of every arm against every opponent, from the rounds' table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from rayfed.analysis.summary import Row, measured
from rayfed.store.schemas import VERSUS


@dataclass(frozen=True)
class Outcome:
    """Outcome of one arm against one opponent by the last evaluated round, in shares."""

    accuracy: float
    backdoor: float | None
    """How often the opponent's backdoor works; None for one without."""


@dataclass
class Matrix:
    """Outcomes of a run whose arms have opponents, as a matrix."""

    arms: list[str] = field(default_factory=list)
    opponents: list[str] = field(default_factory=list)
    outcomes: dict[tuple[str, str], Outcome] = field(default_factory=dict)
    """By arm and opponent, where there is one."""


def matrix(rounds: Iterable[Row]) -> Matrix:
    """Return the last evaluated rows of `rounds`, in their order, whose arm has an opponent in its name."""
    found = Matrix()
    for row in rounds:
        arm, versus, opponent = row["arm"].partition(VERSUS)
        if not versus or not measured(row.get("test_accuracy")):
            continue
        found.outcomes[arm, opponent] = Outcome(row["test_accuracy"], row.get("backdoor_accuracy"))
        found.arms += [arm] * (arm not in found.arms)
        found.opponents += [opponent] * (opponent not in found.opponents)
    return found
