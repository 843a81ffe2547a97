"""Metrics, figures and reports that fail leave a gap, and the run, its other results and the gate go on."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf, isnan, nan, sqrt
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from rayfed import scenario as scenarios
from rayfed.attacks.base import Inference, Reconstruction
from rayfed.evidence.bounds import Bound
from rayfed.evidence.gate import check_bounds
from rayfed.evidence.spread import Spread, measure_spread
from rayfed.evidence.verdicts import collect_evidence
from rayfed.metrics import score
from rayfed.metrics.base import Metric
from rayfed.metrics.known import METRICS
from rayfed.metrics.score import Scorer
from rayfed.report.gate import GatedRun, Ruling
from rayfed.report.html import run as report
from rayfed.report.terminal.run import RunView
from rayfed.report.text.formats import NONE, format_duration
from rayfed.runs import runner
from rayfed.simulation.executors.local import local
from rayfed.simulation.progress import Progress
from rayfed.store import exits
from rayfed.store.folder import REPORT, RunFolder
from tests.helpers.command import run
from tests.helpers.gate_rows import SCENARIO, row
from tests.helpers.result_fixtures import small_run

TEXT = """
name: t
data: {name: digits, size: 8, train_samples: 40, test_samples: 20}
model: {name: mlp, hidden: [8]}
federation: {rounds: 1, clients: 2}
attacks: [{name: analytic, observes: gradient}]
"""


def raises(true: Tensor, guess: Tensor) -> Tensor:
    raise LookupError("nothing to look up")


def exits_at_once(true: Tensor, guess: Tensor) -> Tensor:
    sys.exit(0)


FAULTY: dict[str, Callable[..., Any]] = {
    "raises": raises,
    "exits": exits_at_once,
    "one too many": lambda true, guess: torch.zeros(len(true) + 1),
    "a column": lambda true, guess: torch.zeros(len(true), 1),
    "no number": lambda true, guess: "0.5",
    "nothing": lambda true, guess: None,
    "one argument": lambda true: torch.zeros(len(true)),
}


def declare(monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any], **more: Any) -> None:
    """Register a metric `own` for the time of a test."""
    metric = Metric(
        name="own", description="own", title="own", function=function, higher_is_closer=False, outcome=False, **more
    )
    monkeypatch.setitem(METRICS, "own", metric)
    score._functions.cache_clear()


def scored(scorer: Scorer, true: Tensor, guess: Tensor) -> list[dict[str, Any]]:
    labels = torch.arange(len(true))
    return scorer.score(true, labels, guess, labels)


@pytest.mark.parametrize("how", FAULTY)
def test_a_faulty_metric_leaves_its_column_empty_and_the_others_as_they_are(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    declare(monkeypatch, FAULTY[how])
    true, guess = torch.zeros(2, 1, 4, 4), torch.full((2, 1, 4, 4), 0.5)
    scorer = Scorer(("mse", "own", "label_accuracy"))
    rows = scored(scorer, true, guess)
    assert [(one["mse"], one["own"], one["label_accuracy"]) for one in rows] == [(0.25, None, 1.0)] * 2
    assert list(scorer.failures) == ["own"]


@pytest.mark.parametrize("compares", ["class", "labels"])
def test_faulty_metrics_of_labels_leave_gaps(compares: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    declare(monkeypatch, raises, compares=compares)
    scorer, image = Scorer(("psnr", "own")), torch.rand(3, 1, 4, 4)
    assert [(one["psnr"], one["own"]) for one in scored(scorer, image, image)] == [(inf, None)] * 3
    assert "LookupError" in scorer.failures["own"]


def test_a_metric_that_cannot_be_made_leaves_its_column_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    declare(monkeypatch, lambda people: sys.exit(1), needs=("people",))
    scorer, image = Scorer(("psnr", "own"), people=("a", "b")), torch.rand(2, 1, 4, 4)
    [message] = scorer.unavailable()
    assert "own" in message
    with pytest.warns(UserWarning, match="own"):
        assert [one["own"] for one in scored(scorer, image, image)] == [None] * 2


def test_metrics_may_give_lists_and_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    image = torch.rand(2, 1, 4, 4)
    for values in ([0.5, nan], torch.tensor([0.5, nan]).numpy(), torch.tensor([0.5, nan], requires_grad=True)):
        declare(monkeypatch, lambda true, guess, values=values: values)
        assert [one["own"] for one in scored(Scorer(("own",)), image, image)] == [0.5, None]


def test_ctrl_c_in_a_metric_still_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(true: Tensor, guess: Tensor) -> Tensor:
        raise KeyboardInterrupt

    declare(monkeypatch, interrupted)
    image = torch.rand(1, 1, 4, 4)
    with pytest.raises(KeyboardInterrupt):
        scored(Scorer(("own",)), image, image)


@pytest.mark.parametrize(
    ("shape", "empty"),
    [
        ((6, 1, 50), {"ssim", "noise_ratio"}),
        ((1, 1, 1), {"ssim"}),
        ((5, 2, 2), {"ssim", "noise_ratio"}),
        ((3, 40, 2), {"ssim"}),
        ((2, 3, 3), {"noise_ratio"}),
        ((3, 3, 3), set()),
    ],
)
def test_samples_of_unusual_shapes_are_scored_by_what_applies(shape: tuple[int, ...], empty: set[str]) -> None:
    scorer = Scorer(("mse", "psnr", "ssim", "noise_ratio", "label_accuracy", "mask_iou"))
    true, guess = torch.zeros(2, *shape), torch.full((2, *shape), 0.1)
    for one in scored(scorer, true, guess):
        assert one["psnr"] == pytest.approx(20, abs=1e-5)
        assert {name for name in ("ssim", "noise_ratio") if one[name] is None} == empty
    assert set(scorer.failures) == empty


@pytest.mark.parametrize("value", [nan, inf, -inf])
def test_reconstructions_that_are_not_finite_are_no_failure_of_a_metric(value: float) -> None:
    scorer, true = Scorer(("mse", "psnr", "ssim")), torch.zeros(2, 1, 4, 4)
    guess = torch.stack([true[0], true[1] + value])
    assert sorted(one["mse"] is None for one in scored(scorer, true, guess)) == [False, True]
    assert not scorer.failures


@dataclass(frozen=True)
class Odd:
    """Answers with what no metric takes."""

    how: str

    def reconstruct(self, observations: Any, model: Any, generators: Any) -> Any:
        found = []
        for seen in observations:
            images, labels = seen.sample.blank(seen.batch_size), torch.zeros(seen.batch_size, dtype=torch.int64)
            if self.how == "shape":
                images = images.flatten(1)
            elif self.how == "count":
                images = images[:0]
            elif self.how == "labels":
                labels = labels[:, None] - 1
            found.append(Reconstruction(images, labels))
        return found


@dataclass(frozen=True)
class Infinite:
    """Answers with a probability that is none."""

    metric: ClassVar[str] = "accuracy"

    def infer(self, observations: Any, model: Any, generators: Any) -> Any:
        return [Inference(metric="accuracy", scores=torch.tensor([nan]), label=0) for _ in observations]


@pytest.mark.parametrize("how", ["shape", "count", "labels"])
def test_answers_of_another_form_have_rows_without_scores(how: str, tmp_path: Path) -> None:
    odd = f'attacks=[{{name: analytic, observes: gradient}}, {{name: "{__name__}:Odd", label: odd, how: {how}}}]'
    folder = runner.launch(scenarios.parse(TEXT, changes=[odd]), str(tmp_path), local, Progress())
    rows = {one["attack"]: one for one in folder.read_table("attacks").to_pylist()}
    assert rows["odd"]["label_accuracy" if how == "labels" else "psnr"] is None
    assert rows["analytic"]["psnr"] > 60
    assert exits.read_status(folder)["state"] == "finished"


def test_an_inference_that_is_not_finite_has_failed(tmp_path: Path) -> None:
    odd = f'attacks=[{{name: "{__name__}:Infinite", label: odd}}]'
    folder = runner.launch(scenarios.parse(TEXT, changes=[odd]), str(tmp_path), local, Progress())
    [found] = folder.read_table("inferences").to_pylist()
    assert (found["status"], found["value"]) == ("failed", None)
    assert found["message"]


def test_a_run_ends_well_and_tells_once_what_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METRICS, "ssim", replace(METRICS["ssim"], function=exits_at_once))
    notes: list[str] = []
    progress = Progress()
    monkeypatch.setattr(progress, "note", notes.append)
    changes = ["federation.rounds=2", "attacks.0.rounds=[0, 1]", "attacks.0.victims=2"]
    folder = runner.launch(scenarios.parse(TEXT, changes=changes), str(tmp_path), local, progress)
    assert {(one["ssim"], one["psnr"] is None) for one in folder.read_table("attacks").to_pylist()} == {(None, False)}
    assert len([note for note in notes if "ssim" in note and "SystemExit" in note]) == 1


def test_a_report_that_fails_costs_a_run_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reports: None
) -> None:
    (tmp_path / "s.yaml").write_text(TEXT)
    with monkeypatch.context() as broken:
        broken.setattr(report, "make_run_page", lambda *_: {}["no such\nfigure"])
        code, output = run("launch", str(tmp_path / "s.yaml"), "--executor", "local", "--out", str(tmp_path / "runs"))
    [place] = (tmp_path / "runs").glob("t-*")
    folder = RunFolder.open(str(place))
    assert (code, exits.read_status(folder)["state"]) == (0, "finished")
    assert output.count("KeyError") == 1
    assert "KeyError" in folder.read_text("log.txt")
    assert folder.read_table("attacks").num_rows
    assert not folder.exists(REPORT)
    code, _ = run("report", str(place))
    assert code == 0
    assert folder.exists(REPORT)


def test_a_summary_that_fails_costs_a_run_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "s.yaml").write_text(TEXT)
    for part in ("_say_round", "_say_results"):
        monkeypatch.setattr(RunView, part, lambda *_: 1 / 0)
    code, output = run("launch", str(tmp_path / "s.yaml"), "--executor", "local", "--out", str(tmp_path / "runs"))
    assert (code, output.count("ZeroDivisionError")) == (0, 2)


def test_the_report_of_a_sweep_may_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "s.yaml").write_text(TEXT + "sweep: {fields: {training.lr: [0.1, 0.2]}}\n")
    monkeypatch.setattr("rayfed.report.html.sweep.make_sweep_page", lambda *_: 1 / 0)
    code, output = run("sweep", str(tmp_path / "s.yaml"), "--executor", "local", "--out", str(tmp_path / "runs"))
    assert (code, output.count("ZeroDivisionError")) == (0, 1)


SSIM = Bound("ssim", 0.5)


def states(*rows: dict[str, Any]) -> dict[str, str]:
    arms = list(dict.fromkeys(one["arm"] for one in rows))
    return {check.arm: check.state for check in check_bounds(collect_evidence(SCENARIO, rows, []), [SSIM], arms)}


def test_a_gate_passes_no_bound_on_a_metric_that_has_no_value() -> None:
    leaks, holds = row("none", 40.0, ssim=0.9), row("x", 9.0, ssim=0.1)
    assert states(leaks, holds) == {"none": "failed", "x": "passed"}
    gap = row("x", 9.0, attack="b", ssim=None)
    assert states(leaks, holds, gap) == {"none": "failed", "x": "not measured"}
    assert states(leaks, row("x", 9.0, ssim=None)) == {"none": "failed", "x": "not measured"}
    assert states(row("none", 40.0, ssim=nan), row("x", 9.0, ssim=nan)) == dict.fromkeys(("none", "x"), "not measured")
    assert states(leaks, row("x", 30.0, ssim=0.8), gap)["x"] == "failed", "what is known to leak leaks"
    diverged = row("x", attack="b", above_baseline=None, identified=None, ssim=None)
    assert states(leaks, holds, diverged)["x"] == "passed", "it found nothing that could be compared"


def test_a_gate_on_a_run_with_gaps_exits_with_3(tmp_path: Path) -> None:
    rows = [
        row("none", 40.0, ssim=0.9, iterations=1, seconds=0.1),
        row("x", 9.0, ssim=None, iterations=1, seconds=0.1),
    ]
    folder = small_run(str(tmp_path), SCENARIO)
    folder.write_part("attacks", 0, rows)
    code, output = run("gate", folder.url, "--fail-above", "ssim=0.5", "--arm", "x")
    assert (code, "NOT MEASURED" in output) == (3, True)
    code, _ = run("gate", folder.url, "--fail-above", "15", "--arm", "x")
    assert code == 0, "the other bounds are decided as before"


def test_a_metric_that_fails_now_is_no_improvement_on_a_baseline(tmp_path: Path) -> None:
    def document(name: str, *rows: dict[str, Any]) -> Any:
        folder = small_run(str(tmp_path / name), SCENARIO)
        folder.write_part("attacks", 0, [one | {"iterations": 1, "seconds": 0.1} for one in rows])
        return GatedRun(folder, "w", ["x"])

    both = [row("x", 9.0, ssim=0.9, attack="a"), row("x", 9.0, ssim=0.2, attack="b")]
    then = Ruling([document("then", *both)], [SSIM]).document()
    same = Ruling([document("same", *both)], [], baseline=then)
    assert {change.state for change in same.changes} == {"passed"}
    gone = Ruling([document("gone", both[0] | {"ssim": None}, both[1])], [SSIM], baseline=then)
    assert {change.state for change in gone.changes if change.metric == "ssim"} == {"not measured"}
    assert json.loads(json.dumps(gone.document()))["exit_code"] == 3


def test_infinite_figures_have_a_mean_and_no_deviation() -> None:
    assert measure_spread([1.0, 3.0]) == Spread(2.0, sqrt(2), 1.0, 3.0, 2)
    assert measure_spread([1.0, inf]) == Spread(inf, None, 1.0, inf, 2)
    found = measure_spread([inf, -inf])
    assert found is not None
    assert isnan(found.mean)
    assert format_duration(inf) == NONE
