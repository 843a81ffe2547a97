"""Verdicts: a sentence for each arm of any run, the same in the terminal and on the page, and none that reads low."""

from __future__ import annotations

import json
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from rayfed import scenario as scenarios
from rayfed.analysis import summary
from rayfed.analysis.loading import Run, load
from rayfed.analysis.membership import Roc, in_words
from rayfed.analysis.outcomes import outcomes, with_verdicts
from rayfed.analysis.summary import ArmSummary
from rayfed.analysis.verdicts import (
    closest,
    criterion_of,
    headline,
    next_step,
    verdicts,
    verdicts_table,
)
from rayfed.evidence.criteria import Missing
from rayfed.metrics.roc import Estimate
from rayfed.reasons import Reason
from rayfed.report import words
from rayfed.report.gate import Gated
from rayfed.report.results_text import STATES
from rayfed.report.run import write_report
from rayfed.report.statement import Statement
from rayfed.report.terminal_run import RunView
from rayfed.store.images import encode_png
from rayfed.store.schemas import UNPLAYED, WANT_OF_TIME
from rayfed.update import Masked
from tests.report_fixtures import Page
from tests.result_fixtures import attacked, small_run

ARMS = {"bare": [], "noise": [{"name": "gaussian", "sigma": 0.1}], "masks": {"protection": "secure_aggregation"}}
SCENARIO = {"arms": ARMS, "attacks": [{"name": "dlg"}]}


def row(arm: str, psnr: float | None, attack: str = "dlg", **more: Any) -> dict[str, Any]:
    gain = None if psnr is None else psnr - 12.0
    usual = {"above_baseline": gain, "identified": 1.0, "true_label": 3, "distortion": 0.0, "message": ""}
    return attacked(arm, attack, psnr=psnr, **{**usual, **more})


def hidden(arm: str) -> dict[str, Any]:
    return row(arm, None, status="not applicable", reason=Masked.reason, message=Masked.unreadable, label_accuracy=None)


def arms_of(*names: str) -> list[ArmSummary]:
    return summary.arms(names, {}, [], [])


def of(*rows: dict[str, Any], scenario: dict[str, Any] = SCENARIO, **more: Any) -> dict[str, Any]:
    return {verdict.arm: verdict for verdict in verdicts(scenario, rows, [], **more)}


def test_a_state_for_each_arm_of_any_run() -> None:
    told = of(row("bare", 30.0), row("noise", 9.0), hidden("masks"))
    assert {arm: verdict.state for arm, verdict in told.items()} == {
        "bare": "leaks", "noise": "not reconstructed", "masks": "nothing to attack",
    }  # fmt: skip
    assert [one.message for one in told["masks"].findings[0].no_results] == [Masked.unreadable]
    assert of(row("bare", 30.0))["noise"].state == "not measured"


def test_the_table_has_the_figures_of_the_sentences() -> None:
    rows = [row("bare", 30.0), row("bare", 20.0, batch_size=4, label_accuracy=None), row("noise", 9.0)]
    bare, larger, noise, masks = verdicts_table(SCENARIO, rows, list(ARMS), True).to_pylist()
    assert [bare[name] for name in ("arm", "batch_size", "verdict", "metric")] == ["bare", 2, "leaks", "psnr"]
    assert [bare[name] for name in ("max_similarity", "above_baseline", "attack")] == [30.0, 18.0, "dlg, adaptive"]
    assert [bare[name] for name in ("leaked", "samples", "labels", "labels_baseline")] == [1, 1, 1.0, 1.0]
    assert (larger["batch_size"], larger["labels"], larger["labels_baseline"]) == (4, None, None)
    assert (noise["verdict"], noise["above_baseline"], bare["reason"]) == ("not reconstructed", -3.0, None)
    assert {name for name, value in masks.items() if value is not None} == {"arm", "verdict", "reason"}
    [unfinished] = verdicts_table(SCENARIO, [], ["bare"], False).to_pylist()
    assert "not finished" in unfinished["reason"]


def test_a_run_of_texts_of_which_nothing_is_measured_speaks_of_texts() -> None:
    scenario = SCENARIO | {"metrics": {"names": ["token_accuracy"]}}
    assert criterion_of(scenario, []).noun == "text"
    assert criterion_of(SCENARIO, []).noun == "image"


def test_a_run_has_its_verdicts_as_a_table(tmp_path: Path) -> None:
    folder = small_run(str(tmp_path), SCENARIO)
    folder.write_part("attacks", 0, [row("bare", 30.0), row("noise", 9.0)])
    run = load(folder.url)
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
def test_page_tables_and_statement_agree_on_a_run_that_was_stopped(
    tmp_path: Path, status: dict[str, Any], known: bool
) -> None:
    folder = small_run(str(tmp_path), SCENARIO)
    folder.write_part("attacks", 0, [row("bare", 30.0), row("noise", 9.0)])
    folder.write_text("status.json", json.dumps(status))
    state = "not reconstructed" if known else "not measured"
    run = load(folder.url)
    assert isinstance(run, Run)
    assert {one.arm: one.state for one in run.verdicts()}["noise"] == state
    assert {one["arm"]: one["verdict"] for one in outcomes(folder)}["noise"] == state
    if status["state"] == "interrupted":
        page = Page(Path(write_report(folder).removeprefix("file://")).read_text()).text
        assert ("noise not reconstructed " in page) == known
    assert Gated(folder, folder.url).inputs.finished == known
    [lead, *_] = Statement(folder, {}, folder).lead
    assert ("did not finish" in lead) == (not known)
    assert ("stopped after its last round" in lead) == (known and status["state"] != "finished")


def test_attacks_that_fail_without_a_defence_too_say_nothing_of_it() -> None:
    told = of(row("bare", 9.0), row("noise", 8.0))
    assert (told["noise"].state, told["bare"].state) == ("inconclusive", "not reconstructed")
    [alone] = of(row("noise", 8.0), scenario={"arms": {"noise": ARMS["noise"]}}).values()
    assert alone.state == "inconclusive"
    other = SCENARIO | {"arms": {"bare": [], "deep": {"model": {"hidden": [9]}, "defences": ["prune"]}}}
    assert of(row("bare", 30.0), row("deep", 8.0), scenario=other)["deep"].state == "inconclusive"


def test_more_iterations_are_advised_if_a_search_did_not_converge() -> None:
    cut = [row("bare", 30.0, fit=0.0), row("noise", 8.0, fit=0.9)]
    step = next_step(SCENARIO, cut, verdicts(SCENARIO, cut, []))
    assert step.startswith("Next: give the searches more iterations"), "without a defence something is found"
    assert next_step(SCENARIO, [], []) == ""


def test_what_a_verdict_says_of_the_code_is_not_said_beside_each_attack_too() -> None:
    shown = StringIO()
    partly = row("noise", 9.0, reason=Reason.CODE_PARTLY_USED, message="noise takes few values")
    RunView(Console(file=shown, width=300)).round_done([], [partly], [])
    assert "few values" not in shown.getvalue()
    [found] = of(row("bare", 30.0), partly)["noise"].findings
    assert found.doubt == (Reason.CODE_PARTLY_USED, "noise takes few values")


@pytest.mark.parametrize("why", [Reason.BUFFERS_NOT_SOLVED, Reason.CODE_NOT_RUN])
def test_more_time_is_not_the_next_step_where_an_attacker_could_not_use_what_it_saw(why: Reason) -> None:
    rows = [row("bare", 30.0), row("noise", 9.0, reason=why)]
    told = list(of(*rows).values())
    said = next_step(SCENARIO, rows, told)
    assert "noise" in said


@pytest.mark.parametrize(("fit", "helps"), [(0.9, True), (2e-6, False)])
def test_more_iterations_are_the_next_step_first_where_a_search_does_not_end_without_a_defence(
    fit: float, helps: bool
) -> None:
    rows = [
        row("bare", 30.0 if fit < 0.1 else 9.0, fit=fit),
        row("noise", 9.0, fit=None, knowledge=["defence", "code"]),
    ]
    told = of(*rows)
    assert told["noise"].reasons == {Reason.ADAPTIVE_NOT_COMPARED}
    step = next_step(SCENARIO, rows, list(told.values()))
    assert ("iterations" in step) == helps


def labelled(arm: str, psnr: float, *found: float) -> list[dict[str, Any]]:
    """One batch of each client, of two classes, and the share of its labels that were found."""
    return [row(arm, psnr, victim=i, true_label=i % 2, label_accuracy=share) for i, share in enumerate(found)]


def test_an_arm_whose_labels_are_recovered_says_so_whatever_its_state() -> None:
    scenario: dict[str, Any] = {"arms": {"bare": [], "noise": ARMS["noise"], "prune": ["prune"]}}
    rows = [*labelled("bare", 30.0, 1, 1), *labelled("noise", 9.0, 1, 1), *labelled("prune", 9.0, 0, 1)]
    told = {verdict.arm: verdict for verdict in verdicts(scenario, rows, [])}
    assert {arm: bool(verdict.labels) for arm, verdict in told.items()} == {"bare": True, "noise": True, "prune": False}
    assert told["noise"].labels_by_chance
    assert "noise" in headline(scenario, list(told.values()))[-1]


def test_what_was_planned_to_be_left_out_and_played_after_all_is_no_next_step() -> None:
    both = [row("bare", 30.0), row("noise", 9.0)]
    scenario = {**SCENARIO, "arms": {"bare": [], "noise": ARMS["noise"]}}

    def step(rows: list[dict[str, Any]]) -> str:
        return next_step(scenario, rows, verdicts(scenario, rows, []), "about --minutes 9 in all")

    assert "left out" not in step(both)
    next_step(scenario, both, verdicts(scenario, both, []), "about --minutes 9", "1 of 4 samples were attacked")
    late = row("noise", None, "tag", status=UNPLAYED, message=WANT_OF_TIME)
    assert step([row("bare", 30.0), row("noise", 30.0), late]).startswith("Next: every arm leaks"), "as more time would"


def test_the_next_step_for_a_near_reconstruction_is_to_look_at_it() -> None:
    """If nothing leaks without a defence, longer searches come first."""
    like = row("noise", 20.0, above_baseline=3.0, identified=0.0)
    for bare, shown in ((30.0, True), (9.0, False)):
        rows = [row("bare", bare), like]
        assert ("output.images" in next_step(SCENARIO, rows, verdicts(SCENARIO, rows, []))) == shown


def test_the_next_step_attacks_for_longer_what_was_not_reconstructed() -> None:
    arms = {"bare": [], "noise": ARMS["noise"]}
    scenario = SCENARIO | {"arms": arms, "attacks": [{"name": "analytic"}, {"name": "dlg", "iterations": 300}]}
    rows = [row("bare", 30.0), row("noise", 9.0)]
    step = next_step(scenario, rows, verdicts(scenario, rows, []), run="runs/x")
    assert step.endswith("rayfed launch runs/x/scenario.yaml --set attacks.1.iterations=1200")


def test_targets_read_off_nearer_than_the_median_are_told_as_labels_are() -> None:
    sought = {"label_accuracy": None, "target_baseline": 0.5}
    rows = [row("bare", 30.0), row("noise", 9.0, target_error=0.1, **sought)]
    assert [verdict.targets_beyond for verdict in verdicts(SCENARIO, rows, [])] == [False, True, False]
    none = verdicts(SCENARIO, [row("bare", 30.0), row("noise", 9.0, target_error=0.6, **sought)], [])
    assert not any("Labels were" in line for line in headline(SCENARIO, none))


def test_the_table_of_verdicts_has_the_labels_of_every_arm(tmp_path: Path) -> None:
    folder = small_run(str(tmp_path), {"arms": {"bare": [], "noise": ARMS["noise"]}})
    folder.write_part("attacks", 0, [*labelled("bare", 30.0, 1, 1), *labelled("noise", 9.0, 1, 1)])
    write_report(folder)
    page = folder.read_text("report.html")
    assert page.count('data-label="Labels recovered">100 %') == 2


def test_samples_that_did_not_leak_acquit_no_defence() -> None:
    bare = [row("bare", 30.0, victim=0), row("bare", 9.0, victim=1)]
    assert of(*bare, row("noise", 9.0, victim=1))["noise"].state == "not measured"
    assert of(*bare, row("noise", 9.0, victim=0))["noise"].state == "not reconstructed"


def test_an_attack_that_failed_leaves_even_a_bare_arm_unmeasured() -> None:
    raised = row("bare", None, "dlg", status="failed", message="ValueError: no")
    assert of(raised, row("bare", 9.0, "tag"))["bare"].state == "not measured"


def test_of_unlike_batches_the_weakest_statement_counts() -> None:
    lacking = row("noise", 9.0, batch_size=8, reason=Reason.CODE_NOT_RUN)
    told = of(row("bare", 30.0), row("bare", 30.0, batch_size=8), row("noise", 9.0), lacking)
    assert told["noise"].state == "inconclusive"


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
    criterion = criterion_of(SCENARIO, [leak])
    assert closest([far, leak, guessed], criterion) == leak
    assert closest([far, guessed], criterion) == guessed, "the verdict's closest where nothing leaks"
    assert closest([row("bare", None)], criterion) is None


def test_the_summary_names_one_closest_sample_as_the_verdict_does() -> None:
    rows = [row("bare", 19.1, above_baseline=-1.0), row("bare", 14.4, sample=1), row("noise", 14.0)]
    told, criterion = of(*rows), criterion_of(SCENARIO, rows)
    said = words.of_run(arms_of("bare", "noise"), told, criterion, [], None, secure=False)
    leak = words.of_run(arms_of("bare"), of(row("bare", 30.0)), criterion, [], None, secure=False)
    assert said[0].heading != leak[0].heading
    assert "PSNR of 19.1 dB" in said[0].lines[0]


def test_people_recognised_behind_a_defence_that_is_not_measured_are_no_evidence(tmp_path: Path) -> None:
    folder = small_run(str(tmp_path), SCENARIO)
    rows = [row("bare", 30.0, top1=1.0, people=10), row("noise", 9.0, top1=0.0, people=10, knowledge=[])]
    folder.write_part("attacks", 0, rows)
    [bare, noise] = next(block for block in Statement(folder, {}, folder)._recovered if isinstance(block, list))
    assert noise.endswith("noise is inconclusive)")
    assert "no evidence" not in bare


def test_the_page_and_the_terminal_say_the_same(tmp_path: Path) -> None:
    rows = [row("bare", 30.0), row("noise", 9.0), hidden("masks")]
    folder = small_run(str(tmp_path), SCENARIO)
    folder.write_part("attacks", 0, rows)
    page = Page(Path(write_report(folder)).read_text(encoding="utf-8")).text
    view = RunView(Console(file=StringIO(), width=80))
    view.starting(scenarios.parse("{name: t, federation: {rounds: 1, clients: 2}}"), folder, "here")
    view._scenario = folder.scenario()
    view.round_done([], rows, [])
    view.finished("report.html")
    printed = view._console.file.getvalue()  # type: ignore[attr-defined]
    for verdict in of(*rows).values():
        assert f"{verdict.arm} {STATES[verdict.state]} " in page
        [line] = [line for line in printed.splitlines() if line.startswith(f"{verdict.arm} ")]
        assert STATES[verdict.state] in line
    assert [one["verdict"] for one in outcomes(folder)] == ["leaks", "not reconstructed", "nothing to attack"]


def test_how_many_at_the_threshold_are_beyond_a_guess_stands_beside_their_share(tmp_path: Path) -> None:
    scenario = SCENARIO | {"metrics": {"names": ["psnr"], "success": {"psnr": 15.0}}, "data": {"name": "image_folder"}}
    folder = small_run(str(tmp_path), scenario)
    rows = [(20.0, 3.0, 1.0), (18.0, 1.0, 0.0), (16.0, -1.0, 1.0), (9.0, -3.0, 1.0)]
    found = [
        row("bare", psnr, sample=i, above_baseline=gain, identified=apart) for i, (psnr, gain, apart) in enumerate(rows)
    ]
    folder.write_part("attacks", 0, found)
    key = {"arm": "bare", "round": 0, "attack": "dlg", "victim": 1, "repeat": 0, "sample": 0}
    image = encode_png(torch.zeros(1, 8, 8))
    folder.write_part("images", 0, [key | {"true": image, "reconstructed": image}])
    page = Path(write_report(folder)).read_text(encoding="utf-8")
    assert "75.0 %<small>1 identified</small>" in page
    assert "<code>--set output.images=all</code>" in page


@pytest.mark.parametrize("warned", [True, False])
def test_samples_are_warned_of_where_the_folder_has_some(tmp_path: Path, warned: bool) -> None:
    folder = small_run(str(tmp_path), SCENARIO | {"data": {"name": "image_folder", "root": "photos"}})
    view = RunView(Console(file=StringIO(), width=200))
    view.starting(scenarios.parse("{name: t, federation: {rounds: 1, clients: 2}}"), folder, "here")
    view._scenario = folder.scenario()
    if warned:
        key = {"arm": "bare", "round": 0, "attack": "dlg", "victim": 1, "repeat": 0, "sample": 0}
        image = encode_png(torch.zeros(1, 8, 8))
        folder.write_part("images", 0, [key | {"true": image, "reconstructed": image}])
    view.round_done([], [row("bare", 30.0 if warned else None, status="ok" if warned else "not played")], [])
    view.finished("report.html")
    printed = view._console.file.getvalue()  # type: ignore[attr-defined]
    assert ("not known to be public" in printed) == warned


def test_what_leaked_before_an_interruption_is_said_in_the_terminal(tmp_path: Path) -> None:
    """Rows that no round has handed to the view yet are in the folder; nothing but a leak is said of them."""
    rows = [row("bare", 30.0), row("noise", 9.0)]
    folder = small_run(str(tmp_path), SCENARIO)
    folder.write_part("attacks", 0, rows)
    folder.write_text("status.json", json.dumps({"state": "interrupted", "rounds": 1, "rounds_done": 0}))
    view = RunView(Console(file=StringIO(), width=200))
    view.starting(scenarios.parse("{name: t, federation: {rounds: 1, clients: 2}}"), folder, "here")
    view._scenario = folder.scenario()
    view.interrupted("attack")
    printed = view._console.file.getvalue()  # type: ignore[attr-defined]
    for verdict in of(*rows, finished=False).values():
        [line] = [line for line in printed.splitlines() if line.startswith(f"{verdict.arm} ")]
        assert STATES[verdict.state] in line


@pytest.mark.parametrize(("auc", "control", "said"), [
    ((0.7, 0.6, 0.8), (0.5, 0.4, 0.6), "MEMBERS IDENTIFIED"),
    ((0.55, 0.5, 0.6), None, "members not identified"),
    ((0.3, 0.2, 0.4), None, "MEMBERS IDENTIFIED, by lower scores"),
    ((0.9, 0.8, 1.0), (0.9, 0.8, 1.0), "MEMBERS IDENTIFIED, but the control"),
])  # fmt: skip
def test_membership_has_a_verdict_in_words(auc: Any, control: Any, said: str) -> None:
    found = Roc(Estimate(*auc), control and Estimate(*control), {}, 9, 9)
    assert in_words(found).startswith(said)


@pytest.mark.parametrize(("kind", "said"), [
    ("attack", "{page} has no result"),
    ("training", "{page} shows the results so far"),
])  # fmt: skip
def test_an_interruption_before_any_answer_says_what_to_do(tmp_path: Path, kind: str, said: str) -> None:
    folder = small_run(str(tmp_path), SCENARIO)
    folder.write_text("status.json", json.dumps({"state": "interrupted", "kind": kind, "rounds": 0}))
    view = RunView(Console(file=StringIO(), width=200))
    view.starting(scenarios.parse("{name: t, federation: {rounds: 1, clients: 2}}"), folder, "here")
    view.interrupted(kind)
    printed = view._console.file.getvalue()  # type: ignore[attr-defined]
    assert said.format(page=f"{folder.url}/report.html") in printed
    page = Page(Path(write_report(folder)).read_text(encoding="utf-8")).text
    assert "Next: run the command again" in page or kind == "training"


@pytest.mark.parametrize(("kind", "rounds", "next"), [
    ("attack", 0, "run the command again, because attacks cannot be resumed"), ("training", 9, "rayfed resume"),
])  # fmt: skip
def test_the_next_step_of_what_was_interrupted_is_to_go_on(tmp_path: Path, kind: str, rounds: int, next: str) -> None:
    folder = small_run(str(tmp_path), SCENARIO)
    folder.write_part("attacks", 0, [row("bare", 30.0)])
    status = {"kind": kind, "state": "interrupted", "rounds_done": 0, "rounds": rounds, "error": "interrupted"}
    folder.write_text("status.json", json.dumps(status))
    page = Page(Path(write_report(folder)).read_text(encoding="utf-8")).text
    assert next in page.partition("Next: ")[2].partition("\n")[0]
    assert "why attacks did not answer" not in page
    assert ("after 0 complete rounds" in page) == (rounds > 0)


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


def test_what_was_inferred_stands_beside_what_was_rebuilt(tmp_path: Path) -> None:
    scores = [{"kind": kind, "sample": i, "score": float(i + 2 * (kind == "member")), "control": 0.0}
              for kind in ("member", "non-member") for i in range(4)]  # fmt: skip
    key = {"arm": "bare", "round": 0, "attack": "loss", "victim": 0, "repeat": 0, "status": "ok", "message": ""}
    inferred = key | {"metric": "auc", "value": 0.8, "chance": 0.5, "control": 0.5, "candidates": 8, "scores": scores}
    folder = small_run(str(tmp_path), SCENARIO)
    folder.write_part("inferences", 0, [inferred])
    page = Path(write_report(folder)).read_text(encoding="utf-8")
    assert "no attack has run" not in page
    assert '<td class="number">4</td><td class="number">4</td>' in page, "members and non-members"
    assert 'data-label="Inference">AUC ' in page
    assert page.count("not measurable: it needs at least 1,000 non-members, but there are 4") == 1
