"""Outcomes of a run, one row for every arm and attack: leakage, accuracy and cost.

Sweeps, fronts, comparisons, recommendations and exports are computed from these rows. A sweep adds columns with the
trial and the values of its fields.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from rayfed.core.documents import yaml_flow
from rayfed.core.reasons import CHANNELS, Reason
from rayfed.evidence.arms import arm_and_opponent, arm_names, arm_spec, component_text, is_undefended
from rayfed.evidence.attack_results import InferenceResult, Leakage, summarise_inferences, summarise_leakage
from rayfed.evidence.attack_status import count_failed
from rayfed.evidence.findings import compute_findings, explains, worst_state
from rayfed.evidence.methods import closed_forms
from rayfed.evidence.rows import Row, code_given, group_rows
from rayfed.evidence.settings import estimate_mean
from rayfed.evidence.training import ArmSummary, rounds_after_warm_up, summarise_arms
from rayfed.evidence.verdicts import RunEvidence, choose_criterion, read_evidence
from rayfed.metrics.measures import JUDGED, MEASURES, extreme_of
from rayfed.metrics.roc import share
from rayfed.store import exits
from rayfed.store.finding import State
from rayfed.store.folder import RunFolder
from rayfed.store.schemas import INAPPLICABLE, OUTCOME_FIELDS, TRIAL_FIELDS

FINDINGS = "findings"
"""Key of the findings that explain a result, in rows that were not read from a table."""
Alike = Callable[[Row], Any]
"""Returns the values that two arms must share to be compared, from a row of each."""


def compute_outcomes(folder: RunFolder) -> list[dict[str, Any]]:
    """Return one row for every arm and attack of a run; `attack` is null for an arm that was not attacked.

    For a run that did not finish, only leaks are known, and other results are "not measured". The column `reason` is
    text and is missing: `rayfed.report.text.outcomes` adds it.
    """
    scenario, status = folder.scenario(), exits.read_status(folder)
    finished = exits.is_complete(status)
    rounds, attacks, inferences, privacy = (
        folder.read_table(name).to_pylist() for name in ("rounds", "attacks", "inferences", "privacy")
    )
    arms = arm_names(scenario, rounds, attacks, inferences)
    by_attack = group_rows([*attacks, *inferences], "arm", "attack")
    results: dict[str, list[dict[str, Any]]] = {}
    leaking_rows = group_rows(attacks, "arm", "attack")
    for leak in summarise_leakage(attacks, arms, {}):
        rows = leaking_rows[leak.arm, leak.attack]
        results.setdefault(leak.arm, []).append(_reconstruction(leak, rows, scenario, finished))
    for claim in summarise_inferences(inferences, arms):
        results.setdefault(claim.arm, []).append(_inference(claim))
    closed = closed_forms(scenario)
    found = []
    for arm in summarise_arms(arms, scenario, rounds, []):
        mine = sorted((row for row in rounds if row["arm"] == arm.name), key=lambda row: row["round"])
        common = {
            "state": "finished" if finished else status.get("state"),
            **_training(arm, mine),
            **_guarantee(privacy, arm.name),
            "attack": None,
        }
        for result in results.get(arm.name, []):
            without_result, attacked = count_failed(by_attack[arm.name, result["attack"]], closed)
            found.append(common | result | {"without_result": without_result, "attacked": attacked})
        if arm.name not in results:
            found.append(common)
    return _with_run_verdicts(with_references(found, scenario, lambda row: ()), read_evidence(folder))


def _with_run_verdicts(rows: Sequence[Row], evidence: RunEvidence) -> list[dict[str, Any]]:
    """Return the rows with the verdicts of the run, and with the reasons why they are inconclusive.

    Without a defence, results that are not leaks show only that the attacks may be weak, so they stay inconclusive.
    """
    states = {each.arm: each.state for each in evidence.verdicts if not is_undefended(evidence.scenario, each.arm)}
    inconclusive = [each for each in evidence.findings if each.state == State.INCONCLUSIVE]
    doubts: dict[Hashable, Reason | None] = {(each.arm, each.batch): each.reason for each in inconclusive}
    judged = []
    for row in rows:
        own = {**row, "verdict": states.get(row["arm"], row["verdict"])}
        if row.get("result") == State.NOT_RECONSTRUCTED and row.get("doubt"):
            own["doubt"] = doubts.get((row["arm"], row.get("batch_size"))) or row["doubt"]
        judged.append(own)
    return judged


def _training(arm: ArmSummary, rounds: Sequence[Row]) -> dict[str, Any]:
    """Return the columns on an arm's training."""
    return {
        "arm": arm.name,
        "defences": " + ".join(map(component_text, arm.components)),
        "rounds": arm.rounds,
        "test_accuracy": arm.accuracy,
        "test_loss": arm.loss,
        **_training_time(rounds),
        "baseline_accuracy": _majority_accuracy(rounds),
        "bytes_up": arm.bytes_up or None,
        "bytes_down": arm.bytes_down or None,
        "simulated_seconds": arm.simulated.seconds if arm.simulated else None,
    }


def with_references(rows: Sequence[Row], scenario: Mapping[str, Any], alike: Alike) -> list[dict[str, Any]]:
    """Return the rows with `pmm` and `verdict`, both relative to an otherwise equal arm without defences."""
    return with_verdicts(with_pmm(rows, scenario, alike), scenario, alike)


def with_verdicts(rows: Sequence[Row], scenario: Mapping[str, Any], alike: Alike) -> list[dict[str, Any]]:
    """Return the rows with the column `verdict`, derived from each attack's result.

    An attack works if it leaks on an undefended arm with the same model and the same `alike`, with equal batch size and
    number of images. An arm with defences is inconclusive unless, at each batch size, a working attack has the
    defences' code and explains as many samples as any attack (`rayfed.core.reasons.NOT_ADAPTIVE`).
    """
    models = {arm: repr(arm_spec(scenario, arm).get("model")) for arm in {row["arm"] for row in rows}}
    keys = [(models[row["arm"]], alike(row)) for row in rows]
    works_bare: dict[Any, set[Hashable]] = {}
    results: dict[Hashable, dict[Hashable, str]] = {}
    for row, key in zip(rows, keys, strict=True):
        of_arm = results.setdefault(_trial_arm(row), {})
        if row.get("result"):
            of_arm[_attack_key(row)] = row["result"]
        if row.get("result") == State.LEAKS and is_undefended(scenario, row["arm"]):
            works_bare.setdefault(key, set()).add(_attack_key(row))
    working = [works_bare.get(key, set()) for key in keys]
    not_adaptive = _arms_without_adaptive_attack(rows, working)
    found = []
    for row, attacks in zip(rows, working, strict=True):
        state, reason = _verdict(results[_trial_arm(row)], attacks), None
        if state == State.NOT_RECONSTRUCTED and arm_spec(scenario, row["arm"]).get("defences"):
            reason = not_adaptive.get(_trial_arm(row))
        judged = {**row, "verdict": State.INCONCLUSIVE if reason else state}
        if row.get("result") == State.NOT_RECONSTRUCTED:
            judged |= {"doubt": reason, "reason": None, FINDINGS: ()}
        found.append(judged)
    return found


def _trial_arm(row: Row) -> Hashable:
    return row.get("trial"), row["arm"]


def _attack_key(row: Row) -> Hashable:
    return row["attack"], row.get("batch_size"), row.get("images")


def _arms_without_adaptive_attack(
    rows: Sequence[Row], working: Sequence[Collection[Hashable]]
) -> dict[Hashable, Reason]:
    """Return the trials and arms with a batch size at which no working attack is adaptive, with the reason.

    `working` has the attacks that work on an undefended arm that can be compared with each row.
    """
    cells: dict[tuple[Hashable, Any], list[tuple[Row, bool]]] = {}
    for row, attacks in zip(rows, working, strict=True):
        if row.get("result") == State.NOT_RECONSTRUCTED:
            cell = cells.setdefault((_trial_arm(row), row.get("batch_size")), [])
            cell.append((row, _attack_key(row) in attacks))
    found: dict[Hashable, Reason] = {}
    for (place, _), cell in cells.items():
        most = max(row.get("images") or 0 for row, _ in cell)
        adaptive = [works for row, works in cell if _is_adaptive(row, most)]
        if not any(adaptive):
            found[place] = Reason.NO_ADAPTIVE_ATTACK_WORKS if adaptive else Reason.NO_ADAPTIVE_ATTACK
    for row in rows:
        if _trial_arm(row) in found and code_given(row) and row.get("explains") is False:
            found[_trial_arm(row)] = Reason.ADAPTIVE_NOT_CONVERGED
    return found


def _is_adaptive(row: Row, images: int) -> bool:
    """Return whether an attacker had the code and explains all images."""
    return code_given(row) and bool(row.get("explains")) and row.get("images") == images


def _verdict(results: Mapping[Hashable, str], working: Collection[Hashable]) -> State:
    """Return the verdict on an arm from each attack's result there and on undefended arms."""
    states: set[str | None] = set(results.values())
    if State.LEAKS in states:
        return State.LEAKS
    if states == {State.NOTHING_TO_ATTACK}:
        return State.NOTHING_TO_ATTACK
    decisive = states - {State.NOTHING_TO_ATTACK, INAPPLICABLE}
    decisive |= {results.get(attack) for attack in working}
    if not decisive or not decisive <= {State.NOT_RECONSTRUCTED, State.INCONCLUSIVE}:
        return State.NOT_MEASURED
    if working and State.INCONCLUSIVE not in states:
        return State.NOT_RECONSTRUCTED
    return State.INCONCLUSIVE


def _training_time(rounds: Sequence[Row]) -> dict[str, float | None]:
    """Return the training seconds and half their 95 % interval, which is None after too few rounds.

    A round in which a process warms up counts as the mean of the others.
    """
    found = estimate_mean([row["actor_seconds"] or 0.0 for row in rounds_after_warm_up(rounds)])
    if found is None:
        return {"train_seconds": None, "train_seconds_half": None}
    half = None if found.high is None else len(rounds) * (found.high - found.mean)
    return {"train_seconds": len(rounds) * found.mean or None, "train_seconds_half": half}


def _majority_accuracy(rounds: Sequence[Row]) -> float | None:
    """Return the majority-class accuracy on the test set, from the last evaluated round."""
    evaluated = [row["baseline_accuracy"] for row in rounds if row["test_accuracy"] is not None]
    return evaluated[-1] if evaluated else None


def select_most_leaking(values: Iterable[float | None], measure: str) -> float | None:
    """Return the value of a measure that shows the most leakage; None without values."""
    known = [v for v in values if v is not None]
    return (min if MEASURES[measure].higher_is_better else max)(known, default=None)


def with_pmm(rows: Sequence[Row], scenario: Mapping[str, Any], alike: Alike) -> list[dict[str, Any]]:
    """Return the rows with `pmm`, the accuracy relative to an otherwise equal arm without defences.

    The reference is an arm with the same `alike`, the same other settings and the same opponent.
    """
    keys = [(_all_else(scenario, row["arm"]), alike(row)) for row in rows]
    references: dict[Any, float] = {}
    for row, key in zip(rows, keys, strict=True):
        if is_undefended(scenario, row["arm"]) and row.get("test_accuracy"):
            references.setdefault(key, row["test_accuracy"])
    found = []
    for row, key in zip(rows, keys, strict=True):
        accuracy, reference = row.get("test_accuracy"), references.get(key)
        pmm = accuracy / reference if accuracy is not None and reference else None
        found.append({**row, "pmm": pmm})
    return found


def outcomes_table(rows: Sequence[Row], fields: Sequence[str] = (), trials: bool = False) -> pa.Table:
    """Return outcomes as an Arrow table; with `trials`, the first columns are the trial and the swept fields."""
    swept = []
    for path in fields:
        values = [row[path] for row in rows if row.get(path) is not None]
        swept.append(pa.field(path, _type(values)))
    schema = pa.schema([*(TRIAL_FIELDS if trials else []), *swept, *OUTCOME_FIELDS])
    texts = [field.name for field in swept if field.type == pa.string()]
    converted = []
    for row in rows:
        lines = {path: None if row.get(path) is None else yaml_line(row[path]) for path in texts}
        converted.append({**row, **lines})
    return pa.Table.from_pylist(converted, schema=schema)


def _type(values: Iterable[Any]) -> pa.DataType:
    kinds = {type(value) for value in values}
    if kinds == {bool}:
        return pa.bool_()
    if kinds == {int}:
        return pa.int64()
    return pa.float64() if kinds and kinds <= {int, float} else pa.string()


def table_value(value: Any) -> Any:
    """Return the value of a swept field as tables store it: lists and mappings as text."""
    return yaml_line(value) if isinstance(value, list | dict) else value


def yaml_line(value: Any) -> str:
    """Format a value as one line of YAML, as in `--set PATH=VALUE`."""
    if isinstance(value, str):
        return value
    return yaml_flow(value)


def _result(scenario: Mapping[str, Any], rows: Sequence[Row], finished: bool) -> dict[str, Any]:
    """Return the `State` of one attack on one arm, from its own rows, or "not applicable", with its evidence."""
    if all(row["status"] == INAPPLICABLE and row.get("reason") not in CHANNELS for row in rows):
        return {"result": INAPPLICABLE}
    arm = rows[0]["arm"]
    found = compute_findings(
        rows,
        choose_criterion(scenario, rows),
        undefended=[arm],
        finished=finished,
        closed=closed_forms(scenario),
        changed=not is_undefended(scenario, arm),
    )
    state = worst_state(found)
    worst = [one for one in found if one.state == state]
    silent = worst if state in (State.INCONCLUSIVE, State.NOT_MEASURED) else []
    near = max(worst, key=lambda one: one.best or 0.0)
    return {
        "result": state,
        "doubt": next((one.reason for one in silent if one.reason), None),
        FINDINGS: tuple(silent),
        "explains": code_given(rows[0]) and explains(rows, rows),
        "max_similarity": near.best,
        "baseline_similarity": near.baseline,
    }


def _reconstruction(
    leak: Leakage, attacks: Sequence[Row], scenario: Mapping[str, Any], finished: bool
) -> dict[str, Any]:
    """Return the result of the rows of one reconstruction attack on one arm, summarised in `leak`."""
    first = attacks[0]
    row: dict[str, Any] = {name: first[name] for name in ("attack", "batch_size", "observes", "knowledge")}
    row |= {"images": leak.images, **_result(scenario, attacks, finished)}
    row["attack_seconds"] = leak.seconds.mean * leak.seconds.n if leak.seconds else None
    for metric in JUDGED:
        spread, extreme = leak.scores[metric.name], extreme_of(metric.name)
        row[metric.name] = row[extreme] = None
        if spread:
            row[metric.name] = spread.mean
            row[extreme] = spread.high if metric.higher_is_closer else spread.low
    return row


def _inference(claim: InferenceResult) -> dict[str, Any]:
    """Return the result of one inference attack on one arm."""
    inferred = claim.value.mean - claim.chance.mean if claim.value and claim.chance else None
    return {"attack": claim.attack, "inferred": inferred, "inferred_low": _inferred_low(claim)}


def _inferred_low(claim: InferenceResult) -> float | None:
    """Return the lower end of the 95 % interval of `inferred`; None if there is no interval.

    The interval is over the candidates of all victims; for results that are right or wrong, over the victims.
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
