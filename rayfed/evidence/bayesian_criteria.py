"""Bounds on arms that are private, accurate and cheap, from a paper on Bayesian privacy.

Source: Gu et al. 2021, "Federated Deep Learning with Bayesian Privacy", section 5.2 and table 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rayfed.evidence.attack_results import Leakage
from rayfed.evidence.training import ArmSummary

MAX_ACCURACY_LOSS = 0.015
"""Maximum loss of accuracy compared with the best arm."""
MIN_BP_MSE = 0.05
"""Minimum mean squared error of reconstructions."""
MAX_BP_KI = 0.3
"""Maximum BP_KI."""
MAX_SECONDS = 100.0
"""Maximum seconds of one round; the paper uses those of one epoch."""


@dataclass(frozen=True)
class CriteriaCheck:
    """Result of four bounds on one arm under one attack; None for a bound on a quantity that was not measured."""

    arm: str
    attack: str
    accuracy: bool | None
    bp_mse: bool | None
    bp_ki: bool | None
    seconds: bool | None

    @property
    def satisfies(self) -> bool:
        """Return whether the arm satisfies all four bounds."""
        return all((self.accuracy, self.bp_mse, self.bp_ki, self.seconds))


def check_criteria(arms: Sequence[ArmSummary], leaks: Sequence[Leakage]) -> list[CriteriaCheck]:
    """Return, per attack and arm, whether the bounds on accuracy, `bp_mse`, `bp_ki` and seconds hold."""
    best = max((arm.accuracy for arm in arms if arm.accuracy is not None), default=None)
    by_name = {arm.name: arm for arm in arms}
    return [_check(by_name[leak.arm], leak, best) for leak in leaks if leak.scores["bp_ki"]]


def _check(arm: ArmSummary, leak: Leakage, best: float | None) -> CriteriaCheck:
    mse, bp_ki = leak.scores["mse"], leak.scores["bp_ki"]
    return CriteriaCheck(
        arm=arm.name,
        attack=leak.attack,
        accuracy=None if arm.accuracy is None or best is None else arm.accuracy >= best - MAX_ACCURACY_LOSS,
        bp_mse=None if mse is None else mse.mean >= MIN_BP_MSE,
        bp_ki=None if bp_ki is None else bp_ki.mean <= MAX_BP_KI,
        seconds=None if arm.actor_seconds is None else arm.actor_seconds.mean <= MAX_SECONDS,
    )
