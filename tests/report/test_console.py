"""What a run prints: text from outside as it is, and no figure that was not measured."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
import typer
from rich.console import Console
from rich.markup import escape
from scipy.stats import binomtest

from rayfed import scenario as scenarios
from rayfed.cli.common import errors_for_people
from rayfed.errors import UserError
from rayfed.report.terminal import sweep as terminal_sweep
from rayfed.report.terminal.console import console
from rayfed.report.terminal.run import RunView
from rayfed.report.text.leakage import largest_share
from rayfed.results.sweep_folder import TRIALS, SweepFolder
from rayfed.runs.api_args import open_view
from rayfed.store.folder import RunFolder
from rayfed.store.schemas import TABLES

SCENARIO = scenarios.parse("name: t\nfederation: {rounds: 3, clients: 4}\n")
ALLOTMENT = SimpleNamespace(clients=1, client="1 CPU", attackers=0, attacker="1 CPU")


def folder_at(url: str) -> SimpleNamespace:
    """Return a run's folder without tables."""
    return SimpleNamespace(
        url=url,
        read_table=lambda name: pa.table({}),
        scenario=dict,
        exists=lambda name: False,
        parts=lambda table: [],
        read_mapping=lambda name: {},
    )


def trained(accuracy: float | None = None, arm: str = "none") -> dict[str, Any]:
    row = dict.fromkeys(TABLES["rounds"].names)
    return row | {"arm": arm, "round": 0, "train_loss": 2.0, "test_accuracy": accuracy, "clients": 4, "seconds": 1.0}


def attacked(psnr: float, arm: str = "none", attack: str = "dlg") -> dict[str, Any]:
    found = {
        "batch_size": 1,
        "victim": 0,
        "round": 0,
        "observes": "gradient",
        "sample": 0,
        "knowledge": [],
        "above_baseline": 5.0,
        "identified": 1.0,
        "fit": 1e-6,
        "distortion": None,
    }
    return found | {"arm": arm, "attack": attack, "psnr": psnr, "ssim": 1.0, "label_accuracy": 1.0, "status": "ok"}


@pytest.fixture
def view() -> RunView:
    return RunView(Console(file=StringIO(), force_terminal=True, width=200, no_color=True))


def printed(view: RunView) -> str:
    return view._console.file.getvalue()  # type: ignore[attr-defined]


def test_text_from_outside_is_no_markup(view: RunView) -> None:
    view.starting(SCENARIO, folder_at("/data/[old]/runs/x"), ALLOTMENT)
    view.ready(0)
    view.note("no weights in [/tmp/x]")
    view.round_done([trained(arm="[b]")], [attacked(20, "[b]", "[i]dlg")], [])
    view.finished("/data/[old]/runs/x/report.html")
    text = printed(view)
    assert text.count("/data/[old]/runs/x") == 2
    assert "no weights in [/tmp/x]" in text
    assert text.count("[i]dlg") == 2


def test_the_bar_leaves_out_an_accuracy_that_was_not_measured(view: RunView) -> None:
    view.starting(SCENARIO, folder_at("runs/x"), ALLOTMENT)
    view.ready(0)
    descriptions = []
    for accuracy in (None, 0.5):
        view.round_done([trained(accuracy)], [], [])
        view.clients_done(1, 1, 4)
        descriptions.append(view._bar.tasks[0].description)
    view.close()
    assert descriptions == ["round 2/3 (round 1: loss 2.000)", "round 2/3 (round 1: loss 2.000 acc 50.0%)"]


def test_a_psnr_that_was_cut_off_is_told_as_such(view: RunView) -> None:
    view.ready(0)
    view.round_done([trained()], [attacked(float("inf")), attacked(20)], [])
    view.finished("report.html")
    assert "100.0 dB" not in printed(view)
    assert any(">100" in line.split() for line in printed(view).splitlines() if line.startswith("none "))


def test_arms_with_opponents_end_in_a_table_of_who_stands_whom(view: RunView) -> None:
    view.starting(SCENARIO, folder_at("runs/x"), ALLOTMENT)
    opponents = {"arms": {"mean": [], "krum": []}, "opponents": {"nobody": {}, "door": {}}}
    view._scenario = {**view._scenario, **opponents}
    view.ready(0)
    krum = [trained(0.875, "krum vs nobody"), trained(0.75, "krum vs door") | {"backdoor_accuracy": 0.5}]
    view.round_done([trained(0.5, "mean vs nobody"), *krum], [], [])
    view.finished("report.html")
    table = printed(view).rpartition("of their backdoor")[2].splitlines()
    assert [line.split() for line in table if "mean" in line or "krum" in line] == [
        ["mean", "50.0", "%", "–"], ["krum", "87.5", "%", "75.0", "%,", "50.0", "%"],
    ]  # fmt: skip


def test_the_first_round_tells_nothing_of_the_time_left(view: RunView) -> None:
    view.starting(SCENARIO, folder_at("runs/x"), ALLOTMENT)
    view.ready(0)
    view.round_done([trained()], [], [])
    assert " left" not in printed(view)
    view.round_done([trained() | {"round": 1}], [], [])
    assert "0:00 left" in printed(view)


def test_a_path_of_a_package_is_told_as_it_was_given(capsys: pytest.CaptureFixture[str]) -> None:
    """Rich has an emoji of that name."""
    with pytest.raises(typer.Exit), errors_for_people(debug=False):
        raise UserError("rayfed audit --model hf:package:NAME/model")
    console().print(escape("hf:package:NAME/model"))
    told = capsys.readouterr()
    assert "hf:package:NAME/model" in told.err
    assert "hf:package:NAME/model" in told.out


def test_the_python_api_cuts_no_line_that_commands_do_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    line = " ".join(["word"] * 36)
    console().print(line)
    with open_view(True) as view:
        view.note(line)
    assert capsys.readouterr().out.splitlines() == [line, f"note: {line}"]
    monkeypatch.setenv("COLUMNS", "60")
    assert console().width == 60


def test_a_sweep_says_after_its_first_trial_how_long_the_others_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where trials go on beside each other, the first one's time was for all that had begun."""
    now = [100.0]
    monkeypatch.setattr(terminal_sweep, "monotonic", lambda: now[0])
    row = {"status": "finished", "attack": "dlg", "psnr": 20.0, "test_accuracy": 0.5}
    for begun, told in ((1, "about 4 min 30 s left"), (3, "about 1 min 30 s left")):
        files, said = RunFolder.at(str(tmp_path / str(begun))), StringIO()
        for name in range(begun):
            files.write_text(f"{TRIALS}/{name}-0/scenario.yaml", "")
        view = terminal_sweep.SweepView(Console(file=said, width=200))
        sweep = SimpleNamespace(fields={"training.lr": []}, search="grid")
        view.starting(SimpleNamespace(name="s", sweep=sweep), SweepFolder(files), "here", 10, 0)
        for _ in range(2):
            now[0] += 30.0
            view.trial_done(SimpleNamespace(arm="none", values={}, repeat=0), [row])
        assert said.getvalue().count(" left for ") == 1
        assert told in said.getvalue()


@pytest.mark.parametrize("samples", [1, 8, 300])
def test_the_largest_share_that_may_leak_although_no_sample_did(samples: int) -> None:
    exact = binomtest(0, samples, alternative="less").proportion_ci(0.95, "exact").high
    assert largest_share(samples) == pytest.approx(exact)
