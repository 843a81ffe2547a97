"""What a run comes to, row by row, and settings with their intervals, against figures made by hand and by scipy."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from scipy import stats

from rayfed.core.reasons import Reason
from rayfed.errors import RunError, UserError
from rayfed.evidence.outcomes import compute_outcomes, outcomes_table, with_pmm, yaml_line
from rayfed.evidence.settings import Weakness, estimate_mean, group_settings
from rayfed.evidence.training import rounds_after_warm_up, summarise_arms
from rayfed.evidence.verdicts import run_findings
from rayfed.metrics import roc
from rayfed.metrics.measures import MEASURES, extreme_of, measure_of
from rayfed.report.text.outcomes import outcome_reasons
from rayfed.results.sweep_folder import SweepFolder
from rayfed.store.finding import State
from rayfed.store.folder import RunFolder
from tests.helpers.result_fixtures import BATCH, SIGMA, attacked, outcome, small_run, small_sweep


def test_a_row_for_every_arm_and_attack(tmp_path: Path) -> None:
    folder = small_run(str(tmp_path), {"arms": {"none": [], "noise": ["gaussian"], "idle": ["prune"]}})
    scores = [{"psnr": 10.0, "mse": 0.1, "ssim": 0.2}, {"psnr": 30.0, "mse": 0.001, "ssim": 0.4}]
    rows = [attacked("none", "dlg", i, **s) for i, s in enumerate(scores)]
    rows += [attacked("none", "idlg", 0, psnr=5.0), attacked("noise", "dlg", 0, psnr=math.inf, mse=0.0)]
    folder.write_part("attacks", 0, rows)
    inferred = {"arm": "noise", "round": 0, "victim": 1, "repeat": 0, "attack": "membership", "metric": "auc"}
    folder.write_part("inferences", 0, [inferred | {"value": 0.8, "chance": 0.5, "status": "ok"}])
    found = {(row["arm"], row["attack"]): row for row in compute_outcomes(folder)}
    assert list(found) == [
        ("none", "dlg"), ("none", "idlg"), ("noise", "dlg"), ("noise", "membership"), ("idle", None)
    ]  # fmt: skip
    dlg = found["none", "dlg"]
    assert (dlg["psnr"], dlg["max_psnr"], dlg["min_mse"], dlg["ssim"]) == (20, 30, 0.001, pytest.approx(0.3))
    assert (dlg["images"], dlg["attack_seconds"], dlg["train_seconds"], dlg["bytes_up"]) == (2, 3.0, 2.0, 1000)
    assert found["noise", "dlg"]["psnr"] == 100
    assert found["noise", "membership"]["inferred"] == pytest.approx(0.3)
    assert found["idle", None].get("psnr") is None
    assert found["idle", None]["pmm"] == pytest.approx(0.7 / 0.9)


def test_the_interval_of_an_inference_is_over_its_candidates_or_victims(tmp_path: Path) -> None:
    folder = small_run(str(tmp_path), {"arms": {"none": []}})
    usual = {"arm": "none", "round": 0, "repeat": 0, "chance": 0.5, "status": "ok"}
    scores = [
        {"kind": kind, "sample": i, "score": 1.0 * (i + 3 * (kind == "member"))}
        for kind in ("member", "non-member")
        for i in range(8)
    ]
    auc = usual | {"attack": "membership", "metric": "auc", "victim": 0, "value": 0.8, "scores": scores}
    right = [usual | {"attack": "property", "metric": "accuracy", "victim": i, "value": float(i < 3)} for i in range(4)]
    share_of_class = usual | {"attack": "gan", "metric": "class_share", "victim": 0, "value": 0.9}
    folder.write_part("inferences", 0, [auc, *right, share_of_class])
    low = {row["attack"]: row["inferred_low"] for row in compute_outcomes(folder)}
    by_scores = [s["score"] for s in scores if s["kind"] == "member"], [s["score"] for s in scores[8:]]
    assert low == {
        "membership": pytest.approx(roc.auc(*by_scores).low - 0.5),
        "property": pytest.approx(0.1941 - 0.5, abs=1e-4),  # 3 of 4: 19.4 to 99.4 % (Clopper and Pearson)
        "gan": None,
    }


@pytest.mark.parametrize(
    ("fits", "said"),
    [((0.0, 0.0), "not reconstructed"), ((0.0, 0.9), "inconclusive"), ((0.0, None), "inconclusive")],
)
def test_an_attacker_with_the_code_has_to_explain_every_sample(
    tmp_path: Path, fits: tuple[float | None, ...], said: str
) -> None:
    """On the page and in the outcomes, on which recommendations rest."""
    document = {"arms": {"none": [], "noise": ["gaussian"]}}
    folder = small_run(str(tmp_path), document)
    far = {"psnr": 8.0, "above_baseline": -5.0, "identified": 0.0}
    rows = [attacked("none", "dlg", i, psnr=60.0, fit=0.0) for i in (0, 1)]
    rows += [attacked("noise", "dlg", i, fit=fit, **far) for i, fit in enumerate(fits)]
    folder.write_part("attacks", 0, rows)
    assert [row["verdict"] for row in compute_outcomes(folder)] == ["leaks", said]
    assert [one.state for one in run_findings(document, rows)] == ["leaks", said]


def test_an_attacker_with_the_code_has_to_work_and_to_meet_all_samples_of_a_batch_size(tmp_path: Path) -> None:
    document = {"arms": {"none": [], "noise": ["gaussian"]}}
    far = {"psnr": 8.0, "above_baseline": -5.0, "identified": 0.0}
    blind = [attacked("none", "dlg", i, psnr=60.0, knowledge=[]) for i in (0, 1)]
    blind += [attacked("noise", "dlg", i, knowledge=[], **far) for i in (0, 1)]
    informed = [attacked("none", "weak", i, **far) for i in (0, 1)] + [
        attacked("noise", "weak", i, **far) for i in (0, 1)
    ]
    works = [attacked("none", "weak", 0, psnr=60.0)]
    one = [*works, attacked("noise", "weak", 0, **far)]
    elsewhere = [row | {"batch_size": 8} for row in [*works, attacked("noise", "weak", 0, **far)]]
    for place, more in enumerate((informed, one, elsewhere)):
        folder = small_run(str(tmp_path / str(place)), document)
        folder.write_part("attacks", 0, [*blind, *more])
        assert {row["verdict"] for row in compute_outcomes(folder) if row["arm"] == "noise"} == {"inconclusive"}
        here = [f.state for f in run_findings(document, [*blind, *more]) if (f.arm, f.batch) == ("noise", 2)]
        assert here == ["inconclusive"]


def test_an_undefended_sample_has_to_be_explained(tmp_path: Path) -> None:
    far = {"psnr": 8.0, "above_baseline": -5.0, "identified": 0.0}
    other = small_run(str(tmp_path / "other"), {"arms": {"none": []}})
    other.write_part("attacks", 0, [attacked("none", "dlg", i, fit=0.9, **far) for i in (0, 1)])
    assert [row["verdict"] for row in compute_outcomes(other)] == ["inconclusive"]


def test_of_an_own_defence_nothing_is_said_where_no_attacker_has_its_code(tmp_path: Path) -> None:
    """So that no recommendation rests on attackers who know less."""
    far = {"psnr": 8.0, "above_baseline": -5.0, "identified": 0.0}
    for knowledge, said in ((["defence"], "inconclusive"), (["defence", "code"], "not reconstructed")):
        folder = small_run(str(tmp_path / "-".join(knowledge)), {"arms": {"none": [], "own": ["my_defence:Clip"]}})
        rows = [attacked("none", "dlg", i, psnr=60.0, fit=0.0) for i in (0, 1)]
        rows += [attacked("own", "dlg", i, fit=0.0, knowledge=knowledge, **far) for i in (0, 1)]
        folder.write_part("attacks", 0, rows)
        assert [row["verdict"] for row in compute_outcomes(folder)] == ["leaks", said]


def test_of_a_run_that_broke_off_leaks_alone_are_known(tmp_path: Path) -> None:
    folder = small_run(str(tmp_path), {"arms": {"none": [], "noise": ["gaussian"]}})
    rows = [attacked("none", "dlg", i, psnr=60.0) for i in (0, 1)]
    rows += [attacked("noise", "dlg", i, psnr=8.0, above_baseline=-5.0, identified=0.0) for i in (0, 1)]
    folder.write_part("attacks", 0, rows)
    inferred = {"arm": "noise", "round": 0, "victim": 1, "repeat": 0, "attack": "membership", "metric": "auc"}
    folder.write_part("inferences", 0, [inferred | {"value": 0.5, "chance": 0.5, "status": "ok"}])
    assert [row["verdict"] for row in compute_outcomes(folder)] == ["leaks", "not reconstructed", "not reconstructed"]
    assert all(
        one.evidence("inferred") for one in group_settings(compute_outcomes(folder)) if one.attack == "membership"
    )
    folder.write_text("status.json", json.dumps({"state": "killed"}))
    assert [row["verdict"] for row in compute_outcomes(folder)] == ["leaks", "not measured", "not measured"]
    assert [row["state"] for row in compute_outcomes(folder)] == ["killed"] * 3
    assert not any(
        one.evidence(name) for one in group_settings(compute_outcomes(folder)) for name in ("psnr", "inferred")
    )
    assert all(one.unproven == Weakness.UNFINISHED for one in group_settings(compute_outcomes(folder)))
    folder.write_text("status.json", json.dumps({"state": "interrupted", "rounds_done": 1, "rounds": 1}))
    assert [row["state"] for row in compute_outcomes(folder)] == ["finished"] * 3, "stopped as its last round was over"


def test_updates_on_which_an_attack_broke_off_are_counted(tmp_path: Path) -> None:
    attacks = [{"name": "dlg"}, {"name": "analytic", "label": "rows"}]
    folder = small_run(str(tmp_path), {"attacks": attacks})
    states = ["ok", "diverged", "failed", "not applicable"]
    rows = [
        attacked("none", attack, sample, victim=client, status=status, psnr=9.0)
        for attack in ("dlg", "rows")
        for client, status in enumerate(states)
        for sample in range(2)
    ]
    folder.write_part("attacks", 0, rows)
    found = {row["attack"]: (row["without_result"], row["attacked"]) for row in compute_outcomes(folder)}
    assert found == {"dlg": (2, 4), "rows": (1, 4)}  # a closed form that finds that nothing fits has answered
    assert outcomes_table(compute_outcomes(folder))["without_result"].to_pylist() == [2, 1]


def test_pmm_is_against_the_arm_that_is_alike_but_for_the_defence(tmp_path: Path) -> None:
    many = {"steps": 5}
    arms = {
        "none": {"defences": []},
        "long": {"defences": [], "training": many},
        "noise": {"defences": ["gaussian"]},
        "long noise": {"defences": ["gaussian"], "training": many},
        "sealed": {"defences": [], "protection": {"name": "ckks"}},
        "short noise": {"defences": ["gaussian"], "training": {"steps": 1}},
    }
    found = {row["arm"]: row["pmm"] for row in compute_outcomes(small_run(str(tmp_path), {"arms": arms}))}
    expected = {"none": 1, "long": 1, "noise": 0.7 / 0.9, "long noise": 0.6 / 0.8, "sealed": 0.5 / 0.9}
    assert {arm: found[arm] for arm in expected} == pytest.approx(expected)
    assert found["short noise"] is None


def test_pmm_under_attack_by_clients_is_against_the_same_opponent(tmp_path: Path) -> None:
    opponents = {"flip": {}, "sign": {}}
    scenario = {"arms": {"none": {"defences": []}, "noise": {"defences": ["gaussian"]}}, "opponents": opponents}
    folder = small_run(str(tmp_path), scenario)
    names = ["none vs flip", "none vs sign", "noise vs flip", "noise vs sign"]
    accuracies = [0.8, 0.5, 0.6, 0.2]
    played = [{"arm": a, "round": 0, "test_accuracy": v} for a, v in zip(names, accuracies, strict=True)]
    folder.write_part("rounds", 0, played)
    found = {row["arm"]: row["pmm"] for row in compute_outcomes(folder) if row["rounds"]}
    assert found == pytest.approx(dict(zip(names, [1, 1, 0.75, 0.4], strict=True)))


def test_pmm_over_the_trials_of_a_sweep_needs_equal_values() -> None:
    rows = [
        outcome("none", test_accuracy=0.8, **{BATCH: 1}),
        outcome("none", test_accuracy=0.9, **{BATCH: 8}),
        outcome("noise", test_accuracy=0.4, **{BATCH: 1, SIGMA: 0.1}),
        outcome("noise", test_accuracy=0.45, **{BATCH: 8, SIGMA: 0.1}),
        outcome("noise", test_accuracy=0.45, **{BATCH: 16, SIGMA: 0.1}),
        outcome("noise", test_accuracy=None, **{BATCH: 8, SIGMA: 0.1}),
    ]
    assert [
        row["pmm"] for row in with_pmm(rows, {"arms": {"none": [], "noise": ["gaussian"]}}, lambda row: row[BATCH])
    ] == [1, 1, 0.5, 0.5, None, None]


def test_what_an_attack_did_not_measure_is_not_known(tmp_path: Path) -> None:
    folder = small_run(str(tmp_path), {})
    folder.write_part("attacks", 0, [attacked("none", "ggl", status="not applicable", psnr=None, label_accuracy=None)])
    [row] = compute_outcomes(folder)
    assert row["attack"] == "ggl"
    assert [name for name in MEASURES if row.get(name) is not None and measure_of(name).kind == "leakage"] == []


def test_labels_that_were_given_are_not_found(tmp_path: Path) -> None:
    folder = small_run(str(tmp_path), {})
    given = attacked("none", "told", psnr=9.0, knowledge=["defence", "labels"])
    folder.write_part("attacks", 0, [attacked("none", "blind", psnr=9.0), given])
    assert {row["attack"]: row["label_accuracy"] for row in compute_outcomes(folder)} == {"blind": 1.0, "told": None}


def test_the_weakest_guarantee_counts(tmp_path: Path) -> None:
    folder = small_run(str(tmp_path), {})
    told = {"arm": "none", "rounds": 1, "delta": 1e-5, "unit": "sample"}
    folder.write_part("privacy", 0, [told | {"epsilon": 2.0}, told | {"epsilon": 5.0, "unit": "client"}])
    [row] = compute_outcomes(folder)
    assert (row["epsilon"], row["delta"], row["epsilon_unit"]) == (5.0, 1e-5, "client")


def test_the_worst_is_the_worst_for_who_protects() -> None:
    assert not measure_of("psnr").higher_is_better
    assert measure_of(extreme_of("mse")).higher_is_better
    with pytest.raises(UserError, match="did you mean 'test_accuracy'"):
        measure_of("test_acuracy")


def test_the_interval_is_students() -> None:
    values = [11.0, 12.5, 13.0, 10.0]
    found = estimate_mean([*values, None, math.nan, math.inf])
    assert found is not None
    low, high = stats.t.interval(0.95, 3, loc=11.625, scale=stats.sem(values))
    assert (found.mean, found.low, found.high, found.n) == pytest.approx((11.625, low, high, 4))
    single = estimate_mean([3.0])
    assert single is not None
    assert (single.mean, single.low, single.high, single.n) == (3.0, None, None, 1)
    assert estimate_mean([None, math.nan]) is None


def test_intervals_are_cut_at_what_is_possible() -> None:
    values = {"test_accuracy": (0.05, 0.26), "train_seconds": (0.1, 0.3), "bytes_up": (1.0, 9.0), "ssim": (0.93, 0.99)}
    values |= {"mse": (0.0001, 0.01), "pmm": (0.5, 1.5), "psnr": (99.0, 100.0), "test_loss": (0.1, 2.0)}
    rows = [outcome(repeat=r, seed=r, **{name: both[r] for name, both in values.items()}) for r in range(2)]
    [one] = group_settings(rows)
    for name, estimated in one.measures.items():
        least, most = MEASURES[name].bounds
        assert estimated.low is not None
        assert estimated.high is not None
        assert least <= estimated.low < estimated.mean < estimated.high <= most, name
        assert estimated.cut, name
    accuracy = one.measures["test_accuracy"]
    assert (accuracy.low, accuracy.high) == (0.0, 1.0)
    free = estimate_mean([0.5, 0.52])
    assert free is not None
    assert free.within("test_accuracy") == free


def test_the_training_time_is_one_wherever_it_is_told(tmp_path: Path) -> None:
    folder = small_run(str(tmp_path), {"arms": {"none": []}}, seconds=10.0)
    first = folder.read_table("rounds").to_pylist()[0]
    for round, seconds in ((1, 2.0), (2, 4.0)):
        folder.write_part("rounds", round, [first | {"round": round, "actor_seconds": seconds}])
    [row] = compute_outcomes(folder)
    [arm] = summarise_arms(["none"], {}, folder.read_table("rounds").to_pylist(), [])
    assert arm.actor_seconds is not None
    assert (row["train_seconds"], arm.actor_seconds.mean * row["rounds"]) == (9.0, 9.0)


def test_rounds_in_which_a_process_warms_up_do_not_count() -> None:
    """After a resume too, or where an actor joins later."""
    rounds = [{"round": i, "warming": warming} for i, warming in enumerate([True, False, True, False])]
    assert [row["round"] for row in rounds_after_warm_up(rounds)] == [1, 3]
    assert [row["round"] for row in rounds_after_warm_up(rounds[::2])] == [2], (
        "where all warm up, all but the first count"
    )
    assert [row["round"] for row in rounds_after_warm_up([{"round": 0}, {"round": 1}])] == [1], "of earlier versions"
    assert rounds_after_warm_up(rounds[:1]) == rounds[:1]


def test_settings_gather_the_repeats_of_finished_trials(tmp_path: Path) -> None:
    found = group_settings(small_sweep(tmp_path).outcomes().to_pylist(), [SIGMA])
    assert [(s.arm, s.attack, s.fields.get(SIGMA)) for s in found[:4]] == [
        ("none", "dlg", None), ("none", "idlg", None), ("noise", "dlg", 0.01), ("noise", "idlg", 0.01)
    ]  # fmt: skip
    assert {s.measures["psnr"].n for s in found} == {3}
    assert found[2].title == "noise, sigma 0.01"
    rows = [outcome(psnr=1.0), outcome(psnr=9.0, status="stopped"), outcome(psnr=None, status="failed", attack=None)]
    [only] = group_settings(rows)
    assert only.measures["psnr"].mean == 1


def test_columns_keep_the_type_of_what_is_swept() -> None:
    rows = [outcome(a=1, b=0.5, c="x", d=[8, 8], e=True, f=1), outcome(a=2, b=1, c="y", d="none", e=None, f=0.5)]
    found = outcomes_table(rows, list("abcdef"), trials=True)
    types = [str(found.schema.field(name).type) for name in "abcdef"]
    assert types == ["int64", "double", "string", "string", "bool", "double"]
    assert found["d"].to_pylist() == ["[8, 8]", "none"]


@pytest.mark.parametrize("value", [True, 3, 0.5, [8, 8], {"name": "gaussian", "sigma": 0.1}, None])
def test_a_yaml_line_reads_back(value: object) -> None:
    import yaml

    line = yaml_line(value)
    assert "\n" not in line
    assert yaml.safe_load(line) == value


def test_a_damaged_scenario_is_named(tmp_path: Path) -> None:
    folder = RunFolder.create(str(tmp_path), "broken")
    folder.write_text("scenario.yaml", "name: [unclosed")
    with pytest.raises(RunError, match=r"scenario.yaml' cannot be read"):
        compute_outcomes(folder)
    folder.write_text("scenario.yaml", "just words")
    with pytest.raises(RunError, match="should contain `key: value` pairs, not str"):
        SweepFolder.open(folder.url)


def test_a_reason_explains_a_verdict_and_not_the_result_of_an_attack_that_reconstructed_nothing() -> None:
    row = {"result": State.NOT_RECONSTRUCTED, "verdict": State.INCONCLUSIVE, "doubt": Reason.ADAPTIVE_NOT_CONVERGED}
    explained = {state: outcome_reasons([row], state) for state in State}
    assert [state for state in State if explained[state]] == [State.INCONCLUSIVE]
