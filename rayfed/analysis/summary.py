"""Summary of a run from the run's tables: each arm's training, and each attack's results.

Metrics are clipped at their ceiling before averaging, because an exact copy has an infinite PSNR. Missing values (null
or NaN) are excluded, and every mean has its number of values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite, isnan
from statistics import fmean, stdev
from typing import Any

import numpy as np
import pyarrow as pa

from rayfed import registry
from rayfed.evidence.membership import Roc, compute_roc
from rayfed.evidence.rows import Row, knowledge_in, label_of, labels_given, measured
from rayfed.metrics.known import METRICS
from rayfed.store.arms import Pair, name_arm, name_pairs
from rayfed.store.schemas import VERSUS

_OF_SAMPLES = tuple(metric.name for metric in METRICS.values() if metric.compares != "labels")
_LEADING = tuple(metric.name for metric in METRICS.values() if metric.leads)[::-1]
"""Metrics that rank samples; the first measured one is used, as records also have a PSNR."""


@dataclass(frozen=True)
class Spread:
    """Mean, standard deviation and range of some values."""

    mean: float
    sd: float | None
    """Sample standard deviation (n - 1); None for a single value."""
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class Leak:
    """Leakage of one arm under one attack, over all reconstructed images; None for values that were not measured.

    Diverged reconstructions are included, because the attacker has them.
    """

    arm: str
    attack: str
    label: str
    """Name of the attack in results, which attacks on other batch sizes may share."""
    images: int
    """Number of reconstructed images, counting each repeat."""
    setting: str
    """Description of the attack's input."""
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
class Claim:
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
    defences: list[str]
    """The arm's other settings, then its defence pipeline, as written in the scenario."""
    rounds: int
    accuracy: float | None
    """Accuracy on the test set after the last evaluated round, 0..1."""
    own_accuracy: float | None
    """Accuracy on all clients' own samples after that round; None if not requested in the scenario."""
    strangers: tuple[float, float] | None
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
    """Training seconds per round: sum of its cohorts' wall times, without warm-up rounds (`warmed_up`)."""
    simulated: Simulated | None
    """Virtual time; None for a scenario without devices."""
    bytes_up: int
    bytes_down: int
    update_bytes: Spread | None
    """Bytes per client update."""


@dataclass(frozen=True)
class LabelMix:
    """Distribution of samples and classes over clients."""

    clients: list[int]
    classes: dict[int, str]
    """Names of classes by label."""
    counts: np.ndarray
    """Number of samples, (classes, clients) int64."""
    samples: tuple[int, float, int]
    """Minimum, median and maximum number of samples per client."""
    classes_held: tuple[int, float, int]
    """Minimum, median and maximum number of classes per client."""


def spread(values: Iterable[float | None], ceiling: float = inf) -> Spread | None:
    """Return mean, standard deviation and range of the measured values, clipped at `ceiling`; None without values.

    The standard deviation is None if a value is infinite.
    """
    known = [min(float(v), ceiling) for v in values if v is not None and not isnan(v)]
    if not known:
        return None
    finite = all(map(isfinite, known))
    deviation = stdev(known) if finite and len(known) > 1 else None
    return Spread(mean(known), deviation, min(known), max(known), len(known))


def mean(values: Sequence[float]) -> float:
    """Return the mean of some values; NaN if they contain infinite values of both signs."""
    return fmean(values) if all(map(isfinite, values)) else sum(values) / len(values)


def arm_names(scenario: Row, *tables: Sequence[Row]) -> list[str]:
    """Return the arms in the order of the scenario, then any other arms in the order of the tables.

    With opponents, an arm is listed once per opponent.
    """
    named = [name for name, _ in name_pairs(scenario.get("arms") or {}, scenario.get("opponents") or {})]
    return list(dict.fromkeys(named) | dict.fromkeys(row["arm"] for table in tables for row in table))


def arm_and_opponent(scenario: Row, arm: str) -> tuple[str, str]:
    """Return an arm's name in the scenario, and its opponent (poisoning attack) or an empty text."""
    return pairs_by_name(scenario).get(arm, (arm, ""))


def pairs_by_name(scenario: Row) -> dict[str, Pair]:
    """Return the arms of a scenario and their opponents by the names of the pairs in tables."""
    if pairs := _pairs_of_earlier_versions(scenario):
        return pairs
    arms = scenario.get("arms") or [name_arm(one["name"] for one in scenario.get("defences") or [])]
    return dict(name_pairs(arms, scenario.get("opponents") or {}))


def _pairs_of_earlier_versions(scenario: Row) -> dict[str, Pair]:
    """Return the pairs of a scenario of an earlier version by their names; empty for other scenarios.

    Earlier versions stored each pair as an arm with the opponent's malicious clients, called by the name of the pair.
    """
    arms = scenario.get("arms") or {}
    if scenario.get("opponents") or not all(isinstance(spec, Mapping) for spec in arms.values()):
        return {}
    pairs = split_names(arms)
    clients: dict[str, Any] = {}
    for name, (_, opponent) in pairs.items():
        if not opponent or clients.setdefault(opponent, arms[name].get("malicious")) != arms[name].get("malicious"):
            return {}
    every = len({arm for arm, _ in pairs.values()}) * len(clients)
    return pairs if any(clients.values()) and len(clients) > 1 and len(set(pairs.values())) == every else {}


def split_names(names: Iterable[str]) -> dict[str, Pair]:
    """Split the names of pairs that were stored without a scenario with opponents."""
    parts = {name: name.partition(VERSUS) for name in names}
    return {name: (arm, opponent) for name, (arm, _, opponent) in parts.items()}


def arm_spec(scenario: Row, arm: str) -> Row:
    """Return the settings of an arm in the scenario, without the arm's opponent (poisoning attack)."""
    arms = scenario.get("arms") or {}
    own = arms.get(arm, arms.get(arm_and_opponent(scenario, arm)[0], scenario.get("defences")))
    return own if isinstance(own, Mapping) else {"defences": own}


def knowledge_of(scenario: Row, attack: str) -> set[str]:
    """Return the grants (given knowledge) of an attack with some title, from the scenario."""
    specs = [one for one in scenario.get("attacks") or [] if isinstance(one, Mapping)]
    own = (one for one in specs if attack == str(one.get("label") or one["name"]))
    return set(next(own, {}).get("knowledge") or ())


def undefended(scenario: Row, arm: str) -> bool:
    """Return whether an arm has no defence and no protection, including the federation's protection."""
    spec, federation = arm_spec(scenario, arm), scenario.get("federation") or {}
    return not spec.get("defences") and not spec.get("protection") and not federation.get("protection")


def recorded(scenario: Row, arm: str) -> bool:
    """Return whether an arm replays recorded updates of a federation, whose defences attackers do not know."""
    specs = arm_spec(scenario, arm).get("defences") or []
    return any(isinstance(spec, Mapping) and spec["name"] == "rayfed.engine.replaying:Recorded" for spec in specs)


def leaks(attacks: Sequence[Row], arms: Sequence[str], thresholds: Mapping[str, float]) -> list[Leak]:
    """Return the leakage for every arm and attack, in the order of the arms; `thresholds` define success by metric."""
    groups = _grouped(attacks, "arm", "attack")
    return [_leak(groups[key], thresholds) for key in sorted(groups, key=lambda key: arms.index(key[0]))]


def _leak(rows: Sequence[Row], thresholds: Mapping[str, float]) -> Leak:
    batches = [group[0] for group in _grouped(rows, "round", "victim", "repeat").values()]
    failures = Counter((b["status"], b["message"] or "") for b in batches if b["status"] != "ok")
    return Leak(
        arm=rows[0]["arm"],
        attack=rows[0]["attack"],
        label=label_of(rows[0]),
        images=sum(any(measured(row.get(name)) for name in _OF_SAMPLES) for row in rows),
        setting=setting(rows),
        scores={
            name: None
            if metric.of_labels and labels_given(rows[0])
            else spread((row.get(name) for row in (rows if name in _OF_SAMPLES else batches)), metric.ceiling)
            for name, metric in METRICS.items()
        },
        labels_given=labels_given(rows[0]),
        people=people(rows),
        iterations=spread(row["iterations"] for row in batches),
        seconds=spread(row["seconds"] for row in batches),
        success={metric: success(rows, metric, threshold) for metric, threshold in thresholds.items()},
        failures=dict(failures),
    )


def success(rows: Sequence[Row], metric: str, threshold: float) -> float | None:
    """Return the probability of reconstruction success (PoRS): the share of images that reach the threshold.

    The share is of all attacked images, and an image without a value counts as a failure. None if no image has a value.
    """
    values = [row[metric] for row in rows if measured(row.get(metric))]
    passed = sum(METRICS[metric].passes(value, threshold) for value in values)
    return passed / len(rows) if values else None


def passing(metric: str, threshold: float) -> str:
    """Format the success threshold of a metric: `psnr ≥ 15`."""
    return f"{metric} {'≥' if METRICS[metric].higher_is_closer else '≤'} {threshold:g}"


def people(rows: Iterable[Row]) -> int | None:
    """Return the number of people that the face recogniser knows; None if no recogniser was used."""
    return next((row["people"] for row in rows if row.get("people") is not None), None)


def claims(inferences: Sequence[Row], arms: Sequence[str]) -> list[Claim]:
    """Return the result of every inference attack on every arm, in the order of the arms."""
    groups = _grouped(inferences, "arm", "attack")
    return [_claim(groups[key]) for key in sorted(groups, key=lambda key: arms.index(key[0]))]


def _claim(rows: Sequence[Row]) -> Claim:
    answered = [row for row in rows if row["status"] == "ok"]
    return Claim(
        arm=rows[0]["arm"],
        attack=rows[0]["attack"],
        label=label_of(rows[0]),
        metric=rows[0]["metric"],
        value=spread(row["value"] for row in answered),
        chance=spread(row["chance"] for row in answered),
        control=spread(row.get("control") for row in answered),
        roc=compute_roc(answered),
        candidates=sum(row["candidates"] or 0 for row in answered),
        failures=dict(Counter((row["status"], row["message"] or "") for row in rows if row["status"] != "ok")),
    )


def setting(rows: Sequence[Row]) -> str:
    """Describe the input of an attack: `the gradient of 4 samples and the labels`, `only the update`."""
    sizes = sorted({row["batch_size"] for row in rows if row["batch_size"] is not None})
    count = "–".join(str(size) for size in dict.fromkeys(sizes[:1] + sizes[-1:]))
    samples = f" of {count} sample{'' if sizes[-1] == 1 else 's'}" if sizes else ""
    observed = _described("views", rows[0]["observes"] or "update") + samples
    knowledge = [_described("grants", name) for name in knowledge_in(rows[0])]
    return " and ".join([observed, *knowledge]) if knowledge else f"only {observed}"


def _described(kind: str, name: str) -> str:
    """Return a component's description, or its name if it is not registered (user code is not imported)."""
    return str(registry.find(kind, name).describe) if name in registry.table(kind) else name


def arms(names: Sequence[str], scenario: Row, rounds: Sequence[Row], clients: Sequence[Row]) -> list[ArmSummary]:
    """Return every arm's training summary, in the order of `names`."""
    played, sent = (_grouped(table, "arm") for table in (rounds, clients))
    result: list[ArmSummary] = []
    for name in names:
        mine = sorted(played.get((name,), []), key=lambda row: row["round"])
        last = next(
            (row for row in reversed(mine) if measured(row["test_accuracy"]) or measured(row["test_loss"])), None
        )
        accuracy = last["test_accuracy"] if last else None
        reference = result[0].accuracy if result else None
        result.append(
            ArmSummary(
                name=name,
                defences=_defences(scenario, name),
                rounds=len(mine),
                accuracy=accuracy,
                own_accuracy=last["train_accuracy"] if last else None,
                strangers=_strangers(last) if last else None,
                accuracy_round=last["round"] if last else None,
                accuracy_change=None if accuracy is None or reference is None else accuracy - reference,
                loss=last["test_loss"] if last else None,
                error=last.get("test_error") if last else None,
                perplexity=last.get("test_perplexity") if last else None,
                iou=last.get("test_iou") if last else None,
                actor_seconds=spread(row["actor_seconds"] for row in warmed_up(mine)),
                simulated=_simulated(mine),
                bytes_up=sum(row["bytes_up"] or 0 for row in mine),
                bytes_down=sum(row["bytes_down"] or 0 for row in mine),
                update_bytes=spread(row["sent_bytes"] for row in sent.get((name,), [])),
            )
        )
    return result


def warmed_up(rounds: Sequence[Row]) -> Sequence[Row]:
    """Return an arm's rounds without warm-up rounds; if none are known to be, all rounds except the first."""
    return [row for row in rounds if row.get("warming") is False] or rounds[1:] or rounds


def _simulated(rounds: Sequence[Row]) -> Simulated | None:
    times = spread(row.get("simulated_seconds") for row in rounds)
    if times is None:
        return None
    dropped = sum(row["dropped"] or 0 for row in rounds)
    drawn = dropped + sum(row["clients"] for row in rounds)
    idle = spread(row["idle"] for row in rounds)
    return Simulated(times.mean * times.n, times, idle, dropped / drawn if drawn else 0.0)


def on_the_clock(rounds: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the rounds that have virtual time, with `simulated_minutes` since the start of the run."""
    clock: dict[str, float] = {}
    found = []
    for row in sorted(rounds, key=lambda row: (row["arm"], row["round"])):
        if measured(row.get("simulated_seconds")):
            clock[row["arm"]] = clock.get(row["arm"], 0.0) + row["simulated_seconds"]
            found.append({**row, "simulated_minutes": clock[row["arm"]] / 60})
    return found


def _strangers(row: Row) -> tuple[float, float] | None:
    anew, averaged = row.get("non_member_accuracy"), row.get("non_member_mean_accuracy")
    return None if anew is None or averaged is None else (anew, averaged)


def leading_metric(attacks: Iterable[Row]) -> str:
    """Return the name of the metric that ranks reconstructions; `psnr` if no such metric was measured."""
    measures = {name for row in attacks for name in _LEADING if measured(row.get(name))}
    return next((name for name in _LEADING if name in measures), "psnr")


def label_mix(partition: pa.Table) -> LabelMix | None:
    """Return the distribution of samples and classes over clients; None without the table `partition`."""
    if not partition.num_rows:
        return None
    clients, columns = np.unique(partition["client"], return_inverse=True)
    labels, firsts, rows = np.unique(partition["label"], return_index=True, return_inverse=True)
    counts = np.zeros((len(labels), len(clients)), np.int64)
    counts[rows, columns] = partition["count"]
    names = partition["class_name"].take(firsts).to_pylist()
    samples, held = counts.sum(axis=0), (counts > 0).sum(axis=0)
    return LabelMix(
        clients=clients.tolist(),
        classes={label: name or str(label) for label, name in zip(labels.tolist(), names, strict=True)},
        counts=counts,
        samples=(int(samples.min()), float(np.median(samples)), int(samples.max())),
        classes_held=(int(held.min()), float(np.median(held)), int(held.max())),
    )


def _defences(scenario: Row, arm: str) -> list[str]:
    """Return an arm's other settings and its pipeline, each as `name (parameter value, ...)`."""
    own = (scenario.get("arms") or {}).get(arm, scenario.get("defences")) or []
    changed = []
    if isinstance(own, Mapping):
        changed = [{"name": section, **own[section]} for section in ("training", "model") if own.get(section)]
        changed += [own[section] for section in ("protection", "aggregation", "malicious") if own.get(section)]
        own = own.get("defences") or []
    return [_defence({"name": entry} if isinstance(entry, str) else entry) for entry in [*changed, *own]]


def _defence(entry: Row) -> str:
    parameters = ", ".join(f"{key} {value}" for key, value in entry.items() if key != "name")
    return f"{entry['name']} ({parameters})" if parameters else str(entry["name"])


def _grouped(rows: Iterable[Row], *columns: str) -> dict[tuple[Any, ...], list[Row]]:
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[column] for column in columns), []).append(row)
    return groups
