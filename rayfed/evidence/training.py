"""Summary of each arm's training: accuracy, time, traffic and virtual time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rayfed.evidence.rows import Row, group_rows, is_measured
from rayfed.evidence.spread import Spread, measure_spread


@dataclass(frozen=True)
class Simulated:
    """Virtual time of an arm's training on its clients' devices."""

    seconds: float
    """Total seconds of all rounds."""
    rounds: Spread
    """Seconds per round."""
    idle: Spread | None
    """Mean seconds that clients waited for the end of a round; None if no client took part in any round."""
    dropped: float
    """Share of the sampled clients that were excluded."""


@dataclass(frozen=True)
class ArmSummary:
    """Summary of one arm's training."""

    name: str
    components: list[Row]
    """The arm's other settings, then its defence pipeline: name and parameters, as written in the scenario."""
    rounds: int
    accuracy: float | None
    """Accuracy on the test set after the last evaluated round, 0..1."""
    train_accuracy: float | None
    """Accuracy on all clients' own samples after that round; None if not requested in the scenario."""
    non_member_accuracy: tuple[float, float] | None
    """Test accuracy of a non-member after that round: with a random private part, and with random keys only; None if
    clients have no private part."""
    accuracy_round: int | None
    accuracy_change: float | None
    """Difference in accuracy to the first arm; None for the first arm itself."""
    loss: float | None
    """Loss on the test set after the last evaluated round."""
    error: float | None
    """Mean absolute error on the test set; regression only."""
    perplexity: float | None
    """Perplexity of the test set's tokens; language models only."""
    iou: float | None
    """Mean intersection over union of the classes on the test set; masks only."""
    actor_seconds: Spread | None
    """Training seconds per round: sum of its cohorts' wall times, without warm-up rounds (`rounds_after_warm_up`)."""
    simulated: Simulated | None
    """Virtual time; None for a scenario without devices."""
    bytes_up: int
    bytes_down: int
    update_bytes: Spread | None
    """Bytes per client update."""


def summarise_arms(
    names: Sequence[str], scenario: Row, rounds: Sequence[Row], clients: Sequence[Row]
) -> list[ArmSummary]:
    """Return every arm's training summary, in the order of `names`."""
    rounds_by_arm, updates_by_arm = group_rows(rounds, "arm"), group_rows(clients, "arm")
    summaries = []
    for name in names:
        own_rounds = sorted(rounds_by_arm.get((name,), []), key=lambda row: row["round"])
        summaries.append(_summarise_arm(name, scenario, own_rounds, updates_by_arm.get((name,), [])))
    if not summaries or summaries[0].accuracy is None:
        return summaries
    reference = summaries[0].accuracy
    return [summaries[0], *(_compare_accuracy(summary, reference) for summary in summaries[1:])]


def _summarise_arm(name: str, scenario: Row, rounds: Sequence[Row], updates: Sequence[Row]) -> ArmSummary:
    """Return the summary of one arm, without a comparison with the first arm."""
    last = _last_evaluated(rounds)
    return ArmSummary(
        name=name,
        components=_components(scenario, name),
        rounds=len(rounds),
        accuracy=last.get("test_accuracy"),
        train_accuracy=last.get("train_accuracy"),
        non_member_accuracy=_non_member_accuracy(last),
        accuracy_round=last.get("round"),
        accuracy_change=None,
        loss=last.get("test_loss"),
        error=last.get("test_error"),
        perplexity=last.get("test_perplexity"),
        iou=last.get("test_iou"),
        actor_seconds=measure_spread(row["actor_seconds"] for row in rounds_after_warm_up(rounds)),
        simulated=_summarise_virtual_time(rounds),
        bytes_up=sum(row["bytes_up"] or 0 for row in rounds),
        bytes_down=sum(row["bytes_down"] or 0 for row in rounds),
        update_bytes=measure_spread(row["sent_bytes"] for row in updates),
    )


def _last_evaluated(rounds: Sequence[Row]) -> Row:
    """Return the last round with a measured accuracy or loss; an empty row without such a round."""
    for row in reversed(rounds):
        if is_measured(row["test_accuracy"]) or is_measured(row["test_loss"]):
            return row
    return {}


def _compare_accuracy(summary: ArmSummary, reference: float) -> ArmSummary:
    """Return the summary with the difference in accuracy to the first arm."""
    return summary if summary.accuracy is None else replace(summary, accuracy_change=summary.accuracy - reference)


def _non_member_accuracy(row: Row) -> tuple[float, float] | None:
    random_part, random_keys = row.get("non_member_accuracy"), row.get("non_member_mean_accuracy")
    return None if random_part is None or random_keys is None else (random_part, random_keys)


def _components(scenario: Row, arm: str) -> list[Row]:
    """Return an arm's other settings and its pipeline, each with name and parameters."""
    spec = (scenario.get("arms") or {}).get(arm, scenario.get("defences")) or []
    entries: list[Any] = []
    if isinstance(spec, Mapping):
        entries += [{"name": section, **spec[section]} for section in ("training", "model") if spec.get(section)]
        entries += [spec[section] for section in ("protection", "aggregation", "malicious") if spec.get(section)]
        spec = spec.get("defences") or []
    return [{"name": entry} if isinstance(entry, str) else entry for entry in [*entries, *spec]]


def rounds_after_warm_up(rounds: Sequence[Row]) -> Sequence[Row]:
    """Return an arm's rounds without warm-up rounds; if none are known to be, all rounds except the first."""
    return [row for row in rounds if row.get("warming") is False] or rounds[1:] or rounds


def _summarise_virtual_time(rounds: Sequence[Row]) -> Simulated | None:
    seconds = measure_spread(row.get("simulated_seconds") for row in rounds)
    if seconds is None:
        return None
    dropped = sum(row["dropped"] or 0 for row in rounds)
    sampled = dropped + sum(row["clients"] for row in rounds)
    idle = measure_spread(row["idle"] for row in rounds)
    return Simulated(seconds.mean * seconds.n, seconds, idle, dropped / sampled if sampled else 0.0)


def add_virtual_time(rounds: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the rounds that have virtual time, with `simulated_minutes` since the start of the run."""
    clock: dict[str, float] = {}
    timed = []
    for row in sorted(rounds, key=lambda row: (row["arm"], row["round"])):
        if is_measured(row.get("simulated_seconds")):
            clock[row["arm"]] = clock.get(row["arm"], 0.0) + row["simulated_seconds"]
            timed.append({**row, "simulated_minutes": clock[row["arm"]] / 60})
    return timed
