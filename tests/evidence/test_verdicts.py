"""Verdicts: the state of each arm of any run, computed once, with the next step that follows."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayfed.core.reasons import Reason
from rayfed.errors import UserError
from rayfed.evidence.membership import Identification, Roc
from rayfed.evidence.next_step import NextStep, Step, decide_next_step
from rayfed.evidence.outcomes import compute_outcomes, with_verdicts
from rayfed.evidence.verdicts import choose_criterion, collect_evidence, find_closest, read_evidence, write_verdicts
from rayfed.metrics.roc import Estimate
from rayfed.report.export.redaction import redact
from rayfed.report.export.tables import export_table
from rayfed.report.gate import GatedRun
from rayfed.report.html.run import write_report
from rayfed.results.loading import Run, open_results
from rayfed.runs.recorder import RunRecorder
from rayfed.store import exits
from rayfed.store.finding import Finding, Missing, State
from rayfed.store.lease import hold_lease
from rayfed.store.schemas import UNPLAYED, WANT_OF_TIME
from rayfed.store.typed import rows_from, table_from
from rayfed.update import Masked
from tests.helpers.result_fixtures import attacked, small_run

ARMS = {"bare": [], "noise": [{"name": "gaussian", "sigma": 0.1}], "masks": {"protection": "secure_aggregation"}}
SCENARIO = {"arms": ARMS, "attacks": [{"name": "dlg"}]}


def row(arm: str, psnr: float | None, attack: str = "dlg", **more: Any) -> dict[str, Any]:
    gain = None if psnr is None else psnr - 12.0
    usual = {"above_baseline": gain, "identified": 1.0, "true_label": 3, "distortion": 0.0, "message": ""}
    return attacked(arm, attack, psnr=psnr, **{**usual, **more})


def hidden(arm: str) -> dict[str, Any]:
    return row(arm, None, status="not applicable", reason=Masked.reason, message=Masked.unreadable, label_accuracy=None)


def of(*rows: dict[str, Any], scenario: dict[str, Any] = SCENARIO, **more: Any) -> dict[str, Any]:
    return {verdict.arm: verdict for verdict in collect_evidence(scenario, rows, [], **more).verdicts}


def test_a_state_for_each_arm_of_any_run() -> None:
    told = of(row("bare", 30.0), row("noise", 9.0), hidden("masks"))
    assert {arm: verdict.state for arm, verdict in told.items()} == {
        "bare": "leaks", "noise": "not reconstructed", "masks": "nothing to attack",
    }  # fmt: skip
    assert [one.message for one in told["masks"].findings[0].no_results] == [Masked.unreadable]
    assert of(row("bare", 30.0))["noise"].state == "not measured"


def step_of(rows: list[dict[str, Any]], scenario: dict[str, Any] = SCENARIO) -> NextStep | None:
    return decide_next_step(collect_evidence(scenario, rows, []))


def test_the_table_of_verdicts() -> None:
    rows = [row("bare", 30.0), row("bare", 20.0, batch_size=4, label_accuracy=None), row("noise", 9.0)]
    evidence = collect_evidence(SCENARIO, rows, [])
    table = table_from(evidence.rows, Finding)
    assert rows_from(table, Finding) == evidence.rows
    bare, larger, noise, masks = table.to_pylist()
    assert [bare[name] for name in ("arm", "batch_size", "verdict", "metric")] == ["bare", 2, "leaks", "psnr"]
    assert [bare[name] for name in ("max_similarity", "above_baseline", "attack")] == [30.0, 18.0, "dlg"]
    assert bare["knowledge"] == ["defence", "code"]
    assert [bare[name] for name in ("leaked", "samples", "labels_share", "labels_commonest")] == [1, 1, 1.0, 1.0]
    assert (larger["batch_size"], larger["labels_share"], larger["labels_commonest"]) == (4, None, None)
    assert (noise["verdict"], noise["above_baseline"], bare["reason"]) == ("not reconstructed", -3.0, None)
    assert (masks["verdict"], masks["batch_size"], masks["reason"]) == (
        "not measured",
        None,
        "no_reconstruction_attack",
    )
    [unfinished] = collect_evidence({"arms": {"bare": []}}, [], [], finished=False).rows
    assert unfinished.unfinished


def test_verdicts_are_computed_once_and_read_from_the_table(tmp_path: Path) -> None:
    folder = small_run(str(tmp_path), SCENARIO)
    folder.write_part("attacks", 0, [row("bare", 30.0), row("noise", 9.0)])
    write_verdicts(folder)
    known = read_evidence(folder)
    assert len(folder.read_table("verdicts"))
    folder.write_part("verdicts", 0, table_from([replace(each, state=State.LEAKS) for each in known.rows], Finding))
    assert [verdict.state for verdict in read_evidence(folder).verdicts][:2] == [State.LEAKS, State.LEAKS]
    folder.remove_table("verdicts")
    assert read_evidence(folder).rows == known.rows


def test_verdicts_are_stored_when_a_run_ends_or_stops_and_removed_when_it_goes_on(tmp_path: Path) -> None:
    folder = small_run(str(tmp_path), SCENARIO)
    folder.write_part("attacks", 0, [row("bare", 30.0), row("noise", 9.0)])
    with suppress(KeyboardInterrupt), RunRecorder(folder, "training", 2).recording(1, reports=False):
        raise KeyboardInterrupt
    stopped = {verdict.arm: verdict.state for verdict in read_evidence(folder).verdicts}
    assert (stopped["bare"], stopped["noise"]) == (State.LEAKS, State.NOT_MEASURED)
    assert len(folder.read_table("verdicts")) == len(read_evidence(folder).rows)
    with RunRecorder(folder, "training", 2).recording(1, reports=False):
        assert len(folder.read_table("verdicts")) == 0
    ended = {verdict.arm: verdict.state for verdict in read_evidence(folder).verdicts}
    assert ended["noise"] == State.NOT_RECONSTRUCTED
    assert len(folder.read_table("verdicts")) == 3


def test_a_redacted_copy_has_the_verdicts_of_the_run(tmp_path: Path) -> None:
    """Its rows have neither the baselines of columns nor the names of models, which verdicts depend on."""
    models = {"bare": {"model": {"name": "m.py:A"}}, "noise": {"model": {"name": "m.py:B"}, "defences": ARMS["noise"]}}
    folder = small_run(str(tmp_path), {"arms": models, "metrics": {"names": ["feature_accuracy"]}})
    columns = [
        {"name": name, "found": name == "weight_of_patient", "guess": 0.1} for name in ("height", "weight_of_patient")
    ]
    parts = {"parts_recovered": 0.5, "parts_baseline": 0.1, "parts_evidence": -1.0, "columns": columns}
    kept = {"feature_accuracy": 0.5, "identified": 0.0, "above_baseline": -0.1}
    read = [row("bare", None, victim=victim, **(kept | parts)) for victim in range(8)]
    folder.write_part("attacks", 0, [*read, row("noise", None, **kept)])
    write_verdicts(folder)
    run = open_results(folder.url)
    assert isinstance(run, Run)
    told = {one.arm: one.state for one in run.verdicts()}
    assert told == {"bare": "leaks", "noise": "inconclusive"}
    with redact(run) as copy:
        verdicts = read_evidence(copy).verdicts
        assert {one.arm: one.state for one in verdicts} == told
        assert verdicts[0].findings[0].part.columns == (("column 2", 1.0, None),)
        write_report(copy, redacted=True)
        assert "weight_of_patient" not in json.dumps(copy.read_table("verdicts").to_pylist())


def test_the_exported_table_has_lists_and_structs_as_json(tmp_path: Path) -> None:
    folder = small_run(str(tmp_path), SCENARIO)
    parts = {"parts_recovered": 0.5, "parts_baseline": 0.1, "parts_evidence": 50.0}
    folder.write_part("attacks", 0, [row("bare", 30.0, **parts)])
    [bare, *_] = csv.DictReader(StringIO(export_table(open_results(folder.url), "csv", "verdicts")))
    assert json.loads(bare["parts_by"]) == {"attack": "dlg", "knowledge": ["defence", "code"]}
    assert json.loads(bare["knowledge"]) == ["defence", "code"]


def test_a_killed_run_is_not_running_after_a_driver_that_could_not_continue(tmp_path: Path) -> None:
    folder = small_run(str(tmp_path), SCENARIO)
    folder.write_part("attacks", 0, [row("bare", 30.0)])
    folder.write_text("status.json", json.dumps({"state": "running", "rounds_done": 1, "rounds": 2}))
    with suppress(UserError), hold_lease(folder, print):
        assert exits.read_status(folder)["state"] == "running"
        raise UserError("the scenario was edited")
    assert exits.read_status(folder)["state"] == "killed"
    write_report(folder)
    assert folder.read_table("verdicts")["unfinished"].to_pylist() == [False, True, True]


def test_outcomes_give_the_reason_of_the_verdict(tmp_path: Path) -> None:
    folder = small_run(str(tmp_path), SCENARIO)
    folder.write_part("attacks", 0, [row("bare", 30.0), row("noise", 9.0, fit=None)])
    [finding] = [one for one in read_evidence(folder).findings if one.arm == "noise"]
    [outcome] = [one for one in compute_outcomes(folder) if one["arm"] == "noise"]
    assert (outcome["result"], outcome["verdict"]) == ("not reconstructed", "inconclusive")
    assert outcome["doubt"] == finding.reason == Reason.ADAPTIVE_NOT_COMPARED


def _renamed_state(table: pa.Table) -> pa.Table:
    place = table.schema.get_field_index("verdict")
    return table.set_column(place, table.schema.field(place), pa.array(["state of a later version"] * len(table)))


@pytest.mark.parametrize(
    "change",
    [
        lambda table: table.slice(0, 1),
        lambda table: table.slice(0, 0),
        lambda table: table.append_column("column_of_a_later_version", pa.array([1] * len(table))),
        _renamed_state,
        None,
    ],
)
def test_verdicts_are_computed_where_the_table_is_damaged_or_of_another_version(tmp_path: Path, change: Any) -> None:
    folder = small_run(str(tmp_path), SCENARIO)
    folder.write_part("attacks", 0, [row("bare", 30.0), row("noise", 9.0)])
    write_verdicts(folder)
    known = read_evidence(folder).rows
    [name] = folder.parts("verdicts")
    path = Path(folder.root, name)
    if change is None:
        path.write_bytes(b"damaged")
    else:
        pq.write_table(change(pq.read_table(path)), path)
    assert read_evidence(folder).rows == known
    write_report(folder)
    assert rows_from(folder.read_table("verdicts"), Finding) == known


def test_verdicts_of_an_earlier_stop_do_not_speak_of_later_rounds(tmp_path: Path) -> None:
    """A driver that resumes a run may die before it removes the table, or after a reader wrote it again."""
    folder = small_run(str(tmp_path), SCENARIO)
    folder.write_part("attacks", 0, [row("bare", 30.0), row("noise", 9.0)])
    write_verdicts(folder)
    finished = folder.read_table("verdicts")
    folder.write_text("status.json", json.dumps({"state": "killed", "rounds_done": 1, "rounds": 2}))
    assert {one.arm: one.state for one in read_evidence(folder).verdicts}["noise"] == State.NOT_MEASURED
    folder.write_text("status.json", json.dumps({"state": "finished", "rounds_done": 2, "rounds": 2}))
    folder.write_part("attacks", 1, [row("bare", 30.0, round=1), row("noise", 30.0, round=1)])
    assert {one.arm: one.state for one in read_evidence(folder).verdicts}["noise"] == State.LEAKS
    folder.write_part("verdicts", 0, finished)
    write_report(folder)
    assert {one["verdict"] for one in folder.read_table("verdicts").to_pylist()} == {"leaks", "not measured"}


def test_a_run_of_texts_of_which_nothing_is_measured_speaks_of_texts() -> None:
    scenario = SCENARIO | {"metrics": {"names": ["token_accuracy"]}}
    assert choose_criterion(scenario, []).noun == "text"
    assert choose_criterion(SCENARIO, []).noun == "image"


def test_a_run_has_its_verdicts_as_a_table(tmp_path: Path) -> None:
    folder = small_run(str(tmp_path), SCENARIO)
    folder.write_part("attacks", 0, [row("bare", 30.0), row("noise", 9.0)])
    run = open_results(folder.url)
    assert isinstance(run, Run)
    found = [(one["arm"], one["verdict"]) for one in run.table("verdicts").to_pylist()]
    assert found == [(one.arm, one.state) for one in run.verdicts()]


@pytest.mark.parametrize(
    ("status", "known"),
    [
        ({"state": "interrupted", "rounds": 2, "rounds_done": 2}, True),
        ({"state": "interrupted", "rounds": 2, "rounds_done": 1}, False),
        ({"state": "killed", "rounds": 2, "rounds_done": 2}, False),
        ({"state": "failed", "rounds": 2, "rounds_done": 2}, False),
        ({"state": "finished"}, True),
    ],
)
def test_table_outcomes_and_gate_agree_on_a_run_that_was_stopped(
    tmp_path: Path, status: dict[str, Any], known: bool
) -> None:
    folder = small_run(str(tmp_path), SCENARIO)
    folder.write_part("attacks", 0, [row("bare", 30.0), row("noise", 9.0)])
    folder.write_text("status.json", json.dumps(status))
    state = "not reconstructed" if known else "not measured"
    run = open_results(folder.url)
    assert isinstance(run, Run)
    assert {one.arm: one.state for one in run.verdicts()}["noise"] == state
    assert {one["arm"]: one["verdict"] for one in compute_outcomes(folder)}["noise"] == state
    assert GatedRun(folder, folder.url).evidence.finished == known


def test_attacks_that_fail_without_a_defence_too_say_nothing_of_it() -> None:
    told = of(row("bare", 9.0), row("noise", 8.0))
    assert (told["noise"].state, told["bare"].state) == ("inconclusive", "not reconstructed")
    [alone] = of(row("noise", 8.0), scenario={"arms": {"noise": ARMS["noise"]}}).values()
    assert alone.state == "inconclusive"
    other = SCENARIO | {"arms": {"bare": [], "deep": {"model": {"hidden": [9]}, "defences": ["prune"]}}}
    assert of(row("bare", 30.0), row("deep", 8.0), scenario=other)["deep"].state == "inconclusive"


def test_more_iterations_are_advised_if_a_search_did_not_converge() -> None:
    cut = [row("bare", 30.0, fit=0.0), row("noise", 8.0, fit=0.9)]
    step = step_of(cut)
    assert step == NextStep(Step.SEARCH_LONGER)
    assert step_of([]) is None


@pytest.mark.parametrize("why", [Reason.BUFFERS_NOT_SOLVED, Reason.UNDECLARED, Reason.DECLARATION_WRONG])
def test_more_time_is_not_the_next_step_where_an_attacker_could_not_use_what_it_saw(why: Reason) -> None:
    rows = [row("bare", 30.0), row("noise", 9.0, reason=why)]
    assert step_of(rows) == NextStep(Step.REMOVE_REASON, ("noise",), why)


@pytest.mark.parametrize(("fit", "helps"), [(0.9, True), (2e-6, False)])
def test_more_iterations_are_the_next_step_first_where_a_search_does_not_end_without_a_defence(
    fit: float, helps: bool
) -> None:
    rows = [
        row("bare", 30.0 if fit < 0.1 else 9.0, fit=fit),
        row("noise", 9.0, fit=None, knowledge=["defence", "code"]),
    ]
    assert of(*rows)["noise"].reasons == {Reason.ADAPTIVE_NOT_COMPARED}
    expected = NextStep(Step.SEARCH_LONGER, nothing_leaks=True) if helps else NextStep(Step.USE_ACCOUNT, ("noise",))
    assert step_of(rows) == expected


def labelled(arm: str, psnr: float, *found: float) -> list[dict[str, Any]]:
    """One batch of each client, of two classes, and the share of its labels that were found."""
    return [row(arm, psnr, victim=i, true_label=i % 2, label_accuracy=share) for i, share in enumerate(found)]


def test_an_arm_whose_labels_are_recovered_says_so_whatever_its_state() -> None:
    scenario: dict[str, Any] = {"arms": {"bare": [], "noise": ARMS["noise"], "prune": ["prune"]}}
    rows = [*labelled("bare", 30.0, 1, 1), *labelled("noise", 9.0, 1, 1), *labelled("prune", 9.0, 0, 1)]
    told = {verdict.arm: verdict for verdict in collect_evidence(scenario, rows, []).verdicts}
    labels = {arm: verdict.findings[0].labels for arm, verdict in told.items()}
    assert {arm: one.beyond for arm, one in labels.items() if one} == {"bare": True, "noise": True, "prune": False}
    assert labels["noise"] is not None
    assert labels["noise"].by_chance


def test_more_time_is_the_next_step_for_attacks_that_were_left_out() -> None:
    both = [row("bare", 30.0), row("noise", 9.0)]
    scenario = {**SCENARIO, "arms": {"bare": [], "noise": ARMS["noise"]}}
    assert step_of(both, scenario) == NextStep(Step.ATTACK_LONGER, ("noise",))
    late = row("noise", None, "tag", status=UNPLAYED, message=WANT_OF_TIME)
    assert step_of([*both, late], scenario) == NextStep(Step.RUN_LEFT_OUT)
    leaks = [row("bare", 30.0), row("noise", 30.0), late]
    assert step_of(leaks, scenario) == NextStep(Step.CHANGE_DEFENCE), "as more time would"


def test_the_next_step_for_a_near_reconstruction_is_to_look_at_it() -> None:
    """If nothing leaks without a defence, longer searches come first."""
    like = row("noise", 20.0, above_baseline=3.0, identified=0.0)
    for bare, shown in ((30.0, True), (9.0, False)):
        step = step_of([row("bare", bare), like])
        assert (step == NextStep(Step.COMPARE_RECONSTRUCTIONS, ("noise",))) == shown


def test_targets_read_off_nearer_than_the_median_are_told_as_labels_are() -> None:
    sought = {"label_accuracy": None, "target_baseline": 0.5}
    rows = [row("bare", 30.0), row("noise", 9.0, target_error=0.1, **sought)]
    assert [one.targets_beyond for one in collect_evidence(SCENARIO, rows, []).findings] == [False, True]


def test_samples_that_did_not_leak_acquit_no_defence() -> None:
    bare = [row("bare", 30.0, victim=0), row("bare", 9.0, victim=1)]
    assert of(*bare, row("noise", 9.0, victim=1))["noise"].state == "not measured"
    assert of(*bare, row("noise", 9.0, victim=0))["noise"].state == "not reconstructed"


def test_an_attack_that_failed_leaves_even_a_bare_arm_unmeasured() -> None:
    raised = row("bare", None, "dlg", status="failed", message="ValueError: no")
    assert of(raised, row("bare", 9.0, "tag"))["bare"].state == "not measured"


def test_of_unlike_batches_the_weakest_statement_counts() -> None:
    for reason, state in ((Reason.UNDECLARED, "not measured"), (Reason.BUFFERS_NOT_SOLVED, "inconclusive")):
        open_still = row("noise", 9.0, batch_size=8, reason=reason)
        verdicts = of(row("bare", 30.0), row("bare", 30.0, batch_size=8), row("noise", 9.0), open_still)
        assert verdicts["noise"].state == state


def test_a_federations_protection_is_every_arms() -> None:
    scenario = {"federation": {"protection": "ckks"}, "arms": {"a": []}}
    assert of(row("a", 9.0), scenario=scenario)["a"].state == "inconclusive"


def test_what_is_near_acquits_no_defence_though_another_sample_is_as_near() -> None:
    told = of(row("bare", 30.0), row("noise", 17.0, identified=0.0))
    assert told["noise"].state == "inconclusive"
    assert told["noise"].reasons == {Reason.CLOSER_TO_ANOTHER_SAMPLE}


def test_what_was_not_set_beside_a_guess_is_not_measured() -> None:
    told = of(row("bare", 30.0, above_baseline=None), row("noise", 9.0, above_baseline=None))
    assert {verdict.state for verdict in told.values()} == {"not measured"}
    assert [one.missing for one in told["bare"].findings[0].no_results] == [Missing.COMPARISON]


def test_a_run_that_did_not_end_says_only_what_leaked() -> None:
    told = of(row("bare", 30.0), row("noise", 9.0), hidden("masks"), finished=False)
    assert [told[arm].state for arm in ARMS] == ["leaks", "not measured", "not measured"]


def test_the_threshold_is_the_scenarios() -> None:
    assert of(row("bare", 30.0), scenario=SCENARIO | {"metrics": {"success": {"psnr": 31}}})["bare"].state != "leaks"


def test_labels_that_were_given_were_not_found() -> None:
    told = of(row("bare", 30.0, knowledge=["labels"], label_accuracy=1.0))
    assert told["bare"].findings[0].labels is None


@pytest.mark.parametrize("gain", [-1.0, 0.0])
def test_what_is_no_leak_is_neither_the_worst_nor_called_reconstructed(gain: float) -> None:
    guessed, leak, far = row("bare", 40.0, above_baseline=gain), row("bare", 30.0), row("bare", 14.0)
    criterion = choose_criterion(SCENARIO, [leak])
    assert find_closest([far, leak, guessed], criterion) == leak
    assert find_closest([far, guessed], criterion) == guessed, "the verdict's closest where nothing leaks"
    assert find_closest([row("bare", None)], criterion) is None


@pytest.mark.parametrize(("auc", "control", "expected"), [
    ((0.7, 0.6, 0.8), (0.5, 0.4, 0.6), Identification.IDENTIFIED),
    ((0.55, 0.5, 0.6), None, Identification.NOT_IDENTIFIED),
    ((0.3, 0.2, 0.4), None, Identification.IDENTIFIED),
    ((0.9, 0.8, 1.0), (0.9, 0.8, 1.0), Identification.ALSO_BY_CONTROL),
])  # fmt: skip
def test_members_are_identified_by_the_intervals(auc: Any, control: Any, expected: Identification) -> None:
    roc = Roc(Estimate(*auc), control and Estimate(*control), {}, 9, 9)
    assert roc.identification == expected


def test_trials_of_one_arm_find_their_reference_in_others() -> None:
    def row(
        arm: str, answer: str | None, attack: str = "a", lr: float = 0.1, knowledge: Sequence[str] = ("defence", "code")
    ) -> dict[str, Any]:
        found = {"arm": arm, "attack": attack, "result": answer, "trial": f"{arm}{lr}", "lr": lr}
        return found | {"knowledge": knowledge, "explains": True, "images": 2}

    def told(*rows: dict[str, Any]) -> list[str]:
        return [one["verdict"] for one in with_verdicts(rows, SCENARIO, lambda row: row["lr"])]

    leak, no = row("bare", "leaks"), row("noise", "not reconstructed")
    assert told(leak, no) == ["leaks", "not reconstructed"]
    assert told(leak, row("noise", "not measured")) == ["leaks", "not measured"]
    assert told(leak, row("noise", "not reconstructed", "b"))[1] == "not measured", "the one that works did not meet it"
    assert told(row("bare", "leaks", lr=1.0), no)[1] == "inconclusive"
    assert told(row("bare", "not reconstructed"), no) == ["inconclusive", "inconclusive"]
    assert told(leak, row("masks", "nothing to attack"))[1] == "nothing to attack"
    assert told(row("bare", None)) == ["not measured"]
    blind = row("noise", "not reconstructed", knowledge=["defence"])
    assert told(leak, blind) == ["leaks", "inconclusive"], "no attacker has the code"
    works = row("bare", "leaks", "b")
    assert told(leak, works, blind, row("noise", "not reconstructed", "b"))[2] == "not reconstructed"
    more = [one | {"images": 3} for one in (leak, blind)]
    assert told(*more, works, row("noise", "not reconstructed", "b"))[1] == "inconclusive", "of more than it met"
    assert told(leak, works, blind, row("noise", "not reconstructed", "b") | {"explains": False})[2] == "inconclusive"
    large = [one | {"batch_size": 8} for one in (leak, blind)]
    assert told(leak, no, *large)[1] == "inconclusive", "no attacker has the code at batch 8"
