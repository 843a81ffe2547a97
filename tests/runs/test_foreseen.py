"""What is said before a run of verdicts that it cannot have, against the verdicts of runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from rayfed.cli import app
from rayfed.core.reasons import Reason
from rayfed.defences.base import Defence, Task, UpdateMethod
from rayfed.registry import component
from rayfed.results.loading import Run
from rayfed.runs import runner, sweeps
from rayfed.runs.preflight import find_undeclared, find_unreachable
from rayfed.scenario import Scenario, parse
from rayfed.simulation.executors.local import local
from rayfed.simulation.inputs import prepare_inputs
from rayfed.simulation.progress import SweepProgress
from rayfed.update import Update
from tests.helpers.progress_fixtures import Noting

SCENARIO = """
name: t
data: {name: digits, size: 8, train_samples: 60, test_samples: 20}
model: {name: mlp, hidden: [8]}
federation: {rounds: 1, clients: 3}
arms: {none: [], noise: [{name: gaussian, sigma: 1.0}]}
attacks:
  - {name: analytic, observes: gradient, victims: 2}
"""
INFORMED = "{name: analytic, label: informed, observes: gradient, victims: 2, knowledge: [defence, code]}"


@component
class Levels(Defence):
    """Add noise of two values."""

    def wrap_update(self, next: UpdateMethod) -> UpdateMethod:
        """Return the update with noise."""

        def update(task: Task) -> Update:
            sent = next(task)
            signs = {
                name: 2.0 * torch.randint(2, t.shape, generator=task.generator) - 1 for name, t in sent.tensors.items()
            }
            return replace(sent, tensors={name: t + signs[name] for name, t in sent.tensors.items()})

        return update


def given(*attacks: str, changes: tuple[str, ...] = ()) -> Scenario:
    return parse(SCENARIO + "".join(f"  - {attack}\n" for attack in attacks), changes=list(changes))


def test_an_arm_whose_code_no_attack_has_is_told_of_before_the_run() -> None:
    [said] = find_unreachable(given())
    assert said.startswith("noise: ")
    assert said.endswith("knowledge: [defence, code]")
    assert find_unreachable(given(INFORMED)) == []
    assert find_unreachable(given(changes=("arms={none: [], other: []}",))) == []
    assert find_unreachable(given(changes=("attacks=[{name: membership, knowledge: [candidates]}]",))) == []
    assert find_unreachable(given(changes=("federation.protection=secure_aggregation",))) == [], (
        "there is nothing to attack"
    )


@pytest.mark.parametrize("fewer", ["victims: 1", "victims: 2, batch_size: 2"])
def test_code_on_a_part_of_the_samples_does_not_do(fewer: str) -> None:
    assert len(find_unreachable(given(INFORMED.replace("victims: 2", fewer)))) == 1


def test_an_arm_with_nothing_to_compare_it_with_is_told_of() -> None:
    [said] = find_unreachable(given(INFORMED, changes=("arms={noise: [{name: gaussian, sigma: 1.0}]}",)))
    assert said.endswith("none: []")


def test_an_own_defence_of_which_attacks_do_not_use_all_is_told_of_before_the_run() -> None:
    own = ("arms={none: [], own: ['tests.runs.test_foreseen:Levels']}",)
    inputs = prepare_inputs(given(INFORMED, changes=own))
    [said] = find_unreachable(inputs.scenario, find_undeclared(inputs))
    assert said.startswith("own: ")
    assert find_undeclared(inputs)["own", "informed"].reason == Reason.UNDECLARED
    inputs = prepare_inputs(given(INFORMED))
    assert find_unreachable(inputs.scenario, find_undeclared(inputs)) == []


class NoTrials:
    """Runs no trial of a sweep."""

    def num_gpus(self, scenario: Scenario) -> dict[str, int]:
        return {"clients": 0, "attackers": 0}

    def __call__(self, recorder: sweeps.SweepRecorder) -> None:
        pass


def test_the_run_ends_as_was_said_before_it(tmp_path: Path) -> None:
    noted = Noting()
    folder = runner.launch(given(), str(tmp_path), local, noted)
    assert noted.notes[0] == find_unreachable(given())[0]
    verdicts = {verdict.arm: verdict for verdict in Run(folder).verdicts()}
    assert (verdicts["none"].state, verdicts["noise"].reasons) == ("leaks", {Reason.NO_ADAPTIVE_ATTACK})


@pytest.mark.parametrize(
    ("sweep", "told"), [("", True), ("sweep: {repeats: 2}", True), ("sweep: {fields: {seed: [1, 2]}}", False)]
)
def test_validate_says_it_of_a_run_and_of_seeds(tmp_path: Path, sweep: str, told: bool) -> None:
    (tmp_path / "s.yaml").write_text(f"{SCENARIO}\n{sweep}\n")
    output = CliRunner().invoke(app, ["validate", str(tmp_path / "s.yaml")]).output
    assert (f"  note: {find_unreachable(given())[0]}" in output) == told
    assert "valid" in output


def test_a_sweep_of_seeds_says_it_before_its_trials(tmp_path: Path) -> None:
    said: list[str] = []
    progress = SweepProgress()
    progress.note = said.append  # type: ignore[method-assign]
    sweeps.sweep(given(changes=("sweep={repeats: 2}",)), str(tmp_path), NoTrials(), progress)
    assert find_unreachable(given())[0] in said
