"""Outcomes of a run, one row for every arm and attack: leakage, accuracy and cost.

Sweeps, fronts, comparisons, recommendations and exports are computed from these rows. A sweep adds columns with the
trial and the values of its fields.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from rayfed.analysis.settings import INAPPLICABLE, estimate
from rayfed.documents import yaml_flow
from rayfed.evidence.arms import arm_and_opponent, arm_names, arm_spec, is_undefended
from rayfed.evidence.attack_results import InferenceResult, Leakage, summarise_inferences, summarise_leakage
from rayfed.evidence.attack_status import count_failed
from rayfed.evidence.findings import explains, findings, worst_state
from rayfed.evidence.methods import closed_forms
from rayfed.evidence.rows import Row, code_given
from rayfed.evidence.training import rounds_after_warm_up, summarise_arms
from rayfed.evidence.verdicts import criterion_of
from rayfed.metrics.measures import JUDGED, MEASURES, extreme_of
from rayfed.metrics.roc import share
from rayfed.reasons import CHANNELS, Reason
from rayfed.report.text.attacks import component_text
from rayfed.report.text.reasons import REASONS, doubt_text, no_results_text, not_run_text
from rayfed.store import exits
from rayfed.store.finding import State
from rayfed.store.folder import RunFolder
from rayfed.store.schemas import OUTCOME_FIELDS, TRIAL_FIELDS, WANT_OF_TIME


def outcomes(folder: RunFolder) -> list[dict[str, Any]]:
    """Return one row for every arm and attack of a run; `attack` is null for an arm that was not attacked.

    For a run that did not finish, only leaks are known, and other results are "not measured".
    """
    scenario, status = folder.scenario(), exits.status(folder)
    over = exits.over(status)
    names = ("rounds", "attacks", "inferences", "privacy")
    rounds, attacks, inferences, privacy = (folder.read_table(name).to_pylist() for name in names)
    arms = arm_names(scenario, rounds, attacks, inferences)
    leaks = summarise_leakage(attacks, arms, {})
    claims, closed = summarise_inferences(inferences, arms), closed_forms(scenario)
    by_leak: dict[tuple[str, str], list[Row]] = {}
    by_claim: dict[tuple[str, str], list[Row]] = {}
    for rows, by in ((attacks, by_leak), (inferences, by_claim)):
        for attacked in rows:
            by.setdefault(_met(attacked), []).append(attacked)
    found = []
    for arm in summarise_arms(arms, scenario, rounds, []):
        row = {
            "arm": arm.name,
            "defences": " + ".join(map(component_text, arm.components)),
            "rounds": arm.rounds,
            "state": "finished" if over else status.get("state"),
            "test_accuracy": arm.accuracy,
            "test_loss": arm.loss,
            **_training_time(sorted((r for r in rounds if r["arm"] == arm.name), key=lambda row: row["round"])),
            "baseline_accuracy": _guessing([r for r in rounds if r["arm"] == arm.name]),
            "bytes_up": arm.bytes_up or None,
            "bytes_down": arm.bytes_down or None,
            "simulated_seconds": arm.simulated.seconds if arm.simulated else None,
            **_guarantee(privacy, arm.name),
        }
        own = [leak for leak in leaks if leak.arm == arm.name]
        met = [_leaked(leak, by_leak[leak.arm, leak.attack], scenario, over) for leak in own]
        met += [
            {"attack": claim.attack, "inferred": _beyond(claim), "inferred_low": _least(claim)}
            for claim in claims
            if claim.arm == arm.name
        ]
        for one in met:
            place = arm.name, one["attack"]
            one["without_result"], one["attacked"] = count_failed(
                [*by_leak.get(place, []), *by_claim.get(place, [])], closed
            )
        found += [row | {"attack": None} | one for one in met or [{}]]
    return with_references(found, scenario, lambda row: ())


def with_references(
    rows: Sequence[Row], scenario: Mapping[str, Any], alike: Callable[[Row], Any]
) -> list[dict[str, Any]]:
    """Return the rows with `pmm` and `verdict`, both relative to an otherwise equal arm without defences."""
    return with_verdicts(with_pmm(rows, scenario, alike), scenario, alike)


def with_verdicts(
    rows: Sequence[Row], scenario: Mapping[str, Any], alike: Callable[[Row], Any]
) -> list[dict[str, Any]]:
    """Return the rows with the column `verdict`, derived from each attack's result.

    An attack works if it leaks on an undefended arm with the same model and the same `alike`, with equal batch size and
    number of images. An arm with defences is inconclusive unless, at each batch size, a working attack has the
    defences' code and explains as many samples as any attack (`rayfed.reasons.NOT_ADAPTIVE`).
    """

    def key(row: Row) -> Any:
        return repr(arm_spec(scenario, row["arm"]).get("model")), alike(row)

    def place(row: Row) -> Any:
        return row.get("trial"), row["arm"]

    def played(row: Row) -> Any:
        return row["attack"], row.get("batch_size"), row.get("images")

    working: dict[Any, set[Any]] = {}
    groups: dict[Any, dict[Any, str]] = {}
    for row in rows:
        answers = groups.setdefault(place(row), {})
        if row.get("result"):
            answers[played(row)] = row["result"]
        if row.get("result") == "leaks" and is_undefended(scenario, row["arm"]):
            working.setdefault(key(row), set()).add(played(row))

    met: dict[Any, list[Row]] = {}
    for row in rows:
        if row.get("result") == "not reconstructed":
            met.setdefault((place(row), row.get("batch_size")), []).append(row)
    unread = {
        place(cell[0]): (
            Reason.NO_ADAPTIVE_ATTACK_WORKS if any(_reads(row, cell) for row in cell) else Reason.NO_ADAPTIVE_ATTACK
        )
        for cell in met.values()
        if not any(_reads(row, cell) and played(row) in working.get(key(row), set()) for row in cell)
    }

    unexplained = {place(row) for row in rows if code_given(row) and row.get("explains") is False}

    def judged(row: Row) -> dict[str, Any]:
        found = _verdict(groups[place(row)], working.get(key(row), set()))
        blind = bool(arm_spec(scenario, row["arm"]).get("defences")) and place(row) in unread
        if row.get("result") != "not reconstructed":
            return {**row, "verdict": "inconclusive" if blind and found == "not reconstructed" else found}
        if blind and found == "not reconstructed":
            why = Reason.ADAPTIVE_NOT_CONVERGED if place(row) in unexplained else unread[place(row)]
            return {**row, "verdict": "inconclusive", "reason": REASONS[why]}
        return {**row, "verdict": found, "reason": None}

    return [judged(row) for row in rows]


def _reads(row: Row, cell: Sequence[Row]) -> bool:
    """Return whether an attacker had the code and explains as many samples as any attack on this arm and batch size."""
    return (
        code_given(row) and bool(row.get("explains")) and row.get("images") == max(r.get("images") or 0 for r in cell)
    )


def _verdict(answers: Mapping[Any, str], working: Collection[Any]) -> State:
    """Return the verdict on an arm from each attack's result there and on undefended arms."""
    states = set(answers.values())
    if State.LEAKS in states:
        return State.LEAKS
    if states == {State.NOTHING_TO_ATTACK}:
        return State.NOTHING_TO_ATTACK
    told = states - {State.NOTHING_TO_ATTACK, INAPPLICABLE} | {answers.get(played) for played in working}
    if not told or not told <= {State.NOT_RECONSTRUCTED, State.INCONCLUSIVE}:
        return State.NOT_MEASURED
    held = working and State.INCONCLUSIVE not in states
    return State.NOT_RECONSTRUCTED if held else State.INCONCLUSIVE


def _training_time(rounds: Sequence[Row]) -> dict[str, float | None]:
    """Return the training seconds and half their 95 % interval, which is None after too few rounds.

    A round in which a process warms up counts as the mean of the others.
    """
    found = estimate([row["actor_seconds"] or 0.0 for row in rounds_after_warm_up(rounds)])
    if found is None:
        return {"train_seconds": None, "train_seconds_half": None}
    half = None if found.high is None else len(rounds) * (found.high - found.mean)
    return {"train_seconds": len(rounds) * found.mean or None, "train_seconds_half": half}


def _guessing(rounds: Sequence[Row]) -> float | None:
    """Return the majority-class accuracy on the test set, from the last evaluated round."""
    return next((row["baseline_accuracy"] for row in reversed(rounds) if row["test_accuracy"] is not None), None)


def for_the_attacker(values: Iterable[float | None], measure: str) -> float | None:
    """Return the value of a measure that shows the most leakage; None without values."""
    known = [v for v in values if v is not None]
    return (min if MEASURES[measure].higher_is_better else max)(known, default=None)


def with_pmm(rows: Sequence[Row], scenario: Mapping[str, Any], alike: Callable[[Row], Any]) -> list[dict[str, Any]]:
    """Return the rows with `pmm`, the accuracy relative to an otherwise equal arm without defences.

    The reference is an arm with the same `alike`, the same other settings and the same opponent.
    """

    def key(row: Row) -> Any:
        return _all_else(scenario, row["arm"]), alike(row)

    accuracy: dict[Any, float] = {}
    for row in rows:
        if is_undefended(scenario, row["arm"]) and row.get("test_accuracy"):
            accuracy.setdefault(key(row), row["test_accuracy"])

    def pmm(row: Row) -> float | None:
        reference, own = accuracy.get(key(row)), row.get("test_accuracy")
        return own / reference if own is not None and reference else None

    return [{**row, "pmm": pmm(row)} for row in rows]


def outcomes_table(rows: Sequence[Row], fields: Sequence[str] = (), trials: bool = False) -> pa.Table:
    """Return outcomes as an Arrow table; with `trials`, the first columns are the trial and the swept fields."""
    swept = [pa.field(path, _type(row[path] for row in rows if row.get(path) is not None)) for path in fields]
    schema = pa.schema([*(TRIAL_FIELDS if trials else []), *swept, *OUTCOME_FIELDS])
    plain = [{**row, **{p: _as(row.get(p), schema.field(p).type) for p in fields}} for row in rows]
    return pa.Table.from_pylist(plain, schema=schema)


def _type(values: Iterable[Any]) -> pa.DataType:
    kinds = {type(value) for value in values}
    if kinds == {bool}:
        return pa.bool_()
    if kinds == {int}:
        return pa.int64()
    return pa.float64() if kinds and kinds <= {int, float} else pa.string()


def _as(value: Any, type: pa.DataType) -> Any:
    return value if value is None or type != pa.string() else yaml_line(value)


def held(value: Any) -> Any:
    """Return the value of a swept field as tables store it: lists and mappings as text."""
    return yaml_line(value) if isinstance(value, list | dict) else value


def yaml_line(value: Any) -> str:
    """Format a value as one line of YAML, as in `--set PATH=VALUE`."""
    if isinstance(value, str):
        return value
    return yaml_flow(value)


def _met(row: Row) -> tuple[str, str]:
    return row["arm"], row["attack"]


def _answer(scenario: Mapping[str, Any], rows: Sequence[Row], finished: bool) -> dict[str, Any]:
    """Return `answer` and `why` of one attack on one arm, from its own rows: a `State`, or "not applicable"."""
    if all(row["status"] == INAPPLICABLE and row.get("reason") not in CHANNELS for row in rows):
        return {"result": INAPPLICABLE}
    closed = closed_forms(scenario)
    arm, criterion = rows[0]["arm"], criterion_of(scenario, rows)
    changed = not is_undefended(scenario, arm)
    found = findings(rows, criterion, undefended=[arm], finished=finished, closed=closed, changed=changed)
    state = worst_state(found)
    explained = code_given(rows[0]) and explains(rows, rows)
    silent = [one for one in found if one.state == state and state in ("inconclusive", "not measured")]
    reasons = []
    for one in silent:
        reasons += [doubt_text(one.doubt)] if one.doubt else []
        reasons += no_results_text(one)
    reasons += [f"{WANT_OF_TIME}: {not_run_text(each)}" for one in silent for each in one.not_run]
    near = max((one for one in found if one.state == state), key=lambda one: one.best or 0.0)
    guessed = None if near.best is None or near.gain is None else near.best - near.gain
    figures = {"max_similarity": near.best, "baseline_similarity": guessed}
    return {"result": state, "reason": "; ".join(dict.fromkeys(reasons)) or None, "explains": explained, **figures}


def _leaked(leak: Leakage, attacks: Sequence[Row], scenario: Mapping[str, Any], finished: bool) -> dict[str, Any]:
    """Return the result of the rows of one reconstruction attack on one arm, summarised in `leak`."""
    first = attacks[0]
    row: dict[str, Any] = {name: first[name] for name in ("attack", "batch_size", "observes", "knowledge")}
    row |= {"images": leak.images, **_answer(scenario, attacks, finished)}
    row |= {"attack_seconds": leak.seconds.mean * leak.seconds.n if leak.seconds else None}
    for metric in JUDGED:
        spread = leak.scores[metric.name]
        row[metric.name] = spread.mean if spread else None
        row[extreme_of(metric.name)] = (spread.high if metric.higher_is_closer else spread.low) if spread else None
    return row


def _beyond(claim: InferenceResult) -> float | None:
    return claim.value.mean - claim.chance.mean if claim.value and claim.chance else None


def _least(claim: InferenceResult) -> float | None:
    """Return the lower end of the 95 % interval of `_beyond`; None if there is no interval.

    The interval is over the candidates of all victims; for answers that are right or wrong, over the victims.
    """
    if not claim.value or not claim.chance:
        return None
    if claim.roc:
        return claim.roc.auc.low - claim.chance.mean
    if claim.metric != "accuracy":
        return None
    return share(round(claim.value.mean * claim.value.n), claim.value.n).low - claim.chance.mean


def _guarantee(privacy: Sequence[Row], arm: str) -> dict[str, Any]:
    """Return an arm's guarantee with the largest epsilon; empty if it has none."""
    mine = [row for row in privacy if row["arm"] == arm and row["epsilon"] is not None]
    weakest = max(mine, key=lambda row: row["epsilon"], default=None)
    if weakest is None:
        return {}
    stated = {f"epsilon_{name}": weakest[name] for name in ("unit", "adjacency", "against")}
    bounds = [row["rero_100"] for row in mine]
    rero = None if None in bounds else max(bounds)
    return {"epsilon": weakest["epsilon"], "delta": weakest["delta"], "rero": rero, **stated}


def _all_else(scenario: Mapping[str, Any], arm: str) -> str:
    """Return an arm's opponent and its settings except defences."""
    own = {
        key: value for key, value in arm_spec(scenario, arm).items() if key not in ("defences", "protection") and value
    }
    return repr((own, arm_and_opponent(scenario, arm)[1]))
