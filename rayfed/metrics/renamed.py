"""Present names of metrics, measures and columns that have another name in older runs and scenarios."""

from __future__ import annotations

from rayfed.metrics.known import METRICS
from rayfed.metrics.measures import extreme_of

NAMES = {
    "told_apart": "identified",
    "decoy_told_apart": "decoy_identified",
    "above_guessing": "above_baseline",
    "parts_found": "parts_recovered",
    "parts_guessed": "parts_baseline",
    "label_guess_accuracy": "label_baseline",
    "target_guess_error": "target_baseline",
    "stranger_accuracy": "non_member_accuracy",
    "stranger_mean_accuracy": "non_member_mean_accuracy",
    "guessing_accuracy": "baseline_accuracy",
    "guessing_error": "baseline_error",
    "guessing_perplexity": "baseline_perplexity",
    "guessing_iou": "baseline_iou",
} | {f"{name}_worst": extreme_of(name) for name in METRICS}
"""Present names by former names, of metrics, measures and columns."""


def present(name: str) -> str:
    """Return the present name of a metric, measure or column, which older versions may have named otherwise."""
    return NAMES.get(name, name)
