"""Results of a run by attacked client (victim), for intervals and paired comparisons within one run.

Clients of one run share its weights and its seed, so an interval over them holds for other clients of the same training
run, not for other seeds.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import Any

from rayfed.evidence.attack_results import summarise_inferences, summarise_leakage
from rayfed.evidence.attack_status import has_failed
from rayfed.evidence.rows import Row, group_rows
from rayfed.evidence.settings import CONFIDENCE, MeanEstimate, Setting, sort_pair
from rayfed.metrics.known import METRICS
from rayfed.metrics.measures import JUDGED, MEASURES
from rayfed.metrics.roc import share

_ATTACK_COLUMNS = ("round", "repeat", "sample", "true_label", "batch_size", "observes")
_INFERENCE_COLUMNS = ("round", "repeat", "metric", "candidates")
"""Columns that identify the attacked samples."""


@dataclass(frozen=True)
class Victim:
    """Attacked client under one arm and attack, over all rounds and repeats."""

    samples: frozenset[Any]
    """Attacked samples: rounds, batches and labels. Two arms have the same victim if these are equal."""
    values: dict[str, float]
    """Mean over its samples by measure; measures without a value are missing."""
    counts: dict[str, int]
    """Number of values in each mean."""
    failed: bool
    """Whether the attack diverged or failed on one of its updates."""


def victims_by_attack(
    attacks: Sequence[Row], inferences: Sequence[Row], arms: Sequence[str], closed: Collection[str]
) -> dict[tuple[str, str], dict[int, Victim]]:
    """Return the attacked clients (victims) by (arm, attack) and client, in the order of the arms.

    `closed` are the closed forms among the attacks (`rayfed.evidence.methods.closed_forms`).
    """
    victims: dict[tuple[str, str], dict[int, Victim]] = {}
    for client in sorted({row["victim"] for row in [*attacks, *inferences]}):
        attack_rows, inference_rows = (
            [row for row in rows if row["victim"] == client] for rows in (attacks, inferences)
        )
        own = _victims_of_attacks(attack_rows, arms, closed) | _victims_of_inferences(inference_rows, arms, closed)
        for key, victim in own.items():
            victims.setdefault(key, {})[client] = victim
    return dict(sorted(victims.items(), key=lambda entry: arms.index(entry[0][0])))


def _victims_of_attacks(
    rows: Sequence[Row], arms: Sequence[str], closed: Collection[str]
) -> dict[tuple[str, str], Victim]:
    """Return one client as the victim of reconstruction attacks, by (arm, attack)."""
    groups, victims = group_rows(rows, "arm", "attack"), {}
    for leakage in summarise_leakage(rows, arms, {}):
        own = groups[leakage.arm, leakage.attack]
        scores = {metric.name: leakage.scores[metric.name] for metric in JUDGED}
        spreads = {name: spread for name, spread in scores.items() if spread}
        victims[leakage.arm, leakage.attack] = Victim(
            _samples(own, _ATTACK_COLUMNS),
            {name: spread.mean for name, spread in spreads.items()},
            {name: spread.n for name, spread in spreads.items()},
            any(has_failed(row, closed) for row in own),
        )
    return victims


def _victims_of_inferences(
    rows: Sequence[Row], arms: Sequence[str], closed: Collection[str]
) -> dict[tuple[str, str], Victim]:
    """Return one client as the victim of inference attacks, by (arm, attack)."""
    groups, victims = group_rows(rows, "arm", "attack"), {}
    for result in summarise_inferences(rows, arms):
        if result.value and result.chance:
            own = groups[result.arm, result.attack]
            victims[result.arm, result.attack] = Victim(
                _samples(own, _INFERENCE_COLUMNS),
                {"inferred": result.value.mean - result.chance.mean},
                {"inferred": result.value.n},
                any(has_failed(row, closed) for row in own),
            )
    return victims


def _samples(rows: Sequence[Row], columns: Sequence[str]) -> frozenset[Any]:
    return frozenset(tuple(row.get(name) for name in columns) for row in rows)


def estimate_over_victims(
    settings: Sequence[Setting], victims: Mapping[tuple[str, str], Mapping[int, Victim]]
) -> list[Setting]:
    """Return the settings of a run with intervals over the attacked clients; keep the means unchanged."""
    estimated = []
    for setting in settings:
        own = victims.get((setting.arm, setting.attack or ""), {}).values()
        measures = dict(setting.measures)
        for name, estimate in setting.measures.items():
            means = [(victim.values[name], victim.counts[name]) for victim in own if name in victim.values]
            if len(means) > 1:
                measures[name] = _interval(name, estimate.mean, means)
        estimated.append(replace(setting, measures=measures))
    return estimated


def _interval(name: str, mean: float, victims: Sequence[tuple[float, int]]) -> MeanEstimate:
    """Return a mean with its 95 % interval over victims, given (mean, number of values) of each.

    The interval is exact for hits and misses (Clopper-Pearson). Otherwise it is Student's t of the ratio estimator, as
    batch sizes may vary between victims (Cochran 1977, "Sampling Techniques", section 6.3); for equal sizes it is the
    usual interval. It is clipped to the possible values.
    """
    n = len(victims)
    hits_or_misses = all(count == 1 and value in (0, 1) for value, count in victims)
    if MEASURES[name].share and name in METRICS and hits_or_misses:
        exact = share(sum(value == 1 for value, _ in victims), n)
        return MeanEstimate(mean, exact.low, exact.high, n, "victims")
    size = sum(count for _, count in victims) / n
    squares = sum((count / size * (value - mean)) ** 2 for value, count in victims)
    from scipy.stats import t  # slow import (about 1 s)

    half = float(t.ppf((1 + CONFIDENCE) / 2, n - 1)) * sqrt(squares / (n - 1) / n)
    pair = sort_pair([value for value, _ in victims])
    return MeanEstimate(mean, mean - half, mean + half, n, "victims", pair=pair).within(name)
