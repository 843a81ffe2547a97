"""Text on findings: parts of samples and labels that attacks recover."""

from __future__ import annotations

from collections.abc import Sequence

from rayfed.evidence.criteria import Criterion
from rayfed.report.text.formats import format_count
from rayfed.report.text.reasons import attack_text
from rayfed.store.finding import Finding, RecoveredLabels

PARTS = {"tokens": "tokens", "records": "columns", "pixels": "pixels"}
"""Names of the parts of samples, by modality."""
MAX_COLUMNS = 8
"""Maximum number of columns that a sentence names."""


def part_text(finding: Finding, criterion: Criterion) -> str:
    """Return the share of the samples' parts that attacks recover, with the columns; empty if maybe due to chance."""
    part = finding.part
    if part is None:
        return ""
    names = [
        f"{name} {100 * share:.0f} %" + ("" if guess is None else f" ({100 * guess:.0f} %)")
        for name, share, guess in part.columns[:MAX_COLUMNS]
    ]
    more = f" and {len(part.columns) - MAX_COLUMNS} more" if len(part.columns) > MAX_COLUMNS else ""
    constant = ", in brackets the baseline" if any(guess is not None for *_, guess in part.columns) else ""
    which = f": {', '.join(names)}{more}{constant}" if names else ""
    by = "" if finding.part_by == finding.by else f" by {attack_text(finding.part_by)}"
    samples = format_count(part.samples, criterion.noun)
    parts = f"{100 * part.recovered:.0f} % of the {PARTS[criterion.modality]} of {samples}"
    baseline = "" if part.baseline is None else f" (baseline {100 * part.baseline:.0f} %)"
    return f"{parts} recovered{by}{baseline}{which}"


def labels_beyond_text(found: Sequence[Finding]) -> str:
    """Return the labels or targets recovered beyond the baseline, with values; empty if there are none.

    A result that may be due to chance says so.
    """
    labels = [_labels_text(one.batch, one.labels) for one in found if one.labels and one.labels.beyond]
    targets = [_targets_text(one) for one in found if one.targets_beyond]
    with_error = f"targets with a mean error of {', '.join(targets)}" if targets else ""
    return "; ".join(filter(None, (", ".join(labels), with_error)))


def _labels_text(batch: int, labels: RecoveredLabels) -> str:
    share = f"{100 * labels.share:.0f} % at batch size {batch} ({_baseline_text(labels)})"
    whole = f", all labels of {labels.whole} of {labels.updates} updates" if labels.whole else ""
    best = f", by the best of {labels.attempts} attackers" if labels.attempts > 1 else ""
    chance = ", may be due to chance" if labels.by_chance else ""
    return share + whole + best + chance


def _targets_text(finding: Finding) -> str:
    median = "" if finding.guessed is None else f" (median: {finding.guessed:.2g})"
    return f"{finding.targets:.2g} at batch size {finding.batch}{median}"


def _baseline_text(labels: RecoveredLabels) -> str:
    """Return the baseline of labels as text: the best guess with its share."""
    if labels.in_proportion > max(labels.evenly, labels.commonest):
        return f"labels in the proportions of other clients: {100 * labels.in_proportion:.0f} %"
    if labels.evenly > labels.commonest:
        return f"all labels equally often: {100 * labels.evenly:.0f} %"
    only = ", the only class" if labels.commonest == 1 else ""
    return f"majority class{only}: {100 * labels.commonest:.0f} %"
