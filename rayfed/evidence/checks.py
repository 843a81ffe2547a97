"""Checks of a gate: the state of an arm under a bound, and the reasons of the state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from rayfed.evidence.bounds import Bound
from rayfed.evidence.criteria import Criterion
from rayfed.evidence.membership import Roc
from rayfed.metrics.roc import Estimate
from rayfed.store.finding import Attacker, Doubt, Finding, NoResult, NotRun, Overtaken


class GateState(StrEnum):
    """Result of a check."""

    FAILED = "failed"
    PASSED = "passed"
    INCONCLUSIVE = "inconclusive"
    NOT_MEASURED = "not measured"

    def __repr__(self) -> str:
        return repr(self.value)


class ReasonKind(StrEnum):
    """Kind of a reason; the type of its fact is in brackets."""

    # of checks of all bounds
    DOUBT = "doubt"
    """The results do not decide (`Doubt`)."""
    NOT_EXCEEDED = "not_exceeded"
    """No attack exceeds the bound without a defence."""
    NO_RESULT = "no_result"
    """An attack has no result (`NoResult`)."""
    UNFINISHED = "unfinished"
    """The run did not finish."""

    # of bounds on reconstructions and labels
    NO_RECONSTRUCTION_ATTACK = "no_reconstruction_attack"
    """No attack that reconstructs samples was run."""
    NO_RECONSTRUCTION_YET = "no_reconstruction_yet"
    """The run did not finish, and no attack that reconstructs samples was run before its end."""
    DECISIVE_ATTACK_MISSING = "decisive_attack_missing"
    """An attack that exceeds the bound without a defence has no result."""
    NOT_RUN = "not_run"
    """Attacks were not run for lack of time (a tuple of `NotRun`)."""
    METRIC_NOT_COMPUTED = "metric_not_computed"
    """The bounded metric was not computed for some reconstructions (`Count`)."""
    BASELINE_REACHES_BOUND = "baseline_reaches_bound"
    """The value exceeds the bound, but not the baseline."""
    NOTHING_EXCEEDS_BOTH = "nothing_exceeds_both"
    """No attack exceeds both the bound and the baseline without a defence."""
    BASELINE_UNKNOWN = "baseline_unknown"
    """The value exceeds the bound, but only by a metric without a baseline."""
    NO_OTHER_ARM = "no_other_arm"
    """The arm has no defence, and no other arm shows that the attacks can exceed the bound."""
    OVERTAKEN = "overtaken"
    """An attack on another arm suggests that an undefended arm leaks (`Overtaken`)."""
    SHOWN_ON = "shown_on"
    """A passed check is evidence for some of the samples only (`Count`)."""
    PART_RECOVERED = "part_recovered"
    """Parts of samples were recovered, which the bound does not cover (`Recovered`)."""
    LABELS_RECOVERED = "labels_recovered"
    """Labels or targets were recovered, which the bound does not cover (`Recovered`)."""
    BUDGET = "budget"
    """Iterations and time of the attacks (`AttackBudget`)."""
    WRONG_REPLAY_SETTINGS = "wrong_replay_settings"
    """Recorded updates are far from the updates that the settings of the replay give (float, relative distance)."""

    # of bounds on labels
    LABEL_BASELINE = "label_baseline"
    """Labels that the best guess recovers (`LabelBaseline`)."""
    GUESS_REACHES_BOUND = "guess_reaches_bound"
    """The value exceeds the bound, and a guess does, too."""
    NOT_SIGNIFICANT = "not_significant"
    """The value exceeds the bound, but may be due to chance."""
    NOT_BEYOND_CHANCE = "not_beyond_chance"
    """No attack significantly exceeds the bound without a defence."""

    # of bounds on estimated shares
    NO_SCORES = "no_scores"
    """A membership attack finished without scores (str, the attack)."""
    NOT_RECOGNISED = "not_recognised"
    """A finished attack has no reconstruction that the recogniser read (str, the attack)."""
    NOT_RUN_ON = "not_run_on"
    """An attack was not run on updates on which it works without a defence (`NotRunOn`)."""
    NO_ATTACK_APPLIES = "no_attack_applies"
    """No attack applies."""
    NO_MEMBERSHIP_RESULT = "no_membership_result"
    """No membership attack has a result."""
    FEW_NON_MEMBERS = "few_non_members"
    """There are too few non-members for the false positive rate (`Roc`)."""
    INTERVAL_REACHES = "interval_reaches"
    """The interval of the share contains the bound (float, its upper end)."""
    NO_ADAPTIVE_MEMBERSHIP = "no_adaptive_membership"
    """No membership attack that exceeds the bound without a defence was run with the code of the defence."""
    SHARE_BUDGET = "share_budget"
    """Numbers of attacked samples or updates, and time of the attacks (`ShareBudget`)."""


class Count(NamedTuple):
    """Number of some samples or reconstructions among all."""

    number: int
    total: int


class LabelBaseline(NamedTuple):
    """Share of labels that the best guess recovers."""

    share: float
    samples: int


class Recovered(NamedTuple):
    """Finding by the run's own criterion, with parts of samples or labels that were recovered."""

    finding: Finding
    criterion: Criterion


class SearchBudget(NamedTuple):
    """Iterations per batch of a search."""

    attack: str
    least: int
    most: int


class AttackBudget(NamedTuple):
    """Budget of all attacks with a result."""

    searches: tuple[SearchBudget, ...]
    only_closed_forms: bool
    seconds: float


class ShareBudget(NamedTuple):
    """Number of attacked samples or updates by attack, and the time of all attacks if it was recorded."""

    attacks: tuple[tuple[str, int], ...]
    seconds: float | None


class NotRunOn(NamedTuple):
    """Attack that was not run on some of the samples or clients for which it works without a defence."""

    attack: str
    missing: Count


Fact = (
    tuple[NotRun, ...] | Doubt | NoResult | Overtaken | Count | LabelBaseline | Recovered | AttackBudget | ShareBudget
    | NotRunOn | Roc | str | float
)  # fmt: skip
"""Value that the text of a reason needs; its type follows from the kind of the reason."""


class GateReason(NamedTuple):
    """Reason of a state, limit of a passed check, or its budget."""

    kind: ReasonKind
    fact: Fact | None = None


class Decision(NamedTuple):
    """State with its reasons."""

    state: GateState
    reasons: Sequence[GateReason] = ()


@dataclass(frozen=True)
class Check:
    """Result of one bound on one arm at one batch size."""

    arm: str
    batch: int | None
    """Batch size of the attacked updates; None for estimated shares, and if nothing was attacked."""
    bound: Bound
    state: GateState
    value: float | None = None
    """The best value of any attack; for shares, the estimate. None if nothing was measured."""
    by: Attacker | tuple[str, ...] | None = None
    """The attack with this value; for shares, the titles of the attacks that have it together."""
    exceeding: int = 0
    """Number of samples whose reconstruction exceeds the bound."""
    samples: int = 0
    reasons: tuple[GateReason, ...] = ()
    """Reasons of an inconclusive or unmeasured check; for a passed check, its limits and the budget."""
    interval: Estimate | None = None
    """An estimated share with its 95 % interval; None for other bounds."""
