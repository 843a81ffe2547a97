"""Text on the verdicts of a run: summary, legends, and results of attacks without reconstructions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rayfed.core.reasons import Reason
from rayfed.evidence.arms import is_undefended
from rayfed.evidence.attack_results import InferenceResult
from rayfed.evidence.rows import Row
from rayfed.evidence.verdicts import Verdict, choose_criterion
from rayfed.report.text.findings import labels_beyond_text
from rayfed.report.text.formats import MAX_NAMES
from rayfed.report.text.reasons import REASONS
from rayfed.store.finding import State


def headline(scenario: Mapping[str, Any], verdicts: Sequence[Verdict]) -> list[str]:
    """Return a summary of the verdicts: the arms in each state with their number, and arms that leak labels only."""
    lines = []
    for state, one, many in _STATES:
        arms = [verdict.arm for verdict in verdicts if verdict.state == state and not verdict.only_inferences]
        if arms:
            names = [f"{arm} (no defence)" if is_undefended(scenario, arm) else arm for arm in arms[:MAX_NAMES]]
            more = f" and {len(arms) - MAX_NAMES} more" if len(arms) > MAX_NAMES else ""
            verb = one if len(arms) == 1 else many
            lines.append(f"{len(arms)} of {len(verdicts)} arms {verb}: {', '.join(names)}{more}.")
    unknown = [verdict for verdict in verdicts if verdict.only_inferences]
    if unknown:
        reason = REASONS[Reason.NO_RECONSTRUCTION_ATTACK]
        lines.append(f"{len(unknown)} of {len(verdicts)} arms: {reason}; see the inferences of each arm.")
    return [*lines, *_labels_only(verdicts)]


def _labels_only(verdicts: Sequence[Verdict]) -> list[str]:
    """Return a sentence on the arms that leak labels but no samples; empty if there are none."""
    arms_by_labels: dict[str, list[str]] = {}
    for verdict in verdicts:
        labels = labels_beyond_text(verdict.findings)
        if labels and verdict.state != State.LEAKS:
            arms_by_labels.setdefault(labels, []).append(verdict.arm)
    if not arms_by_labels:
        return []
    texts = []
    for labels, arms in arms_by_labels.items():
        each = "each " if len(arms) > 1 else ""
        texts.append(f"{', '.join(arms)}, {each}{labels}")
    rest = sum(map(len, list(arms_by_labels.values())[MAX_NAMES:]))
    more = f"; and {rest} more" if rest else ""
    return [f"Labels were recovered beyond the baseline, but no samples: {'; '.join(texts[:MAX_NAMES])}{more}."]


_STATES = (
    (State.LEAKS, "leaks", "leak"),
    (State.NOT_MEASURED, "was not measured", "were not measured"),
    (State.INCONCLUSIVE, "is inconclusive", "are inconclusive"),
    (
        State.NOT_RECONSTRUCTED,
        "was not reconstructed by these attacks",
        "were not reconstructed by these attacks",
    ),
    (State.NOTHING_TO_ATTACK, "sends nothing to attack", "send nothing to attack"),
)
"""Each state with its text for one arm and for several arms."""


def inferences_text(verdict: Verdict) -> str:
    """Return the maximum of the results without reconstructions, such as `AUC 0.648`; empty without results."""
    values: dict[str, str] = {}
    for claim in sorted(verdict.inferences, key=_leading_value):
        if claim.roc:
            values["AUC"] = f"{claim.roc.auc.value:.3f}"
        elif claim.value:
            values[claim.metric.replace("_", " ")] = f"{claim.value.mean:.2f}"
    return ", ".join(f"{name} {value}" for name, value in values.items())


def badge_text(verdict: Verdict) -> str:
    """Return the verdict as one word or value."""
    return (verdict.only_inferences and inferences_text(verdict)) or verdict.state


def guess(scenario: Mapping[str, Any], attacks: Sequence[Row]) -> str:
    """Return a description of the baseline: the best guess without the update."""
    noun = choose_criterion(scenario, attacks).noun
    public = (scenario.get("data") or {}).get("public")
    typical = {
        "image": "the mean image or the best constant",
        "text": "the most common token at each place",
        "record": "the mean record or the best constant of each column",
    }[noun]
    closest = f" The closest public {noun} (data.public) is chosen with knowledge of the original." if public else ""
    return f"Baseline: the best guess without the update ({typical}). A leak has to beat it.{closest}"


def _leading_value(claim: InferenceResult) -> float:
    """Return the value that represents an attack: the pooled AUC of scores, otherwise the mean."""
    if claim.roc:
        return claim.roc.auc.value
    return claim.value.mean if claim.value else 0.0
