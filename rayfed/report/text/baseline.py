"""Text on changes since the baseline of a gate."""

from __future__ import annotations

from rayfed.evidence.baseline import Change, ChangeReason, ChangeReasonKind, MissingUpdates, SignificanceTest
from rayfed.metrics.known import METRICS
from rayfed.report.text.reasons import RUN_NOT_FINISHED

_SAMPLES = {SignificanceTest.PAIRED_T: "same samples", SignificanceTest.WELCH_T: "other samples"}
_REASONS = {
    ChangeReasonKind.UNFINISHED: RUN_NOT_FINISHED,
    ChangeReasonKind.ARM_MISSING: "this arm of the baseline is missing here",
    ChangeReasonKind.NO_VALUES: "no values here",
    ChangeReasonKind.NO_BASELINE_VALUES: "no values in the baseline",
    ChangeReasonKind.ONE_UPDATE: "one update is too few for a test",
}
"""Text of each reason without a fact."""


def change_reason_text(reason: ChangeReason) -> str:
    """Return the text of a reason of a change."""
    if isinstance(reason.fact, MissingUpdates):
        batches = ", ".join(map(str, reason.fact.batches))
        return f"{reason.fact.number} updates of the baseline were not measured, at batch {batches}"
    if reason.kind == ChangeReasonKind.OTHER_ARM:
        return f"compared with the baseline's arm {reason.fact}"
    if reason.kind == ChangeReasonKind.FEWER_ITERATIONS:
        attacks = ", ".join(reason.fact or ())
        return f"attacks of the baseline with no result here, or less than half of their iterations: {attacks}"
    return _REASONS[reason.kind]


def change_reasons_text(change: Change) -> str:
    """Return the reasons of a change; empty if there are none."""
    return "; ".join(map(change_reason_text, change.reasons))


def change_details_text(change: Change) -> str:
    """Return the compared samples, the newly leaking updates, and the reasons of a change."""
    compared = _SAMPLES[change.test] if change.test else ""
    if change.p is not None:
        compared = f"{compared}, {change.test} test"
    updates = [f"client {key.client} (round {key.round + 1}, batch {key.batch})" for key in change.newly]
    newly = f"leaks now, but not in the baseline: {', '.join(updates)}" if updates else ""
    return "; ".join(filter(None, (compared, newly, change_reasons_text(change))))


def change_text(change: Change) -> str:
    """Return a one-line description of a change."""
    text = f"{change.arm}, {METRICS[change.metric].title} since the baseline: {change.state.upper()}"
    difference = "" if change.difference is None else f"{change.difference:+.3g} over {change.updates} updates"
    p = "" if change.p is None else f"p {change.p:.2g}"
    details = "; ".join(filter(None, (difference, p, change_details_text(change))))
    return f"{text}: {details}" if details else text
