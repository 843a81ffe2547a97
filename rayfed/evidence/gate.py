"""Gate on a run: checks of the attacks' results against the user's bounds, by arm and batch size.

A check passes if attacks exceed the bound without a defence, and do not exceed it on the same samples with the defence.
If no attack exceeds the bound without a defence, the check is inconclusive, because the attacks may be too weak. An arm
without a defence never passes. The state of a check follows from an ordered list of rules (`RULES`), the first that
applies. Bounds on estimated shares have rules in `rayfed.evidence.gate_shares`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from rayfed.evidence.arms import is_recorded, is_undefended
from rayfed.evidence.bounds import Bound, BoundCriterion, LabelBoundCriterion, lacks_metric
from rayfed.evidence.checks import (
    AttackBudget,
    Check,
    Count,
    Decision,
    GateReason,
    GateState,
    LabelBaseline,
    ReasonKind,
    Recovered,
    SearchBudget,
)
from rayfed.evidence.gate_shares import check_share
from rayfed.evidence.rows import Row, get_attack_label, group_rows, labels_given, total_seconds
from rayfed.evidence.verdicts import RunEvidence
from rayfed.metrics.base import Metric
from rayfed.metrics.known import NOUNS, leading
from rayfed.store.finding import Finding, State
from rayfed.store.schemas import ANSWERED

WRONG_REPLAY_DISTANCE = 0.5
"""Relative distance between a recorded update and its control at which the recorded one counts as defended. Smaller
distances can come from the order of the samples."""


def check_bounds(evidence: RunEvidence, bounds: Sequence[Bound], arms: Sequence[str]) -> list[Check]:
    """Return the checks of every bound on every arm, in the order of the arms."""
    checks: list[Check] = []
    for bound in bounds:
        if bound.metric is None:
            checks += [check_share(evidence, bound, arm) for arm in arms]
        else:
            checks += _check_reconstructions(evidence, bound, arms)
    return sorted(checks, key=lambda check: arms.index(check.arm))


@dataclass(frozen=True)
class Case:
    """Finding under the criterion of a bound, with the results that the rules need."""

    evidence: RunEvidence
    bound: Bound
    finding: Finding
    rows: Sequence[Row]
    """Rows of the finding's arm and batch size."""

    @property
    def metric(self) -> Metric:
        """Return the bounded metric."""
        assert self.bound.metric is not None
        return self.bound.metric

    @property
    def bare(self) -> bool:
        """Return whether the arm has no defence."""
        return is_undefended(self.evidence.scenario, self.finding.arm)

    @property
    def value(self) -> float | None:
        """Return the best value of any attack; the criterion changes the sign of distances."""
        best = self.finding.best
        return best if best is None or self.metric.higher_is_closer else -best

    @property
    def exceeds(self) -> bool:
        """Return whether the best value exceeds the bound, whether or not it is a leak."""
        return self.value is not None and self.metric.passes(self.value, self.bound.limit)

    @cached_property
    def own(self) -> Finding:
        """Finding on the same arm and batch size by the run's own criterion."""
        cell = self.finding.arm, self.finding.batch
        return next(finding for finding in self.evidence.findings if (finding.arm, finding.batch) == cell)

    @property
    def part_recovered(self) -> bool:
        """Return whether parts of samples were recovered; a bound on labels is not about samples."""
        return self.own.part is not None and not self.bound.on_labels

    @property
    def labels_recovered(self) -> bool:
        """Return whether labels or targets were recovered; for a bound on labels, only if beyond chance."""
        labels = self.own.labels
        if self.bound.on_labels and labels and labels.by_chance:
            return False
        return bool(labels and labels.beyond) or self.own.targets_beyond


# Rules of a check. Each returns the state with its reasons if it applies.


def _bound_exceeded(case: Case) -> Decision | None:
    """A sample exceeds the bound."""
    return Decision(GateState.FAILED) if case.finding.state == State.LEAKS else None


def _metric_not_computed(case: Case) -> Decision | None:
    """The bounded metric could not be computed for some reconstructions, so these may exceed the bound."""
    missing = sum(lacks_metric(row, case.metric) for row in case.rows)
    if not missing:
        return None
    reason = GateReason(ReasonKind.METRIC_NOT_COMPUTED, Count(missing, len(case.rows)))
    return Decision(GateState.NOT_MEASURED, [reason, *_missing_results(case.finding)])


def _no_result(case: Case) -> Decision | None:
    """No attack has a result, or not the attack that decides."""
    if case.finding.state not in (State.NOT_MEASURED, State.NOTHING_TO_ATTACK):
        return None
    reasons = _missing_results(case.finding) or [GateReason(ReasonKind.DECISIVE_ATTACK_MISSING)]
    return Decision(GateState.NOT_MEASURED, reasons)


def _labels_by_chance(case: Case) -> Decision | None:
    """The share of labels exceeds the bound, but not significantly."""
    if not (case.exceeds and case.bound.on_labels):
        return None
    labels = case.finding.labels
    guessed = labels is not None and labels.best_guess >= case.bound.limit
    kind = ReasonKind.GUESS_REACHES_BOUND if guessed else ReasonKind.NOT_SIGNIFICANT
    return Decision(GateState.INCONCLUSIVE, [GateReason(kind)])


def _results_in_doubt(case: Case) -> Decision | None:
    """The results do not decide, or no attack is known to work."""
    if case.finding.state != State.INCONCLUSIVE:
        return None
    if case.finding.doubt:
        reasons = [GateReason(ReasonKind.DOUBT, case.finding.doubt)]
    elif case.exceeds:
        reasons = [GateReason(ReasonKind.BASELINE_REACHES_BOUND), GateReason(ReasonKind.NOTHING_EXCEEDS_BOTH)]
    else:
        reasons = [GateReason(ReasonKind.NOT_BEYOND_CHANCE if case.bound.on_labels else ReasonKind.NOT_EXCEEDED)]
    return Decision(GateState.INCONCLUSIVE, reasons)


def _baseline_unknown(case: Case) -> Decision | None:
    """The value exceeds the bound, and the baseline is known for the leading metrics only."""
    with_baseline = {leading(modality).name for modality in NOUNS}
    if not case.exceeds or case.bound.name in with_baseline:
        return None
    return Decision(GateState.INCONCLUSIVE, [GateReason(ReasonKind.BASELINE_UNKNOWN)])


def _no_other_arm(case: Case) -> Decision | None:
    """The arm has no defence, so no other arm shows that the attacks can exceed the bound."""
    return Decision(GateState.INCONCLUSIVE, [GateReason(ReasonKind.NO_OTHER_ARM)]) if case.bare else None


def _attack_failed(case: Case) -> Decision | None:
    """An attack failed with or without the defence, so its value is unknown."""
    return Decision(GateState.NOT_MEASURED, _missing_results(case.finding)) if case.finding.failed else None


def _pixels_recovered(case: Case) -> Decision | None:
    """Pixels of images were recovered, which a bound on whole images does not cover."""
    if case.evidence.modality == "pixels" and case.part_recovered:
        return Decision(GateState.INCONCLUSIVE, _limits(case))
    return None


def _otherwise(case: Case) -> Decision:
    """Attacks exceed the bound without a defence, and not with it."""
    return Decision(GateState.PASSED, _limits(case))


RULES: Sequence[Callable[[Case], Decision | None]] = (
    _bound_exceeded,
    _metric_not_computed,
    _no_result,
    _labels_by_chance,
    _results_in_doubt,
    _baseline_unknown,
    _no_other_arm,
    _attack_failed,
    _pixels_recovered,
    _otherwise,
)
"""Rules of a bound on reconstructions or labels, in order: the first that applies decides."""


def _check_reconstructions(evidence: RunEvidence, bound: Bound, arms: Sequence[str]) -> list[Check]:
    assert bound.metric is not None
    rows = evidence.attacks
    criterion = BoundCriterion(evidence.modality, bound.limit, bound.metric)
    if bound.on_labels:
        rows = _rows_without_given_labels(rows)
        criterion = LabelBoundCriterion.from_rows(rows, evidence.modality, bound)
    cells = group_rows(rows, "arm", "batch_size")
    findings = evidence.compute_findings(rows, criterion)
    checks = []
    for arm in arms:
        own = [finding for finding in findings if finding.arm == arm]
        checks += [_check(Case(evidence, bound, finding, cells[arm, finding.batch])) for finding in own]
        if not own:
            kind = ReasonKind.NO_RECONSTRUCTION_ATTACK if evidence.finished else ReasonKind.NO_RECONSTRUCTION_YET
            checks.append(Check(arm, None, bound, GateState.NOT_MEASURED, reasons=(GateReason(kind),)))
    return checks


def _rows_without_given_labels(attacks: Sequence[Row]) -> list[Row]:
    """Return the rows of attacks that recover labels; all rows of an arm and batch size without such attacks."""
    rows: list[Row] = []
    for cell in group_rows(attacks, "arm", "batch_size").values():
        rows += [row for row in cell if not labels_given(row)] or cell
    return rows


def _check(case: Case) -> Check:
    """Return the check of a finding: the state by the first rule, and facts that are reported with every state."""
    finding = case.finding
    decisions = (rule(case) for rule in RULES)
    state, decided = next(decision for decision in decisions if decision)
    reasons = list(decided)
    if case.bound.on_labels and finding.labels:
        baseline = LabelBaseline(finding.labels.best_guess, finding.samples)
        reasons.insert(0, GateReason(ReasonKind.LABEL_BASELINE, baseline))
    if finding.overtaken:
        reasons.append(GateReason(ReasonKind.OVERTAKEN, finding.overtaken))
    distance = wrong_replay_distance(case.evidence, finding.arm)
    if distance is not None and state == GateState.INCONCLUSIVE:
        reasons.append(GateReason(ReasonKind.WRONG_REPLAY_SETTINGS, distance))
    return Check(
        arm=finding.arm,
        batch=finding.batch,
        bound=case.bound,
        state=state,
        value=case.value,
        by=finding.by,
        exceeding=finding.leaked,
        samples=finding.samples,
        reasons=tuple(reasons),
    )


def _missing_results(finding: Finding) -> list[GateReason]:
    """Return the attacks of a finding that have no result."""
    reasons = [GateReason(ReasonKind.NOT_RUN, finding.not_run)] if finding.not_run else []
    if finding.unfinished:
        reasons.append(GateReason(ReasonKind.UNFINISHED))
    # an update that its channel hides has a message, but no attack
    missing = [one for one in finding.no_results if one.attack or one.message]
    return [*reasons, *(GateReason(ReasonKind.NO_RESULT, one) for one in missing)]


def _limits(case: Case) -> list[GateReason]:
    """Return the limits of a passed check, other leakage that its bound does not cover, and the attacks' budget."""
    finding = case.finding
    recovered = Recovered(case.own, case.evidence.criterion)
    reasons = [GateReason(ReasonKind.BASELINE_REACHES_BOUND)] if case.exceeds else []
    reasons += _missing_results(finding)
    if finding.shown is not None and finding.shown != finding.samples:
        reasons.append(GateReason(ReasonKind.SHOWN_ON, Count(finding.shown, finding.samples)))
    if case.part_recovered:
        reasons.append(GateReason(ReasonKind.PART_RECOVERED, recovered))
    if case.labels_recovered:
        reasons.append(GateReason(ReasonKind.LABELS_RECOVERED, recovered))
    if budget := _budget(case):
        reasons.append(GateReason(ReasonKind.BUDGET, budget))
    return reasons


def _budget(case: Case) -> AttackBudget | None:
    """Return the iterations of each search with a result, and the time of all attacks; None if the time is unknown."""
    rows = [row for row in case.rows if row["status"] in ANSWERED]
    seconds = total_seconds(rows)
    if seconds is None:
        return None
    iterations: dict[str, list[int]] = {}
    for row in rows:
        if row.get("iterations"):
            iterations.setdefault(get_attack_label(row), []).append(row["iterations"])
    searches = tuple(SearchBudget(attack, min(counts), max(counts)) for attack, counts in iterations.items())
    only_closed_forms = all(row["attack"] in case.evidence.closed_forms for row in rows)
    return AttackBudget(searches, only_closed_forms, seconds)


def wrong_replay_distance(evidence: RunEvidence, arm: str) -> float | None:
    """Return the relative distance of recorded updates from the updates that the settings of a replay give.

    Return None for other arms, and for small distances, which are no sign of wrong settings.
    """
    if not is_recorded(evidence.scenario, arm):
        return None
    distances = [row["distortion"] or 0.0 for row in evidence.attacks if row["arm"] == arm]
    distance = max(distances, default=0.0)
    return None if distance < WRONG_REPLAY_DISTANCE else distance
