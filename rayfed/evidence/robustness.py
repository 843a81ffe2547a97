"""Robustness to malicious clients: the test accuracy of every arm under every poisoning attack (opponent)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from rayfed.evidence.arms import pairs_by_name
from rayfed.evidence.rows import Row, is_measured


@dataclass(frozen=True)
class OpponentResult:
    """Test accuracy and backdoor success rate (shares) of one arm against one opponent, at the last evaluated round."""

    accuracy: float
    backdoor: float | None
    """Success rate of the opponent's backdoor; None for an opponent without a backdoor."""


@dataclass
class RobustnessMatrix:
    """Results of a run with malicious clients: a matrix of arms by poisoning attacks (opponents)."""

    arms: list[str] = field(default_factory=list)
    opponents: list[str] = field(default_factory=list)
    results: dict[tuple[str, str], OpponentResult] = field(default_factory=dict)
    """Result by (arm, opponent); pairs without a result are missing."""


def robustness_matrix(rounds: Iterable[Row], scenario: Row) -> RobustnessMatrix:
    """Return the results of the arms with an opponent, from the last evaluated rows of `rounds`."""
    pairs, matrix = pairs_by_name(scenario), RobustnessMatrix()
    for row in rounds:
        arm, opponent = pairs.get(row["arm"], (row["arm"], ""))
        if not opponent or not is_measured(row.get("test_accuracy")):
            continue
        matrix.results[arm, opponent] = OpponentResult(row["test_accuracy"], row.get("backdoor_accuracy"))
        if arm not in matrix.arms:
            matrix.arms.append(arm)
        if opponent not in matrix.opponents:
            matrix.opponents.append(opponent)
    return matrix
