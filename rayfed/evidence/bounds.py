"""Bounds on leakage, and the criteria of results that exceed a bound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from rayfed.evidence.criteria import Criterion
from rayfed.evidence.labels import LUCK, LabelInference, collect_label_inferences
from rayfed.evidence.rows import Row, group_rows, is_measured, labels_given
from rayfed.metrics.base import Metric
from rayfed.metrics.known import METRICS, metrics_of
from rayfed.metrics.measures import JUDGED
from rayfed.store.finding import Missing

if TYPE_CHECKING:
    from rayfed.samples import Modality


class BoundedShare(StrEnum):
    """Estimated shares that a bound can limit, in addition to metrics of reconstructions."""

    AUC = "membership.auc"
    TPR = "membership.tpr"
    IDENTITY = "identity"
    """Share of samples whose person a recogniser identifies in the reconstruction."""


MEMBERSHIP = (BoundedShare.AUC, BoundedShare.TPR)
"""Bounded measures of membership attacks."""


@dataclass(frozen=True)
class Bound:
    """Bound on one measure of leakage. A value equal to the bound exceeds the bound."""

    name: str
    """Metric of reconstructions, or one of `BoundedShare`."""
    limit: float

    @property
    def metric(self) -> Metric | None:
        """Return the bounded metric of reconstructions; None for an estimated share."""
        return METRICS.get(self.name)

    @property
    def on_labels(self) -> bool:
        """Return whether the bound limits recovered labels instead of reconstructions."""
        return self.metric is not None and self.metric.compares == "labels"


def boundable_metrics(modality: Modality) -> list[str]:
    """Return the metrics of a modality (images, texts, tables) that a bound can limit."""
    judged = {metric.name for metric in JUDGED if metric.format != "hit" and metric.success}
    return [name for name in metrics_of(modality) if name in judged or name == "label_accuracy"]


def lacks_metric(row: Row, metric: Metric) -> bool:
    """Return whether a row has no value of a metric although the row's attack has a result."""
    if row["status"] != "ok" or is_measured(row.get(metric.name)):
        return False
    if metric.of_labels:
        return row.get("label") is not None and not labels_given(row)
    alike = (name for name, other in METRICS.items() if other.compares == metric.compares)
    return any(is_measured(row.get(name)) for name in alike)


@dataclass(frozen=True)
class BoundCriterion(Criterion):
    """Criterion of a reconstruction that exceeds a bound, beats the baseline and identifies the original sample.

    `threshold` is the bound. Distances are compared with their sign changed, so that larger is always closer.
    """

    metric: Metric

    def nearness(self, row: Row) -> float | None:
        """Return the similarity of a row's reconstruction to the true sample; None if the metric was not measured."""
        value = row.get(self.metric.name)
        if not is_measured(value):
            return None
        return min(value, self.metric.ceiling) if self.metric.higher_is_closer else -value

    def missing(self, row: Row) -> Missing:
        """Return the reason why the row of a finished attack has no usable result."""
        return Missing.METRIC if lacks_metric(row, self.metric) else super().missing(row)

    def near(self, row: Row) -> bool:
        """Return whether the reconstruction in a row of `attacks` exceeds the bound and beats the baseline."""
        if self.nearness(row) is None or not self.metric.passes(row[self.metric.name], self.threshold):
            return False
        return (row["above_baseline"] or 0.0) > 0

    def part(self, rows: Sequence[Row]) -> None:
        """Return None, because a bound applies to each whole sample and not to parts of samples."""


class LabelResult(NamedTuple):
    """Labels recovered by an attack, compared with a bound."""

    exceeds: bool
    """Whether the attack significantly exceeds the bound."""
    share: float
    """Share of all labels; of the labels of the best update if only single updates exceed the bound, or may."""


@dataclass(frozen=True)
class LabelBoundCriterion(BoundCriterion):
    """Criterion of recovered labels: the attack exceeds the bound significantly.

    The bounded value is the share of all labels of a batch size, or of the labels of single updates.
    """

    needs: ClassVar[tuple[str, ...]] = ()
    results: Mapping[tuple[str, int, str], LabelResult]
    """Result of each attack, by arm, batch size and attack."""

    @classmethod
    def from_rows(cls, attacks: Sequence[Row], modality: Modality, bound: Bound) -> LabelBoundCriterion:
        """Return the criterion of recovered labels for a run's rows of `attacks`."""
        assert bound.metric is not None
        results: dict[tuple[str, int, str], LabelResult] = {}
        for (arm, batch), rows in group_rows(attacks, "arm", "batch_size").items():
            for labels in collect_label_inferences(rows):  # one per repeat
                key = arm, batch, labels.attack
                result = _label_result(labels, bound.limit)
                results[key] = max(result, results.get(key, result))
        return cls(modality, bound.limit, bound.metric, results)

    def nearness(self, row: Row) -> float | None:
        """Return the share of labels that the row's attack recovered; None without labels, or for given labels."""
        if labels_given(row) or not is_measured(row.get("label_accuracy")):
            return None
        return self.results[row["arm"], row["batch_size"], row["attack"]].share

    def missing(self, row: Row) -> Missing:
        """Return the reason why the row of a finished attack has no recovered labels."""
        return Missing.LABELS_GIVEN if labels_given(row) else Missing.LABELS

    def near(self, row: Row) -> bool:
        """Return whether a row's update exceeds the bound, through an attack that exceeds the bound significantly."""
        if self.nearness(row) is None:
            return False
        result = self.results[row["arm"], row["batch_size"], row["attack"]]
        return result.exceeds and self.metric.passes(row["label_accuracy"], self.threshold)

    leaks = near


def _label_result(labels: LabelInference, limit: float) -> LabelResult:
    whole = labels.share >= limit
    updates = labels.attempts * labels.luck_by_update(limit) <= LUCK
    exceeds = updates or (whole and not labels.lucky)
    single = not whole and (updates or labels.may_reach(limit))
    return LabelResult(exceeds, max(labels.updates.values()) if single else labels.share)
