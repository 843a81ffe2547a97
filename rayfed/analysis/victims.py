"""Results of a run by attacked client (victim), for intervals and paired comparisons within one run.

Clients of one run share its weights and its seed, so an interval over them holds for other clients of the same training
run, not for other seeds.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import Any

from rayfed.analysis import summary
from rayfed.analysis.unanswered import unanswered
from rayfed.evidence.rows import Row
from rayfed.evidence.settings import CONFIDENCE, Estimate, Setting, pair_of
from rayfed.metrics.known import METRICS
from rayfed.metrics.measures import JUDGED, MEASURES
from rayfed.metrics.roc import share


@dataclass(frozen=True)
class Victim:
    """Attacked client under one arm and attack, over all rounds and repeats."""

    samples: frozenset[Any]
    """Attacked samples: rounds, batches and labels. Two arms have the same victim if these are equal."""
    values: dict[str, float]
    """Mean over its samples by measure; measures without a value are missing."""
    counts: dict[str, int]
    """Number of values in each mean."""
    unanswered: bool
    """Whether the attack diverged or failed on one of its updates."""


def victims(
    attacks: Sequence[Row], inferences: Sequence[Row], arms: Sequence[str], closed: Collection[str]
) -> dict[tuple[str, str], dict[int, Victim]]:
    """Return the attacked clients (victims) by (arm, attack) and client, in the order of the arms.

    `closed` are the closed forms among the attacks (`rayfed.analysis.unanswered.closed_forms`).
    """
    found: dict[tuple[str, str], dict[int, Victim]] = {}
    for client in sorted({row["victim"] for row in [*attacks, *inferences]}):
        mine, asked = ([row for row in rows if row["victim"] == client] for rows in (attacks, inferences))
        for leak in summary.leaks(mine, arms, {}):
            scores = {metric.name: leak.scores[metric.name] for metric in JUDGED}
            known = {name: score for name, score in scores.items() if score}
            columns = "round", "repeat", "sample", "true_label", "batch_size", "observes"
            key = leak.arm, leak.attack
            found.setdefault(key, {})[client] = Victim(
                _told_apart(mine, key, columns),
                {name: score.mean for name, score in known.items()},
                {name: score.n for name, score in known.items()},
                any(unanswered(row, closed) for row in mine if (row["arm"], row["attack"]) == key),
            )
        for claim in summary.claims(asked, arms):
            if claim.value and claim.chance:
                key = claim.arm, claim.attack
                samples = _told_apart(asked, key, ("round", "repeat", "metric", "candidates"))
                gain = claim.value.mean - claim.chance.mean
                broken = any(unanswered(row, closed) for row in asked if (row["arm"], row["attack"]) == key)
                found.setdefault(key, {})[client] = Victim(
                    samples, {"inferred": gain}, {"inferred": claim.value.n}, broken
                )
    return dict(sorted(found.items(), key=lambda entry: arms.index(entry[0][0])))


def _told_apart(rows: Sequence[Row], met: tuple[str, str], columns: Sequence[str]) -> frozenset[Any]:
    return frozenset(tuple(row.get(name) for name in columns) for row in rows if (row["arm"], row["attack"]) == met)


def over_victims(settings: Sequence[Setting], found: Mapping[tuple[str, str], Mapping[int, Victim]]) -> list[Setting]:
    """Return the settings of a run with intervals over the attacked clients; keep the means unchanged."""

    def estimate(one: Setting, name: str, known: Estimate) -> Estimate:
        mine = found.get((one.arm, one.attack or ""), {}).values()
        measured = [(victim.values[name], victim.counts[name]) for victim in mine if name in victim.values]
        return _interval(name, known.mean, measured) if len(measured) > 1 else known

    return [
        replace(one, measures={name: estimate(one, name, known) for name, known in one.measures.items()})
        for one in settings
    ]


def _interval(name: str, mean: float, victims: Sequence[tuple[float, int]]) -> Estimate:
    """Return a mean with its 95 % interval over victims, given (mean, number of values) of each.

    The interval is exact for hits and misses (Clopper-Pearson). Otherwise it is Student's t of the ratio estimator, as
    batch sizes may vary between victims (Cochran 1977, "Sampling Techniques", section 6.3); for equal sizes it is the
    usual interval. It is clipped to the possible values.
    """
    n, one_each = len(victims), all(count == 1 for _, count in victims)
    if MEASURES[name].share and name in METRICS and one_each and all(value in (0, 1) for value, _ in victims):
        exact = share(sum(value == 1 for value, _ in victims), n)
        return Estimate(mean, exact.low, exact.high, n, "victims")
    size = sum(count for _, count in victims) / n
    squares = sum((count / size * (value - mean)) ** 2 for value, count in victims)
    from scipy.stats import t  # slow import (about 1 s)

    half = float(t.ppf((1 + CONFIDENCE) / 2, n - 1)) * sqrt(squares / (n - 1) / n)
    pair = pair_of([value for value, _ in victims])
    return Estimate(mean, mean - half, mean + half, n, "victims", pair=pair).within(name)
