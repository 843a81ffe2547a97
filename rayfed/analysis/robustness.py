"""Robustness to malicious clients: the test accuracy of every arm against every opponent."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from rayfed.analysis.summary import Row, measured
from rayfed.store.schemas import VERSUS


@dataclass(frozen=True)
class Outcome:
    """Test accuracy and backdoor rate of one arm against one opponent, at the last evaluated round, in shares."""

    accuracy: float
    backdoor: float | None
    """How often the opponent's backdoor works; None for one without."""


@dataclass
class Matrix:
    """Outcomes of a run with opponents, arms by opponents."""

    arms: list[str] = field(default_factory=list)
    opponents: list[str] = field(default_factory=list)
    outcomes: dict[tuple[str, str], Outcome] = field(default_factory=dict)
    """By arm and opponent, where there is one."""


def matrix(rounds: Iterable[Row]) -> Matrix:
    """Return the outcomes of the arms with an opponent in their name, from the last evaluated rows of `rounds`."""
    found = Matrix()
    for row in rounds:
        arm, versus, opponent = row["arm"].partition(VERSUS)
        if not versus or not measured(row.get("test_accuracy")):
            continue
        found.outcomes[arm, opponent] = Outcome(row["test_accuracy"], row.get("backdoor_accuracy"))
        found.arms += [arm] * (arm not in found.arms)
        found.opponents += [opponent] * (opponent not in found.opponents)
    return found
