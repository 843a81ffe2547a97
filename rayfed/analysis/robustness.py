"""Robustness to malicious clients: the test accuracy of every arm under every poisoning attack (opponent)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from rayfed.evidence.arms import pairs_by_name
from rayfed.evidence.rows import Row, measured


@dataclass(frozen=True)
class Outcome:
    """Test accuracy and backdoor success rate (shares) of one arm against one opponent, at the last evaluated round."""

    accuracy: float
    backdoor: float | None
    """Success rate of the opponent's backdoor; None for an opponent without a backdoor."""


@dataclass
class Matrix:
    """Results of a run with malicious clients: a matrix of arms by poisoning attacks (opponents)."""

    arms: list[str] = field(default_factory=list)
    opponents: list[str] = field(default_factory=list)
    outcomes: dict[tuple[str, str], Outcome] = field(default_factory=dict)
    """Outcome by (arm, opponent); pairs without a result are missing."""


def matrix(rounds: Iterable[Row], scenario: Row) -> Matrix:
    """Return the results of the arms with an opponent, from the last evaluated rows of `rounds`."""
    pairs, found = pairs_by_name(scenario), Matrix()
    for row in rounds:
        arm, opponent = pairs.get(row["arm"], (row["arm"], ""))
        if not opponent or not measured(row.get("test_accuracy")):
            continue
        found.outcomes[arm, opponent] = Outcome(row["test_accuracy"], row.get("backdoor_accuracy"))
        found.arms += [arm] * (arm not in found.arms)
        found.opponents += [opponent] * (opponent not in found.opponents)
    return found
