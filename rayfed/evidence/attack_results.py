"""Results of each attack on each arm: leakage of reconstruction attacks, and results of inference attacks.

Metrics are clipped at their ceiling before averaging, because an exact copy has an infinite PSNR. Missing values (null
or NaN) are excluded, and every mean has its number of values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rayfed.evidence.membership import Roc, compute_roc
from rayfed.evidence.rows import Row, get_attack_label, group_rows, is_measured, knowledge_in, labels_given
from rayfed.evidence.spread import Spread, measure_spread
from rayfed.evidence.success import success_share
from rayfed.metrics.base import Metric
from rayfed.metrics.known import METRICS

_SAMPLE_METRICS = tuple(metric.name for metric in METRICS.values() if metric.compares != "labels")
_LEADING = tuple(metric.name for metric in METRICS.values() if metric.leads)[::-1]
"""Metrics that rank samples; the first measured one is used, as records also have a PSNR."""


@dataclass(frozen=True)
class AttackInput:
    """Input of an attack: observation, batch sizes, and the attacker's knowledge."""

    observes: str
    batch_sizes: tuple[int, ...]
    """Sorted batch sizes; empty for attacks without batches."""
    knowledge: tuple[str, ...]


@dataclass(frozen=True)
class Leakage:
    """Leakage of one arm under one attack, over all reconstructed images; None for values that were not measured.

    Diverged reconstructions are included, because the attacker has them.
    """

    arm: str
    attack: str
    label: str
    """Name of the attack in results, which attacks on other batch sizes may share."""
    images: int
    """Number of reconstructed images, counting each repeat."""
    input: AttackInput
    scores: dict[str, Spread | None]
    """Spread by metric of `METRICS`, over images; for metrics with one value per batch, over batches."""
    labels_given: bool
    """Whether the attacker was given the labels, so that it recovered none."""
    people: int | None
    """Number of classes of the face recogniser of `top1` to `top5`."""
    iterations: Spread | None
    """Iterations per batch."""
    seconds: Spread | None
    """Seconds per batch."""
    success: dict[str, float | None]
    """Probability of reconstruction success by metric, over all attacked images."""
    failures: dict[tuple[str, str], int]
    """Number of attacks on a batch by (status, message), except status ok."""


@dataclass(frozen=True)
class InferenceResult:
    """Result of one inference attack (without reconstructions) on one arm, over all victims and rounds."""

    arm: str
    attack: str
    label: str
    """Name of the attack in results."""
    metric: str
    value: Spread | None
    chance: Spread | None
    """Value for an attacker without the update."""
    control: Spread | None
    """Value of the same candidates on an update without them; None without a control."""
    roc: Roc | None
    """ROC statistics over the candidates of all victims; None for attacks without candidates."""
    candidates: int
    """Number of candidates, questions or images from which the value is computed."""
    failures: dict[tuple[str, str], int]
    """Number of victims by (status, message), except status ok."""


def attack_input(rows: Sequence[Row]) -> AttackInput:
    """Return the input of the attack in some rows of `attacks` or outcomes."""
    sizes = {row["batch_size"] for row in rows if row["batch_size"] is not None}
    return AttackInput(rows[0]["observes"] or "update", tuple(sorted(sizes)), knowledge_in(rows[0]))


def summarise_leakage(attacks: Sequence[Row], arms: Sequence[str], thresholds: Mapping[str, float]) -> list[Leakage]:
    """Return the leakage for every arm and attack, in the order of the arms; `thresholds` define success by metric."""
    groups = group_rows(attacks, "arm", "attack")
    return [_leakage(groups[key], thresholds) for key in sorted(groups, key=lambda key: arms.index(key[0]))]


def _leakage(rows: Sequence[Row], thresholds: Mapping[str, float]) -> Leakage:
    batches = [group[0] for group in group_rows(rows, "round", "victim", "repeat").values()]
    return Leakage(
        arm=rows[0]["arm"],
        attack=rows[0]["attack"],
        label=get_attack_label(rows[0]),
        images=sum(any(is_measured(row.get(name)) for name in _SAMPLE_METRICS) for row in rows),
        input=attack_input(rows),
        scores={metric.name: _score(metric, rows, batches) for metric in METRICS.values()},
        labels_given=labels_given(rows[0]),
        people=next((row["people"] for row in rows if row.get("people") is not None), None),
        iterations=measure_spread(row["iterations"] for row in batches),
        seconds=measure_spread(row["seconds"] for row in batches),
        success={metric: success_share(rows, metric, threshold) for metric, threshold in thresholds.items()},
        failures=_count_failures(batches),
    )


def _score(metric: Metric, rows: Sequence[Row], batches: Sequence[Row]) -> Spread | None:
    """Return the spread of a metric over samples, or over batches if it has one value per batch."""
    if metric.of_labels and labels_given(rows[0]):
        return None
    units = rows if metric.name in _SAMPLE_METRICS else batches
    return measure_spread((row.get(metric.name) for row in units), metric.ceiling)


def _count_failures(rows: Sequence[Row]) -> dict[tuple[str, str], int]:
    """Return the number of rows by (status, message), except status ok."""
    return dict(Counter((row["status"], row["message"] or "") for row in rows if row["status"] != "ok"))


def summarise_inferences(inferences: Sequence[Row], arms: Sequence[str]) -> list[InferenceResult]:
    """Return the result of every inference attack on every arm, in the order of the arms."""
    groups = group_rows(inferences, "arm", "attack")
    return [_inference_result(groups[key]) for key in sorted(groups, key=lambda key: arms.index(key[0]))]


def _inference_result(rows: Sequence[Row]) -> InferenceResult:
    finished = [row for row in rows if row["status"] == "ok"]
    return InferenceResult(
        arm=rows[0]["arm"],
        attack=rows[0]["attack"],
        label=get_attack_label(rows[0]),
        metric=rows[0]["metric"],
        value=measure_spread(row["value"] for row in finished),
        chance=measure_spread(row["chance"] for row in finished),
        control=measure_spread(row.get("control") for row in finished),
        roc=compute_roc(finished),
        candidates=sum(row["candidates"] or 0 for row in finished),
        failures=_count_failures(rows),
    )


def leading_metric(attacks: Sequence[Row]) -> str:
    """Return the name of the metric that ranks reconstructions; `psnr` if no such metric was measured."""
    for name in _LEADING:
        if any(is_measured(row.get(name)) for row in attacks):
            return name
    return "psnr"
