"""Text on the training of an arm: quality of its model, and simulated time."""

from __future__ import annotations

from collections.abc import Sequence

from rayfed.evidence.label_mix import LabelMix
from rayfed.evidence.training import ArmSummary
from rayfed.report.text.formats import NONE, format_count, format_points, format_share

QUALITIES = {"accuracy": "Test accuracy", "error": "Mean absolute error", "perplexity": "Perplexity", "iou": "IoU"}
"""Titles of the measures of a model's quality, by field of `ArmSummary`; a run shows the first that is known."""


def find_quality(arms: Sequence[ArmSummary]) -> str:
    """Return the measure of quality that an arm has; empty if no arm was evaluated."""
    return next((name for name in QUALITIES if any(getattr(arm, name) is not None for arm in arms)), "")


def quality_text(arm: ArmSummary, name: str, width: int = 0) -> str:
    """Return a measure of quality; for the accuracy also the difference to the first arm in percentage points.

    `width` is the minimum width of the difference, which aligns the accuracies in a column.
    """
    value = getattr(arm, name)
    if value is None:
        return NONE
    if name == "accuracy" and arm.accuracy_change is not None:
        change = f"({format_points(arm.accuracy_change)})"
        return f"{format_share(value)} {change:>{width}}"
    return format_share(value) if name in ("accuracy", "iou") else f"{value:.4g}"


def quality_note(arm: ArmSummary, arms: Sequence[ArmSummary]) -> str:
    """Return a note on the test accuracy of an arm: round, difference to the first of `arms`, other measures."""
    parts = [_accuracy_note(arm, arms)]
    if arm.perplexity is not None:
        parts.append(f"per token, perplexity {arm.perplexity:.4g}")
    if arm.iou is not None:
        parts.append(f"per pixel, mean intersection over union {format_share(arm.iou)}")
    if arm.train_accuracy is not None:
        parts.append(f"on the clients' own samples {format_share(arm.train_accuracy)}")
    if arm.non_member_accuracy:
        random_part, mean_part = map(format_share, arm.non_member_accuracy)
        parts.append(
            "mean over the clients, each with its private part. "
            f"A non-member gets {random_part}, or {mean_part} with the mean of the private parts"
        )
    return "; ".join(parts)


def _accuracy_note(arm: ArmSummary, arms: Sequence[ArmSummary]) -> str:
    if arm.error is not None:
        return f"regression: mean absolute error {arm.error:.4g}, test loss {arm.loss:.4g}"
    if arm.accuracy is None:
        return "not evaluated" if arm.loss is None else f"not defined for this loss: test loss {arm.loss:.4g}"
    if arm.accuracy_change is not None:
        return f"{format_points(arm.accuracy_change)} points compared with {arms[0].name}"
    assert arm.accuracy_round is not None
    reference = ", the reference" if len(arms) > 1 else ""
    return f"after {format_count(arm.accuracy_round + 1, 'round')}{reference}"


def extent_text(planned: int | None, arms: Sequence[ArmSummary], mix: LabelMix | None) -> str:
    """Return the extent of a run: rounds, clients and arms; `planned` is None if it is not recorded."""
    finished = max((arm.rounds for arm in arms), default=0)
    if planned == 0:
        text = "Attacks on updates"
    else:
        text = f"{format_count(planned or finished, 'round')} of training"
        if planned and planned != finished:
            text = f"{finished} of {text}"
    if mix:
        text += f" {'of' if planned == 0 else 'with'} {format_count(len(mix.clients), 'client')}"
    if len(arms) > 1:
        text += f", {len(arms)} arms"
    return f"{text}. Nothing is trained." if planned == 0 else f"{text}."
