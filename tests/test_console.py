"""What a run prints: text from outside as it is, and no figure that was not measured."""

from __future__ import annotations

import re
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
import typer
from rich.console import Console
from rich.markup import escape

from rayfed import scenario as scenarios
from rayfed.analysis.audit import Criterion, Finding
from rayfed.analysis.sweep_folder import TRIALS, SweepFolder
from rayfed.cli.common import errors_for_people
from rayfed.engine.calling import shown
from rayfed.errors import UserError
from rayfed.report import terminal_sweep
from rayfed.report.terminal import console
from rayfed.report.terminal_run import RunView, _defence_effects, guarantee_lines
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
        "sample": 0,
        "knowledge": "",
        "above_guessing": 5.0,
        "told_apart": 1.0,
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
    assert "[i]dlg on [b]: 1 image" in text
    assert text.count("[i]dlg") == 3


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


def test_what_is_guaranteed_is_told_before_and_after(view: RunView) -> None:
    view.ready(0)
    guaranteed = {
        "arm": "dp",
        "rounds": 1,
        "epsilon": 2.9555,
        "delta": 1e-5,
        "unit": "sample",
        "adjacency": "one more",
        "against": "all",
    }
    broken = {"arm": "split", "rounds": 1, "defence": "dp_sgd", "note": "no guarantee: private"}
    empirical = {"arm": "prune", "rounds": 1, "note": "empirical: no"}
    view.accounted([guaranteed, broken, empirical, {"arm": "none", "rounds": 1}])
    assert "privacy of dp after 1 round: epsilon 2.96 at delta 1e-05, protects one more, against all" in printed(view)
    assert "next to nothing" not in printed(view)
    [large] = guarantee_lines([guaranteed | {"epsilon": 17.9}])
    assert large.endswith("protects one more, against all; so large an epsilon promises next to nothing")
    assert "privacy of prune: empirical: no" in printed(view)
    assert "privacy of none" not in printed(view)
    arms = ("dp", "split", "prune", "none")
    view.round_done([{**trained(0.5), "train_loss": None}], [attacked(20, arm) for arm in arms], [])
    assert "no client" in printed(view)
    view.finished("report.html")
    words = [line.split() for line in printed(view).splitlines()[-16:]]
    assert [w[-1] for w in words if w and w[0] in arms] == ["sample", "withdrawn", "none", "-"]
    assert printed(view).splitlines()[-9] == "privacy of split: no guarantee: private"


def test_a_psnr_that_was_cut_off_is_told_as_such(view: RunView) -> None:
    view.ready(0)
    view.round_done([trained()], [attacked(float("inf")), attacked(20)], [])
    assert "PSNR mean 60.0 dB, best >100 dB" in printed(view)
    view.finished("report.html")
    assert "100.0 dB" not in printed(view)
    assert printed(view).splitlines()[-7].split().count(">100") == 1


def test_the_probability_of_reconstruction_success_is_in_the_last_table(view: RunView) -> None:
    view.starting(SCENARIO, folder_at("runs/x"), ALLOTMENT)
    view.ready(0)
    view.round_done([trained()], [attacked(20), attacked(15), attacked(9)], [])
    view.finished("report.html")
    terms = "PoRS, the share at the threshold, guesses among them: psnr ≥ 15"
    assert terms in " ".join(re.sub(r"\x1b\[[\d;]*m", "", printed(view)).split())
    assert "67%" in printed(view)


def test_each_share_reconstructed_has_a_heading_of_its_own(view: RunView) -> None:
    success = SCENARIO.metrics.model_copy(update={"success": {"psnr": 15.0, "ssim": 0.5}})
    view.starting(SCENARIO.model_copy(update={"metrics": success}), folder_at("runs/x"), ALLOTMENT)
    view.ready(0)
    view.round_done([trained()], [{**attacked(20), "ssim": 0.9}], [])
    view.finished("report.html")
    told = " ".join(re.sub(r"\x1b\[[\d;]*m", "", printed(view)).split())
    assert "PoRS, the share at the threshold, guesses among them: psnr ≥ 15, ssim ≥ 0.5" in told
    assert "PoRS PSNR PoRS SSIM" in told


def test_arms_with_opponents_end_in_a_table_of_who_stands_whom(view: RunView) -> None:
    view.starting(SCENARIO, folder_at("runs/x"), ALLOTMENT)
    view.ready(0)
    krum = [trained(0.875, "krum vs nobody"), trained(0.75, "krum vs door") | {"backdoor_accuracy": 0.5}]
    view.round_done([trained(0.5, "mean vs nobody"), *krum], [], [])
    view.finished("report.html")
    table = printed(view).rpartition("how often a backdoor")[2].splitlines()
    assert [line.split() for line in table if "mean" in line or "krum" in line] == [
        ["mean", "50%", "-"], ["krum", "88%", "75%,", "50%"],
    ]  # fmt: skip


def test_what_a_defence_changes_is_told_in_the_terminal(view: RunView) -> None:
    cost = {"actor_seconds": 2.0, "bytes_up": 4_000_000}
    rows = [trained(0.9) | cost, trained(0.8, "noise") | {"actor_seconds": 6.0, "bytes_up": 2_000_000}]
    view.ready(0)
    view.round_done(rows, [attacked(30), attacked(12, "noise")], [])
    view.finished("report.html")
    assert "Effect of each defence compared with no defence:" in printed(view)
    assert (
        "noise: test accuracy 80.0 %, −10.0 points; 6 s of training a round (against 2 s); "
        "2 MB sent by clients a round (against 4 MB); not reconstructed, closest image 12.0 dB "
        "(without a defence: leaks, worst image 30.0 dB)."
    ) in printed(view)


def test_an_arm_in_which_no_attack_answers_is_not_told_to_leak_nothing(view: RunView) -> None:
    view.ready(0)
    silent = attacked(12, "noise") | {"psnr": None, "status": "not applicable", "message": "no rows"}
    view.round_done([trained(0.9), trained(0.8, "noise")], [attacked(30), silent], [])
    view.finished("report.html")
    assert "leakage not measured (without a defence: leaks, worst image 30.0 dB)" in " ".join(printed(view).split())
    assert "no image reconstructed beyond guessing" not in printed(view)


def test_a_table_says_where_who_knows_more_found_less() -> None:
    """Beside an informed figure that is below the blind one a reader takes the table for wrong."""
    criterion = Criterion.of("pixels", None)

    def table(informed: float) -> str:
        usual = {"arm": "noise", "batch": 1, "state": "inconclusive", "leaked": 0, "samples": 1, "reasons": ()}
        found = Finding(closest={"blind": 20.0, "informed": informed}, best=20.0, by="dlg", **usual)
        Console(file=(told := StringIO()), width=120).print(_defence_effects([found], {"noise": 0.1}, criterion))
        return told.getvalue()

    assert "found less in places" in table(15.0)
    assert "found less in places" not in table(19.5)


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
    with shown(True) as view:
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
