"""Trainables for Tune: checkpoints, restored trials, and values that change between rounds."""

from __future__ import annotations

from pathlib import Path

import pytest
from ray import tune
from ray.tune.schedulers import PopulationBasedTraining

from actors.trial import CheckpointReporter, check_unchanged, restore
from rayfed import scenario as scenarios
from rayfed.defences.base import Defence, Task, UpdateMethod
from rayfed.errors import RunError
from rayfed.registry import component
from rayfed.runs import runner
from rayfed.scenario import Scenario
from rayfed.simulation.executors.local import local
from rayfed.simulation.progress import Progress
from rayfed.store.folder import RunFolder
from rayfed.tune import trainable
from rayfed.update import Update
from tests.helpers import faults
from tests.helpers.run_fixtures import ACTORS

BASE = """
name: small
data: {name: digits, size: 8, train_samples: 60, test_samples: 20}
model: {name: mlp, hidden: [8]}
training: {batch_size: 8, lr: 0.1}
federation: {rounds: 4, clients: 2}
attacks: [{name: analytic, victims: 1, rounds: [0, 3], observes: gradient, batch_size: 1}]
"""


@component
class Stumbling(Defence):
    """Fails in the third round while a file exists."""

    place: str

    def wrap_update(self, next: UpdateMethod) -> UpdateMethod:
        def update(task: Task) -> Update:
            if task.round == 2 and Path(self.place).exists():
                raise ZeroDivisionError("by the test")
            return next(task)

        return update


class Reports:
    """What a trial reports to Tune, with a copy of each checkpoint."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.rounds: list[int] = []

    def __call__(self, metrics: dict[str, int], checkpoint: tune.Checkpoint) -> None:
        self.rounds.append(metrics["rounds"])
        checkpoint.to_directory(str(self._folder / str(metrics["rounds"])))


def launched(scenario: Scenario, folder: RunFolder, reports: Reports, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "report", reports)
    reporter = CheckpointReporter(folder)
    runner.launch_in(folder, scenario, local, reporter)
    reporter.report_end()


def test_each_checkpoint_is_a_run_that_continues_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario, whole = scenarios.parse(BASE), RunFolder.at(str(tmp_path / "whole"))
    reports = Reports(tmp_path / "saved")
    launched(scenario, whole, reports, monkeypatch)
    assert reports.rounds == [1, 2, 3, 4]
    assert RunFolder.open(str(tmp_path / "saved" / "4")).read_mapping("status.json")["state"] == "finished"
    second = tune.Checkpoint.from_directory(str(tmp_path / "saved" / "2"))
    assert not (tmp_path / "saved" / "2" / "lease").exists()
    continued, later = RunFolder.at(str(tmp_path / "continued")), Reports(tmp_path / "later")
    restore(second, continued)
    check_unchanged(continued, scenario)
    launched(scenario, continued, later, monkeypatch)
    assert later.rounds == [3, 4]
    assert not faults.differences(continued.url, whole.url)
    with pytest.raises(RunError):
        check_unchanged(continued, scenarios.parse(BASE, changes=["training.lr=0.2"]))


def test_the_key_of_a_secure_run_is_in_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = ["privacy.secure=true", "defences=[{name: gaussian, sigma: 0.1}]", "attacks=[]"]
    folder, reports = RunFolder.at(str(tmp_path / "run")), Reports(tmp_path / "saved")
    launched(scenarios.parse(BASE, changes=changes), folder, reports, monkeypatch)
    assert reports.rounds == [1, 2, 3, 4]
    assert not list((tmp_path / "saved").rglob("run.key"))


@pytest.mark.engine
def test_a_restored_trial_continues_at_its_round(ray_session: None, tmp_path: Path) -> None:
    ACTORS.end_idle()
    (obstacle := tmp_path / "obstacle").touch()
    own = f"{{name: 'tests.actors.test_trial:Stumbling', place: {obstacle}}}"
    scenario = scenarios.parse(BASE, changes=[f"defences=[{own}]"])
    once = tune.Tuner(
        trainable(scenario),
        param_space={"training.lr": tune.grid_search([0.05])},
        run_config=tune.RunConfig(name="once", storage_path=str(tmp_path / "tune"), verbose=0),
    )
    [died] = once.fit()
    assert died.error
    obstacle.unlink()
    again = tune.Tuner.restore(str(tmp_path / "tune" / "once"), trainable(scenario), resume_errored=True)
    [result] = again.fit()
    assert not result.error
    assert list(result.metrics_dataframe["rounds"]) == [1, 2, 3, 4]
    played = scenarios.parse(BASE, changes=[f"defences=[{own}]", "training.lr=0.05"])
    alone = runner.launch(played, str(tmp_path / "alone"), local, Progress())
    assert not faults.differences(result.checkpoint.path, alone.url)


@pytest.mark.slow
@pytest.mark.engine
def test_values_that_change_between_rounds_end_the_trial(ray_session: None, tmp_path: Path) -> None:
    ACTORS.end_idle()
    changing = PopulationBasedTraining(
        time_attr="rounds",
        perturbation_interval=1,
        hyperparam_mutations={"training.lr": [0.3, 0.4]},
        quantile_fraction=0.5,
        synch=True,
    )
    tuner = tune.Tuner(
        trainable(scenarios.parse(BASE, changes=["attacks=[]"])),
        param_space={"training.lr": tune.grid_search([1.0e-7, 0.1])},
        tune_config=tune.TuneConfig(metric="test_accuracy", mode="max", scheduler=changing, max_concurrent_trials=1),
        run_config=tune.RunConfig(storage_path=str(tmp_path), verbose=0),
    )
    errors = tuner.fit().errors
    assert {type(error.cause) for error in errors} == {RunError}
