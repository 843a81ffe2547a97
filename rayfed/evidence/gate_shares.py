"""Checks of bounds on estimated shares: members or people that attacks identify.

The state of a check follows from an ordered list of rules (`RULES`), the first that applies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from rayfed.evidence.bounds import Bound
from rayfed.evidence.checks import (
    Check,
    Count,
    Decision,
    GateReason,
    GateState,
    NotRunOn,
    ReasonKind,
    ShareBudget,
)
from rayfed.evidence.rows import Row, get_sample_key, total_seconds
from rayfed.evidence.shares import ShareEstimate, Shares, make_shares
from rayfed.evidence.verdicts import RunEvidence
from rayfed.metrics.roc import Estimate
from rayfed.store.finding import NoResult


@dataclass(frozen=True)
class ShareCase:
    """Shares that attacks on an arm reach, and the results that the rules need."""

    shares: Shares
    arm: str

    @property
    def limit(self) -> float:
        """Return the bound's limit."""
        return self.shares.bound.limit

    @cached_property
    def results(self) -> list[ShareEstimate]:
        """Shares that the bound limits."""
        return self.shares.bounded_estimates(self.arm)

    @cached_property
    def estimates(self) -> list[tuple[tuple[str, ...], Estimate]]:
        """Estimates with their attacks."""
        return [(one.by, one.estimate) for one in self.results if one.estimate]

    @cached_property
    def best(self) -> tuple[tuple[str, ...], Estimate] | None:
        """Largest estimate with its attacks; None without an estimate."""
        return max(self.estimates, key=lambda pair: pair[1].value, default=None)

    @cached_property
    def exceeding_undefended(self) -> set[str]:
        """Working attacks that exceed the bound without a defence."""
        working = self.shares.working_attacks(self.arm)
        attacks: set[str] = set()
        for bare in self.shares.undefended_arms(self.arm):
            for by, estimate in self.shares.bounded_estimates(bare, working):
                if estimate and estimate.value >= self.limit:
                    attacks.update(by)
        return attacks


# Rules of a check. Each returns the state with its reasons if it applies.


def _share_exceeds(case: ShareCase) -> Decision | None:
    """The largest share exceeds the bound."""
    exceeds = case.best and case.best[1].value >= case.limit
    return Decision(GateState.FAILED) if exceeds else None


def _run_unfinished(case: ShareCase) -> Decision | None:
    """The run did not finish, so attacks may be missing."""
    if case.shares.evidence.finished:
        return None
    return Decision(GateState.NOT_MEASURED, [GateReason(ReasonKind.UNFINISHED)])


def _results_missing(case: ShareCase) -> Decision | None:
    """An attack has no result, or was not run on an update on which it works without a defence."""
    working = case.shares.working_attacks(case.arm)
    rows_by_attack = case.shares.rows_by_attack(case.arm)
    reasons: dict[GateReason, None] = {}
    for attack in rows_by_attack | dict.fromkeys(sorted(working)):
        rows = rows_by_attack.get(attack, [])
        if attack not in working and case.shares.do_not_apply(rows):
            continue
        missing = [row for row in rows if not case.shares.has_result(row)]
        reasons |= dict.fromkeys(_missing_result(case.shares, attack, row) for row in missing)
        if not_run := _not_run_on(case, attack, rows):
            reasons[not_run] = None
    return Decision(GateState.NOT_MEASURED, list(reasons)) if reasons else None


def _no_estimate(case: ShareCase) -> Decision | None:
    """No attack has an estimate, or an attack has too few candidates for one."""
    if case.estimates and len(case.estimates) == len(case.results):
        return None
    return Decision(GateState.NOT_MEASURED, [case.shares.estimate_reason(case.arm)])


def _interval_reaches(case: ShareCase) -> Decision | None:
    """The 95 % interval of a share contains the bound."""
    high = max(estimate.high for _, estimate in case.estimates)
    if high < case.limit:
        return None
    return Decision(GateState.INCONCLUSIVE, [GateReason(ReasonKind.INTERVAL_REACHES, high)])


def _not_exceeded(case: ShareCase) -> Decision | None:
    """No attack exceeds the bound without a defence, so the attacks may be too weak."""
    if case.exceeding_undefended:
        return None
    return Decision(GateState.INCONCLUSIVE, [GateReason(ReasonKind.NOT_EXCEEDED)])


def _no_valid_adaptive_attack(case: ShareCase) -> Decision | None:
    """No attack that exceeds the bound without a defence is adaptive."""
    if not case.shares.has_defences(case.arm):
        return None
    reason = case.shares.doubt_reason(case.arm, case.exceeding_undefended)
    return Decision(GateState.INCONCLUSIVE, [reason]) if reason else None


def _otherwise(case: ShareCase) -> Decision:
    """Attacks exceed the bound without a defence, and not with it."""
    return Decision(GateState.PASSED, [GateReason(ReasonKind.SHARE_BUDGET, _budget(case))])


RULES: Sequence[Callable[[ShareCase], Decision | None]] = (
    _share_exceeds,
    _run_unfinished,
    _results_missing,
    _no_estimate,
    _interval_reaches,
    _not_exceeded,
    _no_valid_adaptive_attack,
    _otherwise,
)
"""Rules of a bound on an estimated share, in order: the first that applies decides."""


def check_share(evidence: RunEvidence, bound: Bound, arm: str) -> Check:
    """Return the check of an estimated share: for people, of all attacks together; else, of the best attack."""
    case = ShareCase(make_shares(evidence, bound), arm)
    decisions = (rule(case) for rule in RULES)
    state, reasons = next(decision for decision in decisions if decision)
    by, best = case.best or (None, None)
    value = best.value if best else None
    return Check(arm, None, bound, state, value, by, reasons=tuple(reasons), interval=best)


def _missing_result(shares: Shares, attack: str, row: Row) -> GateReason:
    """Return why an attack has no result in a row."""
    if row["status"] == "ok":
        return GateReason(shares.missing_reason(row), attack)
    return GateReason(ReasonKind.NO_RESULT, NoResult(attack, row["status"], row["message"] or "", None))


def _not_run_on(case: ShareCase, attack: str, rows: Sequence[Row]) -> GateReason | None:
    """Return on how many updates an attack was not run, although it has a result there without a defence."""
    needed = set()
    for bare in case.shares.undefended_arms(case.arm):
        bare_rows = case.shares.rows_by_attack(bare).get(attack, [])
        needed |= {get_sample_key(row) for row in bare_rows if case.shares.decides(row)}
    missing = needed - set(map(get_sample_key, rows))
    if not missing:
        return None
    return GateReason(ReasonKind.NOT_RUN_ON, NotRunOn(attack, Count(len(missing), len(needed))))


def _budget(case: ShareCase) -> ShareBudget:
    """Return the numbers of results by attack, and the total time if it was recorded."""
    rows_by_attack = case.shares.rows_by_attack(case.arm)
    counts = tuple((attack, len(set(map(get_sample_key, rows)))) for attack, rows in rows_by_attack.items())
    return ShareBudget(counts, total_seconds(chain.from_iterable(rows_by_attack.values())))
