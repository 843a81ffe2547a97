"""Next step that the verdicts of a run suggest: the first rule of `RULES` that applies decides."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rayfed.core.reasons import NEAR, Reason
from rayfed.evidence.arms import is_undefended
from rayfed.evidence.verdicts import RunEvidence, Verdict
from rayfed.store.finding import State
from rayfed.store.schemas import UNPLAYED

ADVISED = (
    Reason.NO_ADAPTIVE_ATTACK,
    Reason.NO_ADAPTIVE_ATTACK_WORKS,
    Reason.DEFENCES_UNKNOWN,
    Reason.UNDECLARED,
    Reason.DECLARATION_WRONG,
    Reason.BUFFERS_NOT_SOLVED,
    Reason.DECLARATION_NOT_TESTED,
)
"""Reasons of inconclusive arms that more time does not remove, in the order in which they count."""


class Step(StrEnum):
    """Kind of a next step."""

    CHECK_MEMBERSHIP = "check_membership"
    """Check the results of membership attacks against a bound."""
    CHANGE_DEFENCE = "change_defence"
    """Try another defence, because every arm leaks."""
    RUN_LEFT_OUT = "run_left_out"
    """Give the time to run the attacks that were left out."""
    REMOVE_REASON = "remove_reason"
    """Remove the reason why arms are inconclusive."""
    USE_ACCOUNT = "use_account"
    """Use a defence with a privacy account, because attacks cannot be checked against the update."""
    COMPARE_RECONSTRUCTIONS = "compare_reconstructions"
    """Compare reconstructions that are near a sample with the originals."""
    SEARCH_LONGER = "search_longer"
    """Give the searches more iterations, because arms are inconclusive or nothing leaks without a defence."""
    READ_REASONS = "read_reasons"
    """Read why attacks returned no result."""
    ATTACK_LONGER = "attack_longer"
    """Attack the arms for longer that were not reconstructed."""


@dataclass(frozen=True)
class NextStep:
    """Next step, with the arms that it concerns."""

    step: Step
    arms: tuple[str, ...] = ()
    reason: Reason | None = None
    """Reason to remove."""
    nothing_leaks: bool = False
    """Whether nothing leaks without a defence, so that failed attacks are no evidence."""


@dataclass(frozen=True)
class Situation:
    """Verdicts of a run."""

    evidence: RunEvidence

    @property
    def states(self) -> set[State]:
        """Return the states of all arms."""
        return {verdict.state for verdict in self.evidence.verdicts}

    @property
    def inconclusive(self) -> list[Verdict]:
        """Return the verdicts of inconclusive arms."""
        return [verdict for verdict in self.evidence.verdicts if verdict.state == State.INCONCLUSIVE]

    def arms_with(self, reasons: Collection[Reason]) -> tuple[str, ...]:
        """Return the arms without a decision that have one of some reasons."""
        undecided = State.INCONCLUSIVE, State.NOT_MEASURED
        verdicts = self.evidence.verdicts
        return tuple(one.arm for one in verdicts if one.state in undecided and one.reasons & set(reasons))

    def is_undefended(self, arm: str) -> bool:
        """Return whether an arm has no defence."""
        return is_undefended(self.evidence.scenario, arm)


def decide_next_step(evidence: RunEvidence) -> NextStep | None:
    """Return the next step by the first rule of `RULES` that applies; None if every arm has a result."""
    situation = Situation(evidence)
    only_membership = _check_membership(situation)
    if only_membership or not evidence.attacks:
        return only_membership
    steps = (rule(situation) for rule in RULES)
    return next((step for step in steps if step), None)


def is_search(attack: Any) -> bool:
    """Return whether an attack of a scenario is a search, which more iterations may improve."""
    return isinstance(attack, dict) and bool(attack.get("iterations"))


def _check_membership(situation: Situation) -> NextStep | None:
    """Only inferences were measured, membership among them."""
    verdicts = situation.evidence.verdicts
    measured = any(result.roc for verdict in verdicts for result in verdict.inferences)
    only_inferences = bool(verdicts) and all(verdict.only_inferences for verdict in verdicts)
    return NextStep(Step.CHECK_MEMBERSHIP) if only_inferences and measured else None


def _every_arm_leaks(situation: Situation) -> NextStep | None:
    """Every arm leaks, which more time does not change."""
    return NextStep(Step.CHANGE_DEFENCE) if situation.states == {State.LEAKS} else None


def _time_was_short(situation: Situation) -> NextStep | None:
    """Attacks were left out for lack of time."""
    not_run = any(row["status"] == UNPLAYED for row in situation.evidence.attacks)
    return NextStep(Step.RUN_LEFT_OUT) if not_run else None


def _reason_to_remove(situation: Situation) -> NextStep | None:
    """An arm is inconclusive for a reason that the user can remove."""
    for reason in ADVISED:
        if arms := situation.arms_with({reason}):
            return NextStep(Step.REMOVE_REASON, arms, reason)
    return None


def _attacks_not_comparable(situation: Situation) -> NextStep | None:
    """Adaptive attacks cannot be compared with the update; a search that needs time without a defence comes first."""
    arms = situation.arms_with({Reason.ADAPTIVE_NOT_COMPARED})
    not_converged = situation.arms_with({Reason.NOT_CONVERGED})
    if arms and not any(map(situation.is_undefended, not_converged)):
        return NextStep(Step.USE_ACCOUNT, arms)
    return None


def _reconstructions_are_near(situation: Situation) -> NextStep | None:
    """A reconstruction is near a sample; without leaks only tokens in another order count."""
    reasons = NEAR if State.LEAKS in situation.states else {Reason.TOKENS_IN_ANOTHER_ORDER}
    arms = situation.arms_with(reasons)
    return NextStep(Step.COMPARE_RECONSTRUCTIONS, arms) if arms else None


def _attacks_may_be_weak(situation: Situation) -> NextStep | None:
    """An arm is inconclusive, or nothing leaks without a defence."""
    leaks = State.LEAKS in situation.states
    held_bare = any(
        situation.is_undefended(verdict.arm) and verdict.state == State.NOT_RECONSTRUCTED
        for verdict in situation.evidence.verdicts
    )
    if situation.inconclusive or (held_bare and not leaks):
        return NextStep(Step.SEARCH_LONGER, nothing_leaks=not leaks)
    return None


def _arm_not_measured(situation: Situation) -> NextStep | None:
    """An arm has no result."""
    return NextStep(Step.READ_REASONS) if State.NOT_MEASURED in situation.states else None


def _arm_not_reconstructed(situation: Situation) -> NextStep | None:
    """An arm was not reconstructed within the budget."""
    verdicts = situation.evidence.verdicts
    arms = tuple(verdict.arm for verdict in verdicts if verdict.state == State.NOT_RECONSTRUCTED)
    return NextStep(Step.ATTACK_LONGER, arms) if arms else None


RULES: Sequence[Callable[[Situation], NextStep | None]] = (
    _every_arm_leaks,
    _time_was_short,
    _reason_to_remove,
    _attacks_not_comparable,
    _reconstructions_are_near,
    _attacks_may_be_weak,
    _arm_not_measured,
    _arm_not_reconstructed,
)
"""Rules of the next step after reconstruction attacks, in order: the first that applies decides."""
