"""Attacks that raise or are stopped: the others' rows stand, and the page says why there are no more."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from actors.executor import on_ray
from rayfed import scenario as scenarios
from rayfed.attacks.closed_form.analytic import Analytic
from rayfed.attacks.progress import Standing
from rayfed.errors import UserError
from rayfed.evidence.verdicts import read_evidence
from rayfed.report.terminal import run
from rayfed.report.terminal.run import RunView
from rayfed.report.terminal.time_left import TimeLeft
from rayfed.runs import runner
from rayfed.scenario import AttackSpec
from rayfed.simulation.executors.local import local
from rayfed.simulation.progress import Progress
from rayfed.store import exits
from rayfed.store.finding import State
from rayfed.store.folder import RunFolder

pytestmark = pytest.mark.usefixtures("reports")

TEXT = """
name: t
data: {name: digits, size: 8, train_samples: 40, test_samples: 20}
model: {name: mlp, hidden: [8]}
federation: {rounds: 1, clients: 2}
arms: {none: [], noise: [{name: gaussian, sigma: 10}]}
attacks:
  - {name: analytic, observes: gradient}
  - {name: "tests.simulation.test_failing_attacks:Raises", label: mine, observes: gradient, how: %s}
"""


@dataclass(frozen=True)
class Raises:
    how: str

    def reconstruct(self, observations: Any, model: Any, generators: Any) -> Any:
        if self.how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "memory" and len(observations) == 1 and observations[0].victim != 1:
            return Analytic().reconstruct(observations, model, generators)
        errors = {
            "error": KeyError,
            "options": UserError,
            "stop": KeyboardInterrupt,
            "memory": torch.OutOfMemoryError,
        }
        raise errors[self.how]("mine")


def attacked(how: str, out: Path, progress: Any) -> RunFolder:
    return runner.attack(scenarios.parse(TEXT % how), None, str(out), local, progress)


@pytest.mark.engine
def test_an_attack_that_raises_is_rows_with_its_error(tmp_path: Path) -> None:
    folder = attacked("error", tmp_path, Progress())
    rows = folder.read_table("attacks").to_pylist()
    assert [(row["attack"], row["arm"], row["status"]) for row in rows if row["attack"] == "mine"] == [
        ("mine", "none", "failed"), ("mine", "noise", "failed"),
    ]  # fmt: skip
    assert rows[-1]["message"].startswith("raised KeyError: 'mine' (test_failing_attacks.py, line ")
    assert {row["status"] for row in rows if row["attack"] == "analytic"} <= {"ok", "diverged"}


def test_options_that_do_not_fit_what_an_attack_meets_are_rows_that_say_so(tmp_path: Path) -> None:
    folder = attacked("options", tmp_path, Progress())
    rows = folder.read_table("attacks").to_pylist()
    own = [(row["arm"], row["status"], row["message"]) for row in rows if row["attack"] == "mine"]
    assert own == [("none", "failed", "mine"), ("noise", "failed", "mine")], "as it was raised, for it is for the user"
    assert {row["status"] for row in rows if row["attack"] == "analytic"} <= {"ok", "diverged"}
    assert exits.read_status(folder)["state"] == "finished"


@pytest.mark.parametrize("name", ["dlg", "inverting_gradients", "grnn"])
def test_layers_that_no_arm_has_are_refused_before_anything_is_played(name: str, tmp_path: Path) -> None:
    changes = [f"attacks=[{{name: {name}, observes: gradient, layers: [cnv*]}}]"]
    with pytest.raises(UserError, match=r"layers: .*'cnv\*'"):
        runner.launch(scenarios.parse(TEXT % "error", changes=changes), str(tmp_path), local, Progress())
    assert not list(tmp_path.iterdir())


def test_memory_that_does_not_suffice_for_one_victim_costs_the_others_nothing(tmp_path: Path) -> None:
    scenario = scenarios.parse(TEXT % "memory", changes=["federation.clients=4", "attacks.1.victims=4"])
    rows = runner.attack(scenario, None, str(tmp_path), local, Progress()).read_table("attacks").to_pylist()
    own = [row for row in rows if (row["attack"], row["arm"]) == ("mine", "none")]
    assert {row["victim"]: row["status"] for row in own} == {0: "ok", 1: "failed", 2: "ok", 3: "ok"}
    [lacking] = [row["message"] for row in own if row["status"] == "failed"]
    assert lacking.startswith("raised OutOfMemoryError: mine (test_failing_attacks.py, line ")
    assert "resources.attackers.num_gpus" in lacking


@pytest.mark.engine
def test_an_attack_that_ends_its_process_is_rows_that_say_so(ray_session: None, tmp_path: Path) -> None:
    folder = runner.attack(scenarios.parse(TEXT % "die"), None, str(tmp_path), on_ray(), Progress())
    rows = folder.read_table("attacks").to_pylist()
    assert {row["status"] for row in rows if row["attack"] == "analytic"} <= {"ok", "diverged"}
    assert {(row["status"], row["message"]) for row in rows if row["attack"] == "mine"} == {
        ("failed", "the attack's process died 2 times")
    }


def test_what_was_over_when_it_was_stopped_stands(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        attacked("stop", tmp_path, Progress())
    [found] = tmp_path.iterdir()
    folder = RunFolder.open(str(found))
    assert exits.read_status(folder)["state"] == "interrupted"
    assert [row["attack"] for row in folder.read_table("attacks").to_pylist()] == ["analytic"] * 2
    assert [verdict.state for verdict in read_evidence(folder).verdicts] == [State.LEAKS, State.NOT_MEASURED]


def test_time_left_is_no_longer_than_the_attacks_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "monotonic", lambda: 10.0)
    view = RunView(Console(file=StringIO(), width=200))
    view.deadline = 75.0
    view.ready(0)
    view.attacks_done(0, [], ["a", "a"])
    assert "1:05" in view._time_for_attacks()


def test_time_left_follows_from_what_was_measured() -> None:
    left = TimeLeft(0.0)
    left.ended([("a", 10.0)])
    assert left.left(["a", "a"], 10.0) == (20.0, "about"), "as long as the one that is over"
    assert left.left(["a", "b"], 10.0) == (10.0, "at least"), "of others nobody knows"
    left.heard("b", "arm", Standing(1, 10, 40, 0.5, 5.0), 15.0)
    assert left.left(["b"], 15.0) == (15.0, "at least"), "at least what its search has to go"
    left.ended([("a", 10.0), ("a", 10.0)])
    assert left.left(["a", "a"], 10.0) == (10.0, "about"), "two go on at once"


def test_time_left_of_attacks_of_which_none_is_over_follows_from_their_evaluations() -> None:
    left = TimeLeft(0.0, {"a": 400, "b": 100, "closed": 0})
    assert left.left(["a", "b"], 1.0) == (0.0, "at least"), "nothing is heard yet"
    left.heard("a", "arm", Standing(1, 10, 400, 0.5, 2.0), 2.0)
    assert left.left(["a", "b", "b"], 2.0) == (pytest.approx(78 + 2 * 20), "roughly")
    assert left.left(["a", "closed"], 2.0) == (pytest.approx(78), "at least")
    left.ended([("a", 3.0)])
    assert left.left(["b"], 120.0) == (pytest.approx(20), "roughly"), "a search may end before its last evaluation"
    assert AttackSpec(name="idlg", iterations=15, restarts=2).evaluations == 15 * 20 * 2
    assert AttackSpec(name="inverting_gradients", iterations=100, restarts=8).evaluations == 100, "they go together"
    assert AttackSpec(name="analytic").evaluations == 0
