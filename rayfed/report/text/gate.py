"""Text on the checks of a gate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rayfed.evidence.bounds import Bound, BoundedShare
from rayfed.evidence.checks import (
    AttackBudget,
    Check,
    Count,
    GateReason,
    GateState,
    LabelBaseline,
    NotRunOn,
    ReasonKind,
    Recovered,
    SearchBudget,
    ShareBudget,
)
from rayfed.evidence.membership import RATES, Roc
from rayfed.report.text.findings import labels_beyond_text, part_text
from rayfed.report.text.formats import format_duration
from rayfed.report.text.membership import rate_text
from rayfed.report.text.reasons import (
    NOTHING_REBUILT,
    RUN_NOT_FINISHED,
    attack_text,
    doubt_text,
    no_result_text,
    not_run_text,
    overtaken_text,
)
from rayfed.report.text.settings import UNFINISHED
from rayfed.store.finding import Attacker, Doubt, NoResult, NotRun, Overtaken
from rayfed.store.schemas import WANT_OF_TIME

SHARES = {
    BoundedShare.AUC: "AUC of the membership attack",
    BoundedShare.TPR: f"members identified at {100 * RATES[-1]:g} % FPR",
    BoundedShare.IDENTITY: "people identified, top 1",
}
"""Titles of estimated shares."""


def bound_text(bound: Bound) -> str:
    """Return the requirement of a bound, such as `PSNR below 15.0 dB`."""
    metric = bound.metric
    title = metric.title if metric else SHARES[BoundedShare(bound.name)]
    side = "above" if metric and not metric.higher_is_closer else "below"
    return f"{title} {side} {bound_value_text(bound, bound.limit)}"


def bound_value_text(bound: Bound, value: float) -> str:
    """Format a value of the bounded measure with the measure's unit."""
    if bound.name == BoundedShare.AUC:
        return f"{value:.3f}"
    metric = bound.metric
    if metric is None or metric.format == "share":
        return f"{100 * value:.1f} %"
    return f"{value:.1f} {metric.unit}" if metric.unit else f"{value:.3g}"


_REASONS = {
    ReasonKind.NOT_EXCEEDED: "no attack exceeds the bound without a defence, so the attacks may be too weak",
    ReasonKind.UNFINISHED: RUN_NOT_FINISHED,
    ReasonKind.NO_RECONSTRUCTION_ATTACK: NOTHING_REBUILT,
    ReasonKind.NO_RECONSTRUCTION_YET: UNFINISHED,
    ReasonKind.DECISIVE_ATTACK_MISSING: "an attack that exceeds the bound without a defence has no result here",
    ReasonKind.BASELINE_REACHES_BOUND: (
        "the value exceeds the bound, but not the baseline, the best guess without the update"
    ),
    ReasonKind.NOTHING_EXCEEDS_BOTH: "no attack exceeds both without a defence",
    ReasonKind.BASELINE_UNKNOWN: (
        "the value exceeds the bound, but not the baseline by the leading metric: check the images"
    ),
    ReasonKind.NO_OTHER_ARM: "no other arm shows that these attacks can exceed the bound",
    ReasonKind.GUESS_REACHES_BOUND: "a guess recovers as many labels",
    ReasonKind.NOT_SIGNIFICANT: (
        "not significant for so few samples and so many attacks: attack more samples of more clients (--images)"
    ),
    ReasonKind.NOT_BEYOND_CHANCE: (
        "no attack significantly exceeds the bound without a defence: attack more samples of more clients (--images)"
    ),
    ReasonKind.NO_ATTACK_APPLIES: "no attack applies",
    ReasonKind.NO_MEMBERSHIP_RESULT: "no membership attack has a result",
    ReasonKind.NO_ADAPTIVE_MEMBERSHIP: (
        "no membership attack that exceeds the bound without a defence was also run against this defence with its "
        "code: add `knowledge: [candidates, defence, code]`"
    ),
}
"""Text of each reason without a fact."""


def reason_text(reason: GateReason, check: Check) -> str:
    """Return the text of a reason of a check."""
    if reason.kind in _REASONS:
        return _REASONS[reason.kind]
    return _FACTS[reason.kind](reason.fact, check)


def reasons_text(check: Check) -> str:
    """Return the reasons of a check; empty if there are none."""
    return "; ".join(reason_text(reason, check) for reason in check.reasons)


def by_text(check: Check) -> str:
    """Return the attack with the value of a check: `dlg, adaptive`, or `a or b` for several; empty for none."""
    return attack_text(check.by) if isinstance(check.by, Attacker) else " or ".join(check.by or ())


def check_value_text(check: Check) -> str:
    """Return the measured value with its unit; empty if nothing was measured."""
    return "" if check.value is None else bound_value_text(check.bound, check.value)


def details_text(check: Check) -> str:
    """Return the samples above the bound, the interval and the reasons of a check; empty if there are none."""
    samples = ""
    if check.state == GateState.FAILED and check.samples:
        samples = f"{check.exceeding} of {check.samples} samples exceed the bound"
    return "; ".join(filter(None, (samples, interval_text(check), reasons_text(check))))


def interval_text(check: Check) -> str:
    """Return the interval of an estimated share; empty for other bounds."""
    if check.interval is None:
        return ""
    low, high = (bound_value_text(check.bound, end) for end in (check.interval.low, check.interval.high))
    return f"95 % interval {low} to {high}"


def check_text(check: Check) -> str:
    """Return a one-line description of a check."""
    arm = f"{check.arm}, batch {check.batch}" if check.batch else check.arm
    value, by = check_value_text(check), by_text(check)
    result = f"{value} ({by})" if value and by else value
    text = f"{arm}, {bound_text(check.bound)}: {check.state.upper()}"
    details = "; ".join(filter(None, (result, details_text(check))))
    return f"{text}: {details}" if details else text


def wrong_replay_text(distance: float) -> str:
    """Return a warning that the settings of a replay may be wrong, given the distance of the recorded updates."""
    return (
        f"the recorded updates differ from the undefended updates of these clients by {distance:.2g} times their norm: "
        f"the clients have a defence, or the model, loss, local steps or normalisation differ"
    )


# Text of each reason with a fact.


def _doubt(doubt: Doubt, check: Check) -> str:
    return doubt_text(doubt)


def _overtaken(overtaken: Overtaken, check: Check) -> str:
    return overtaken_text(overtaken)


def _not_run(attacks: Sequence[NotRun], check: Check) -> str:
    return f"{WANT_OF_TIME}: {', '.join(map(not_run_text, attacks))}"


def _no_result(attack: NoResult, check: Check) -> str:
    return no_result_text(attack, check.bound.name).strip()


def _metric_not_computed(missing: Count, check: Check) -> str:
    assert check.bound.metric is not None
    title = check.bound.metric.title
    return f"{title} could not be computed for {missing.number} of {missing.total} reconstructions"


def _shown_on(shown: Count, check: Check) -> str:
    return (
        f"shown on {shown.number} of {shown.total} samples: the other samples do not leak without a defence, so they "
        f"are no evidence for {check.arm}"
    )


def _label_baseline(baseline: LabelBaseline, check: Check) -> str:
    return f"best guess: {100 * baseline.share:.0f} % of {baseline.samples} labels"


def _part_recovered(recovered: Recovered, check: Check) -> str:
    return f"recovered in part: {part_text(recovered.finding, recovered.criterion)}"


def _labels_recovered(recovered: Recovered, check: Check) -> str:
    return f"labels recovered: {labels_beyond_text([recovered.finding])}"


def _budget(budget: AttackBudget, check: Check) -> str:
    parts = ["closed forms only"] if budget.only_closed_forms else list(map(_search_text, budget.searches))
    return f"budget: {', '.join([*parts, format_duration(budget.seconds)])} in all"


def _search_text(search: SearchBudget) -> str:
    most = "" if search.least == search.most else f" to {search.most:,}"
    return f"{search.attack} {search.least:,}{most} iterations"


def _wrong_replay_settings(distance: float, check: Check) -> str:
    return wrong_replay_text(distance)


def _no_scores(attack: str, check: Check) -> str:
    return f"{attack} has no scores"


def _not_recognised(attack: str, check: Check) -> str:
    return f"{attack} has no reconstruction for the recogniser"


def _not_run_on(attack: NotRunOn, check: Check) -> str:
    identity = check.bound.name == BoundedShare.IDENTITY
    noun = "samples that it identified" if identity else "clients with a result"
    missing = attack.missing
    return f"{attack.attack} was not run here on {missing.number} of {missing.total} {noun} without a defence"


def _few_non_members(curve: Roc, check: Check) -> str:
    return rate_text(curve, RATES[-1])


def _interval_reaches(high: float, check: Check) -> str:
    return f"the 95 % interval reaches {bound_value_text(check.bound, high)}"


def _share_budget(budget: ShareBudget, check: Check) -> str:
    noun = "samples" if check.bound.name == BoundedShare.IDENTITY else "updates"
    attacks = ", ".join(f"{attack} {count}" for attack, count in budget.attacks)
    seconds = "" if budget.seconds is None else f", {format_duration(budget.seconds)} in all"
    return f"budget: {noun} attacked by {attacks}{seconds}"


_FACTS: Mapping[ReasonKind, Callable[[Any, Check], str]] = {
    ReasonKind.DOUBT: _doubt,
    ReasonKind.NO_RESULT: _no_result,
    ReasonKind.NOT_RUN: _not_run,
    ReasonKind.METRIC_NOT_COMPUTED: _metric_not_computed,
    ReasonKind.OVERTAKEN: _overtaken,
    ReasonKind.SHOWN_ON: _shown_on,
    ReasonKind.PART_RECOVERED: _part_recovered,
    ReasonKind.LABELS_RECOVERED: _labels_recovered,
    ReasonKind.BUDGET: _budget,
    ReasonKind.WRONG_REPLAY_SETTINGS: _wrong_replay_settings,
    ReasonKind.LABEL_BASELINE: _label_baseline,
    ReasonKind.NO_SCORES: _no_scores,
    ReasonKind.NOT_RECOGNISED: _not_recognised,
    ReasonKind.NOT_RUN_ON: _not_run_on,
    ReasonKind.FEW_NON_MEMBERS: _few_non_members,
    ReasonKind.INTERVAL_REACHES: _interval_reaches,
    ReasonKind.SHARE_BUDGET: _share_budget,
}
"""Functions that return the text of each reason with a fact."""
