"""Report of a run: one self-contained HTML file, written from the tables of the run's folder.

It reads the tables, `scenario.yaml` and, if present, `environment.json` and `status.json` (`state`, `rounds_done`,
`rounds`, `error`). For a failed or unfinished run it shows the results so far.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from rayfed.evidence.arms import arm_names, is_secure
from rayfed.evidence.attack_results import (
    InferenceResult,
    Leakage,
    leading_metric,
    summarise_inferences,
    summarise_leakage,
)
from rayfed.evidence.attack_status import count_failed
from rayfed.evidence.bayesian_criteria import check_criteria
from rayfed.evidence.criteria import Criterion, noun_of
from rayfed.evidence.knowledge_pairs import failed_attacks, mark_outdone
from rayfed.evidence.label_mix import LabelMix, compute_label_mix
from rayfed.evidence.methods import closed_forms
from rayfed.evidence.outcomes import outcomes
from rayfed.evidence.paired import compare_pairs, group_by_victim
from rayfed.evidence.proved_bounds import BoundComparison, attacks_without_bound, compare_bounds, nontrivial_comparisons
from rayfed.evidence.robustness import robustness_matrix
from rayfed.evidence.rows import Row, distortions, group_rows, measured
from rayfed.evidence.settings import settings
from rayfed.evidence.training import ArmSummary, add_virtual_time, summarise_arms
from rayfed.evidence.verdicts import VERDICTS, closest, criterion_of, read_evidence, write_verdicts
from rayfed.evidence.victims import victims_by_attack
from rayfed.metrics.base import Metric
from rayfed.metrics.known import METRICS
from rayfed.metrics.top import TOP, chance
from rayfed.report import plots
from rayfed.report.explorer import Explorer, answered, explore
from rayfed.report.page import flat, optional_document, write_page
from rayfed.report.passages import passages
from rayfed.report.pictures import Pair, key, made, most_leaked, pictures, strips
from rayfed.report.samples import Samples, shown
from rayfed.report.success_plots import success_rates
from rayfed.report.svg import Chart, svg
from rayfed.report.text.attacks import threshold_text
from rayfed.report.text.formats import share
from rayfed.report.text.guarantees import short_keys_text
from rayfed.report.text.knowledge_pairs import failed_attack_text
from rayfed.report.text.leakage import LIMITS
from rayfed.report.text.marks import count_text
from rayfed.report.text.membership import pooled_legend
from rayfed.report.text.next_step import next_step_text
from rayfed.report.text.paired import paired_grid
from rayfed.report.text.proved_bounds import uncovered_text
from rayfed.report.text.summary import run_summary, subject_text
from rayfed.report.text.verdict_table import verdict_table
from rayfed.report.text.verdicts import guess, headline
from rayfed.report.text.weights import attacked_weights
from rayfed.store import exits
from rayfed.store.finding import State
from rayfed.store.folder import RunFolder
from rayfed.store.schemas import UNPLAYED, WANT_OF_TIME

ALWAYS = ("psnr", "mse")
"""Metrics with a column in the table of leakage even if they were not measured; the first one leads."""
INFERRED = {
    "auc": "membership (AUC)",
    "accuracy": "accuracy of the inferred attributes",
    "class_share": "generated images of the class",
}
"""Title of a measure, by metric of `inferences`."""


@dataclass(frozen=True)
class Vote:
    """Votes of the clients in one arm: the weights of their updates, and their scores of one another's models."""

    arm: str
    clients: list[int]
    weights: Chart
    """Chart of the weights over all rounds."""
    scores: Chart
    """Heat map of the scores in the last round."""
    round: int


def write_report(folder: RunFolder, redacted: bool = False) -> str:
    """Write `report.html` of a run and return the path or URL of the page.

    If `redacted`, the folder is a copy (`rayfed.report.redaction`), and the page lists the parts that are left out.
    Raises `RunError` if a table cannot be read or the page cannot be written.
    """
    ended = exits.status(folder).get("state") != "running"
    if ended and not folder.parts(VERDICTS):  # a run of an earlier version, or one that was killed
        write_verdicts(folder)
    contents = _contents(folder, "RUN" if redacted else folder.url) | {"redacted": redacted}
    return write_page(folder, "report.html.j2", contents, plotting=contents["explorer"].x is not None)


def _contents(folder: RunFolder, url: str) -> dict[str, Any]:
    """Return the variables of the template; `url` is the name of the run in commands."""
    scenario, status = folder.scenario(), exits.status(folder)
    rounds, attacks, privacy = (folder.read_table(name).to_pylist() for name in ("rounds", "attacks", "privacy"))
    inferences = folder.read_table("inferences").to_pylist()
    clients = folder.read_table("clients").select(["arm", "sent_bytes"]).to_pylist()
    names = arm_names(scenario, rounds, attacks, inferences)
    arms = summarise_arms(names, scenario, rounds, clients)
    samples = shown([scenario])
    evidence = read_evidence(folder)
    told = evidence.verdicts
    by_arm = {verdict.arm: verdict for verdict in told}
    nearest = [verdict.closest for verdict in told if verdict.closest]
    shown_alone, states = {key(row) for row in nearest}, {verdict.arm: verdict.state for verdict in told}
    leakage = _leakage(folder, scenario, names, attacks, inferences, samples, shown_alone, states)
    audited = status.get("kind") == "attack"
    if audited:  # verdicts of audits already combine the attackers
        leakage["failures"] = []
    mix = compute_label_mix(folder.read_table("partition"))
    classes, leaks = mix.classes if mix else {}, leakage["leaks"]
    criterion = evidence.criterion
    worst, worst_pairs = closest(nearest, criterion), pictures(folder, nearest, samples)
    proved = folder.read_table("proved").to_pylist()
    compared = nontrivial_comparisons(compare_bounds(proved, attacks, inferences))
    secure = is_secure(scenario)
    weights = attacked_weights(scenario, status, attacks)
    table = verdict_table(evidence, arms, privacy, weights)
    return leakage | {
        "name": str(scenario.get("name", folder.name)),
        "status": status,
        "subject": subject_text(scenario, status, attacks),
        "secure": secure,
        "arms": arms,
        "cards": sorted(arms, key=lambda arm: arm.name not in by_arm or by_arm[arm.name].state != "leaks"),
        "arm_names": names,
        "legend": [*table.legend, *([guess(scenario, attacks)] if attacks else []), LIMITS],
        "rates": pooled_legend([claim.roc for verdict in told for claim in verdict.inferences if claim.roc]),
        "simulated": any(arm.simulated for arm in arms),
        "verdicts": told,
        "table": table,
        "headline": headline(scenario, told),
        "next_step": next_step_text(
            evidence, status.get("enough"), status.get("fewer"), None if audited else url
        ).splitlines(),
        "verdict_of": by_arm,
        "criterion": criterion,
        "noun": noun_of(attacks),
        "distortions": distortions(attacks),
        "statements": run_summary(
            arms, worst if attacks else None, criterion, privacy, classes if samples.truth else None, secure
        ),
        "warnings": short_keys_text(scenario) + _about_samples(samples, leakage),
        "criteria": check_criteria(arms, leaks),
        "robustness": robustness_matrix(sorted(rounds, key=lambda row: row["round"]), scenario),
        "worst": worst,
        "worst_passage": next((one for one in leakage["passages"] if worst and key(one.row) == key(worst)), None),
        "worst_pairs": {row["arm"]: worst_pairs.get(key(row)) for row in nearest},
        "guarantees": [row for row in privacy if row["epsilon"] is not None],
        "unguaranteed": [row for row in privacy if row["epsilon"] is None and row["note"] is not None],
        "comparisons": compared,
        "compared": list(dict.fromkeys((one.arm, one.attack) for one in compared)),
        "uncovered": uncovered_text(attacks_without_bound(privacy, proved, attacks, inferences)),
        "private": _first_and_last(folder.read_table("private").to_pylist()),
        "sums": folder.read_table("secure_sums").to_pylist(),
        "votes": votes(folder),
        "svg": svg,
        "class_names": classes,
        "mix": mix,
        "mix_layers": plots.drawn_classes(mix) if mix else [],
        "mix_shown": plots.MOST_CLIENTS,
        "models_shown": plots.MOST_MODELS,
        "charts": {
            name: one and svg(one) for name, one in charts(rounds, attacks, arms, leaks, mix, proved, compared).items()
        },
        "environment": list(flat(optional_document(folder, "environment.json"))),
        "scenario": folder.scenario_text(),
    }


def _about_samples(samples: Samples, leakage: Mapping[str, Any]) -> list[str]:
    """Return the warning about samples if the page shows any."""
    embedded = any(leakage[name] for name in ("pairs", "strips", "passages", "made"))
    return [samples.warning] if samples.warning and embedded else []


def _leakage(
    folder: RunFolder,
    scenario: Row,
    names: Sequence[str],
    attacks: Sequence[Row],
    inferences: Sequence[Row],
    samples: Samples,
    worst: Collection[tuple[Any, ...]],
    states: Mapping[str, State],
) -> dict[str, Any]:
    """Return the variables of the template on attacks.

    `states` are the verdicts by arm. `worst` are the keys of the samples that are shown if `output.images` is `worst`.
    """
    asked = (scenario.get("metrics") or {}).get("success") or {}
    thresholds = {metric: least for metric, least in asked.items() if metric in METRICS}
    leaks, claims = summarise_leakage(attacks, names, thresholds), summarise_inferences(inferences, names)
    guesses: list[Leakage | InferenceResult] = [*leaks, *claims]
    closed = closed_forms(scenario)
    broken = {key: count_failed(rows, closed) for key, rows in group_rows(attacks, "arm", "attack").items()}
    of_arms = [row | {"verdict": states.get(row["arm"], row["verdict"])} for row in outcomes(folder)]
    met = mark_outdone(settings(of_arms), scenario)
    explorer = explore(answered(met))
    leading = leading_metric(attacks)
    pair_groups = group_by_victim(victims_by_attack(attacks, inferences, names, closed), met)
    scored = sorted((leak for leak in leaks if any(leak.scores.values())), key=lambda leak: _far(leak, leading))
    pairs = _pairs(folder, explorer, attacks, samples, worst)
    return {
        "samples": samples,
        "explorer": explorer,
        "failures": [failed_attack_text(one) for one in failed_attacks(met)],
        "pairs": pairs,
        "hidden": max(sum(leak.images for leak in leaks) - len(pairs), 0),
        "strips": strips(folder, samples, worst),
        "passages": passages(folder, attacks, samples, worst),
        "leaks": leaks,
        "broken": {key: count_text(*counts) for key, counts in broken.items() if counts[0]},
        "paired": paired_grid([one for one in compare_pairs(pair_groups) if one.measure in (leading, "inferred")]),
        "claims": claims,
        "inference_metrics": INFERRED,
        "made": made(folder, {(claim.arm, claim.attack) for claim in claims if claim.metric == "class_share"}, samples),
        "scored": scored,
        "silences": silences(guesses, names),
        "columns": _columns(leaks, (scenario.get("metrics") or {}).get("names", ())),
        "chances": _chances(leaks),
        "beyond": _beyond(attacks, thresholds, criterion_of(scenario, attacks)),
        "success": success_rates(attacks, names, thresholds),
        "passing": {
            metric: threshold_text(metric, threshold)
            for metric, threshold in thresholds.items()
            if any(leak.success[metric] is not None for leak in leaks)
        },
    }


def _beyond(
    attacks: Sequence[Row], thresholds: Mapping[str, float], criterion: Criterion
) -> dict[tuple[str, str, str], int]:
    """Return how many samples at a threshold beat the baseline and are identified, by arm, attack and metric."""
    found: dict[tuple[str, str, str], int] = {}
    for row in attacks:
        for metric, threshold in thresholds.items():
            known = row.get("above_baseline") is not None and row.get("identified") is not None
            if known and measured(row.get(metric)):
                met = row["arm"], row["attack"], metric
                apart = row["above_baseline"] > 0 and row["identified"] == 1 and not criterion.like_public(row)
                found[met] = found.get(met, 0) + (apart and METRICS[metric].passes(row[metric], threshold))
    return found


def _far(leak: Leakage, leading: str) -> float:
    """Return the sort key of a leak: minus the maximum of the leading metric, infinity without a result."""
    value = leak.scores[leading]
    return inf if value is None else -value.high


@dataclass(frozen=True)
class Silence:
    """Reason why attacks returned no result, with the affected attacks and arms."""

    status: str
    reason: str
    attacks: str
    arms: str
    batches: int


def silences(guesses: Sequence[Leakage | InferenceResult], arms: Sequence[str]) -> list[Silence]:
    """Return the reasons why attacks returned no result, the most frequent reason first."""
    groups: dict[tuple[str, str], list[tuple[Leakage | InferenceResult, int]]] = {}
    for one in guesses:
        for (status, message), count in one.failures.items():
            reason = WANT_OF_TIME if status == UNPLAYED else message or "no reason given"
            groups.setdefault((status, reason), []).append((one, count))
    found = []
    for (status, reason), group in groups.items():
        attacks = list(dict.fromkeys(one.label for one, _ in group))
        met = list(dict.fromkeys(one.arm for one, _ in group))
        where = f"all {len(met)} arms" if len(met) == len(arms) > 1 else ", ".join(met)
        found.append(Silence(status, reason, ", ".join(attacks), where, sum(count for _, count in group)))
    return sorted(found, key=lambda one: -one.batches)


def _first_and_last(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of the first and of the last round."""
    return [row for row in rows if row["round"] in (rows[0]["round"], rows[-1]["round"])]


def _columns(leaks: Sequence[Leakage], asked: Sequence[str]) -> list[Metric]:
    """Return the metrics of the table of leakage, in order: success metrics, other metrics, hits, errors, labels.

    Metrics that only the verdict needs are left out unless the scenario `asked` for them.
    """

    def place(metric: Metric) -> tuple[bool, ...]:
        first, labels = metric.name == ALWAYS[0], metric.of_labels
        return not first, labels, metric.format == "error", metric.format == "hit", not metric.success

    measured = (m for m in METRICS.values() if m.name in ALWAYS or any(leak.scores[m.name] for leak in leaks))
    return sorted((m for m in measured if m.name in asked or m.name not in Criterion.needs), key=place)


def _chances(leaks: Sequence[Leakage]) -> dict[str, str]:
    """Return the value of each measured re-identification metric that chance gives."""
    return {
        name: f"chance {share(chance(name, leak.people))}"
        for name in TOP
        for leak in leaks
        if leak.scores[name] and leak.people
    }


def _pairs(
    folder: RunFolder, explorer: Explorer, attacks: Sequence[Row], samples: Samples, worst: Collection[tuple[Any, ...]]
) -> list[Pair]:
    """Return the images with the highest scores of every arm and attack; `worst` is as in `_leakage`."""
    chosen = [
        (row, entry)
        for entry in explorer.entries
        for row in most_leaked(attacks, entry.setting.arm, entry.setting.attack)
        if samples.mode != "worst" or key(row) in worst
    ]
    found = pictures(folder, [row for row, _ in chosen], samples)
    return [replace(found[key(row)], entry=entry.id, title=entry.title) for row, entry in chosen if key(row) in found]


def charts(
    rounds: Sequence[Row],
    attacks: Sequence[Row],
    arms: Sequence[ArmSummary],
    leaks: Sequence[Leakage],
    mix: LabelMix | None,
    proved: Sequence[Row],
    compared: Sequence[BoundComparison],
) -> dict[str, Chart | None]:
    """Return the charts of a run by name; None for a chart whose values were not measured."""
    return {
        "accuracy": plots.curve(rounds, arms, "test_accuracy", "Test accuracy", as_share=True),
        "accuracy_by_time": plots.curve(
            add_virtual_time(rounds), arms, "test_accuracy", "Test accuracy", True, "simulated_minutes"
        ),
        "train_loss": plots.curve(rounds, arms, "train_loss", "Training loss"),
        "test_loss": plots.curve(rounds, arms, "test_loss", "Test loss"),
        "test_error": plots.curve(rounds, arms, "test_error", "Test error"),
        "test_perplexity": plots.curve(rounds, arms, "test_perplexity", "Test perplexity"),
        "test_iou": plots.curve(rounds, arms, "test_iou", "Test intersection over union", as_share=True),
        "every_image": plots.every_image(attacks, leaks, arms),
        "mix": plots.label_bars(mix) if mix else None,
        "proved": plots.proved(proved, compared),
    }


def votes(folder: RunFolder) -> list[Vote]:
    """Return the clients' votes by arm; empty if no aggregation rule of the run uses votes."""
    weights = folder.read_table("weights").to_pylist()
    scores = folder.read_table("scores").to_pylist() if weights else []
    found = []
    for arm in dict.fromkeys(row["arm"] for row in weights):
        mine, last = ([row for row in rows if row["arm"] == arm] for rows in (weights, scores))
        round = mine[-1]["round"]
        shown = plots.score_map(arm, [row for row in last if row["round"] == round])
        found.append(Vote(arm, sorted({row["client"] for row in mine}), plots.weight_lines(arm, mine), shown, round))
    return found
