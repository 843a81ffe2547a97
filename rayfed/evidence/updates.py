"""Results on attacked updates, which a later gate compares with its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from statistics import fmean
from typing import Any, NamedTuple

from rayfed.evidence.arms import attack_specs
from rayfed.evidence.attack_status import has_failed
from rayfed.evidence.bounds import lacks_metric
from rayfed.evidence.rows import Row, is_measured, labels_given
from rayfed.evidence.verdicts import RunEvidence
from rayfed.metrics.known import METRICS
from rayfed.store.schemas import INAPPLICABLE, UNPLAYED


class AttackedUpdate(NamedTuple):
    """Attacked update, equal in both results."""

    round: int
    batch: int
    client: int


def hash_samples(images: Iterable[Row], texts: Iterable[Row]) -> str:
    """Return the SHA-256 digest of the set of attacked samples."""
    every = {(row["round"], row["victim"], row["sample"], repr(row["true"])) for row in [*images, *texts]}
    return sha256(repr(sorted(every)).encode()).hexdigest()


@dataclass
class _UpdateResult:
    """Results of all attacks on one update."""

    leaked: set[int] = field(default_factory=set)
    """Samples that leak."""
    iterations: dict[str, dict[int, int]] = field(default_factory=dict)
    """Maximum iterations of each attack with a result, by repeat."""
    best: dict[str, dict[int, float]] = field(default_factory=dict)
    """Best value of each metric, by sample."""

    def add_value(self, name: str, row: Row) -> None:
        """Keep a row's value of a metric if it is the best for its sample."""
        metric = METRICS[name]
        if not is_measured(row.get(name)) or (metric.of_labels and labels_given(row)):
            return
        value, best = min(row[name], metric.ceiling), self.best.setdefault(name, {})
        closest = max if metric.higher_is_closer else min
        best[row["sample"]] = closest(value, best.get(row["sample"], value))

    def add_iterations(self, row: Row, iterations: int) -> None:
        """Keep the maximum iterations of a row's attack and repeat."""
        by_repeat = self.iterations.setdefault(row["attack"], {})
        by_repeat[row["repeat"]] = max(iterations, by_repeat.get(row["repeat"], 0))


def measure_updates(evidence: RunEvidence, metrics: Sequence[str], arms: Sequence[str]) -> list[dict[str, Any]]:
    """Return the results on every attacked update, by arm: round, batch size, client, values by metric.

    `attacks` are those with a result, with their maximum iterations over all repeats. A value is the mean over the
    update's samples of the best result of any attack, to four digits. `leaked` is the number of samples that leak by
    the run's own criterion.
    """
    specs = attack_specs(evidence.scenario)
    results: dict[tuple[str, AttackedUpdate], _UpdateResult] = {}
    for row in evidence.attacks:
        if row["arm"] not in arms:
            continue
        key = row["arm"], AttackedUpdate(row["round"], row["batch_size"], row["victim"])
        result = results.setdefault(key, _UpdateResult())
        if _has_result(row, metrics, evidence):
            allowed = specs.get(row["attack"], {}).get("iterations")
            iterations = allowed or row.get("iterations") or 0  # some attacks stop early
            result.add_iterations(row, iterations)
        if evidence.criterion.leaks(row):
            result.leaked.add(row["sample"])
        for name in metrics:
            result.add_value(name, row)
    by_arm = sorted(results.items(), key=lambda item: arms.index(item[0][0]))
    return [_update(arm, key, result) for (arm, key), result in by_arm if result.best]


def _has_result(row: Row, metrics: Sequence[str], evidence: RunEvidence) -> bool:
    """Return whether the attack in a row has a result with all metrics."""
    if row["status"] in (INAPPLICABLE, UNPLAYED) or has_failed(row, evidence.closed_forms):
        return False
    return not any(lacks_metric(row, METRICS[name]) for name in metrics)


def _update(arm: str, key: AttackedUpdate, result: _UpdateResult) -> dict[str, Any]:
    """Return the results on an update, as in the gate's JSON document."""
    return {
        "arm": arm,
        "round": key.round,
        "batch": key.batch,
        "victim": key.client,
        "leaked": len(result.leaked),
        "attacks": {attack: sum(by_repeat.values()) for attack, by_repeat in result.iterations.items()},
        "values": {name: float(f"{fmean(best.values()):.4g}") for name, best in result.best.items()},
    }
