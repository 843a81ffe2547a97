"""Sweeps: the trials that a section stands for, playing them with Tune, and going on after a break."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from ray import tune
from ray.tune.search.variant_generator import generate_variants

from actors import trackers
from actors.sweep import _repeats, make_columns, make_space, on_tune
from actors.trial import Reporter, prepare_process, search_places
from rayfed import scenario as scenarios
from rayfed.errors import MissingExtraError, ResourceError, RunError, ScenarioError
from rayfed.evidence.outcomes import compute_outcomes
from rayfed.results.sweep_folder import SweepFolder
from rayfed.runs import runner, sweeps
from rayfed.runs.local_sweep import local_sweep
from rayfed.runs.sweep_search import TriedSetting, make_search
from rayfed.runs.sweeps import SweepExecution, SweepRecorder
from rayfed.scenario import Scenario
from rayfed.scenario.trials import make_trial_scenario, plan_trials
from rayfed.simulation.executors.local import local
from rayfed.simulation.progress import Progress, SweepProgress
from rayfed.store import exits
from rayfed.store.folder import RunFolder
from rayfed.tune import trainable
from tests.helpers.run_fixtures import ACTORS

BASE = """
name: small
data: {name: digits, size: 8}
model: {name: mlp, hidden: [16]}
training: {batch_size: 32, lr: 0.1}
federation: {rounds: 2, clients: 3}
arms: {none: [], noise: [{name: gaussian, sigma: 0.1}], prune: [{name: prune, ratio: 0.5}]}
attacks: [{name: analytic, victims: 1, rounds: [0], observes: gradient, batch_size: 1}]
"""
NOISE, RATIO = "arms.noise.defences.gaussian.sigma", "arms.prune.defences.prune.ratio"


TIMED = ["train_seconds", "attack_seconds"]


def parsed(sweep: str, *changes: str) -> Scenario:
    """One trial at a time: a trial starts four processes."""
    return scenarios.parse(BASE + f"sweep: {{max_concurrent: 1, {sweep}}}\n", changes=changes)


GRID = f"fields: {{{NOISE}: [0.01, 0.1, 1.0], {RATIO}: [0.5, 0.9], training.lr: [0.1, 0.2]}}"


def test_a_round_without_an_evaluation_is_reported_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[dict[str, Any]] = []
    monkeypatch.setattr(tune, "report", said.append)
    Reporter().round_done([{"arm": "none", "round": 0, "train_loss": 2.0}], [], [])
    assert said == [{"rounds": 1, "train_loss": 2.0}]


def test_a_grid_varies_an_arm_by_its_own_fields_and_those_of_all() -> None:
    trials = plan_trials(parsed(GRID + ", repeats: 2"))
    assert len(trials) == (1 * 2 + 3 * 2 + 2 * 2) * 2
    assert len({trial.name for trial in trials}) == len(trials)
    assert {trial.arm for trial in trials if RATIO in trial.values} == {"prune"}
    assert all("training.lr" in trial.values for trial in trials)


def test_a_trial_reads_files_from_where_the_sweep_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home := tmp_path / "home").mkdir()
    monkeypatch.chdir(home)
    places = search_places()
    monkeypatch.chdir(tmp_path)  # as Tune does
    prepare_process(places)
    assert Path.cwd() == home
    prepare_process((*places[:2], str(tmp_path / "another node's")))
    assert Path.cwd() == home


def test_a_trial_reports_the_metrics_that_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(tune, "report", told.append)
    losses = {"train_loss": 1.0, "test_loss": None, "test_accuracy": 0.5}
    Reporter().round_done([{"arm": "none", "round": 0, **losses}], [{"arm": "none", "psnr": 20.0}], [])
    assert told == [{"rounds": 1, "train_loss": 1.0, "test_accuracy": 0.5, "psnr": 20.0}]


def test_a_trial_is_the_scenario_with_one_arm_its_values_and_its_seed() -> None:
    scenario = parsed(GRID + ", repeats: 2", "seed=7")
    trial = next(t for t in plan_trials(scenario) if t.arm == "noise" and t.repeat == 1 and t.values[NOISE] == 1.0)
    played = make_trial_scenario(scenario, trial)
    assert list(played.played) == ["noise"]
    assert played.played["noise"].defences[0].parameters["sigma"] == 1.0
    assert (played.seed, played.sweep, played.training.lr) == (8, None, trial.values["training.lr"])


def test_trackers_get_a_column_for_each_swept_field(tmp_path: Path) -> None:
    scenario = parsed(
        f"fields: {{{NOISE}: [0.1], arms.prune.defences.0.ratio: [0.5], training.lr: [0.1, 0.2], model.hidden: [[16]]}}"
    )
    folder, trials = SweepFolder(RunFolder.create(str(tmp_path), "sweep")), plan_trials(scenario)
    recorder = SweepRecorder(scenario, folder, trials, [], SweepProgress())
    made = [spec["config"] for _, spec in generate_variants({"config": make_space(scenario, recorder.settings)})]
    assert [config["trial"] for config in made] == [trial.name for trial in trials]
    for config, trial in zip(made, trials, strict=True):
        assert _repeats(scenario, config) == [trial]
        assert (config["arm"], config["training.lr"]) == (trial.arm, trial.values["training.lr"])
        assert config["gaussian.sigma"] == (0.1 if trial.arm == "noise" else None)
        assert config["prune.ratio"] == (0.5 if trial.arm == "prune" else None)
    suggested = {"index": 4, "arm": "noise", "values": {NOISE: 0.3}, "repeats": [0]}
    shown = make_columns(parsed(f"fields: {{{NOISE}: [1]}}"), suggested)
    assert shown == {"gaussian.sigma": 0.3, "setting": 4, "arm": "noise"}


def test_random_draws_lie_in_their_range_and_are_the_same_again() -> None:
    sigma, batch = "{low: 0.001, high: 1, scale: log}", "{low: 1, high: 4, whole: true}"
    text = f"search: random, samples: 60, fields: {{{NOISE}: {sigma}, training.batch_size: {batch}}}"
    trials = plan_trials(parsed(text))
    assert trials == plan_trials(parsed(text))
    assert len({(trial.arm, repr(trial.values)) for trial in trials}) == len(trials)  # what is drawn twice comes once
    drawn = [trial.values[NOISE] for trial in trials if trial.arm == "noise"]
    assert len(drawn) == 20
    assert all(0.001 <= value <= 1 for value in drawn)
    assert 4 <= sum(value < 0.0316 for value in drawn) <= 16  # half of a log scale
    assert {trial.values["training.batch_size"] for trial in trials} == {1, 2, 3, 4}
    assert plan_trials(parsed(text, "seed=1")) != trials


@pytest.mark.parametrize(
    ("sweep", "message"),
    [
        ("fields: {arms.nose.defences.0.sigma: [1]}", "did you mean 'noise'"),
        ("fields: {arms.noise.defences.gaussian.sgma: [1]}", "did you mean 'sigma'"),
        ("fields: {arms.noise.defences.laplace.scale: [1]}", "not found"),
        ("fields: {training.lr: [0.1, -1]}", "training.lr = -1"),
        ("fields: {training.lr: {low: 0.1, high: 1}}", "a grid needs a list"),
        ("fields: {training.lr: {low: 1, high: 0.1}}, search: random, samples: 2", "low < high"),
        ("fields: {training.lr: {low: 0, high: 1, scale: log}}, search: random, samples: 2", "above 0"),
        ("fields: {training.lr: [0.1]}, search: random", "sweep.samples"),
        ("fields: {training.lr: [0.1]}, samples: 3", "sweep.samples"),
        ("fields: {seed: [1, 2]}", "`repeats`"),
        ("fields: {training.lr: [0.1]}, objectives: [psrn]", "did you mean 'psnr'"),
        ("fields: {}", "no field varies"),
        ("fields: {}, repeats: 2, search: random, samples: 2", "no field varies"),
        ("fields: {defences: [[gaussian]]}", "cannot vary as a whole"),
        ("fields: {arms.noise: [[]]}", "give a field of the arm"),
        ("fields: {training.lr: [1]}, search: optuna, samples: 2, objectives: [pmm]", "pmm"),
        (
            "fields: {training.batch_size: {low: 0.4, high: 3, whole: true}}, search: random, samples: 2",
            "whole numbers",
        ),
        ("fields: {training.lr: [1]}, trackers: {wandb: {api_key: x}}", "WANDB_API_KEY"),
        (
            "fields: {training.lr: [0.1]}, search: optuna, samples: 2, scheduler: asha, repeats: 2",
            "mean of all repeats",
        ),
    ],
)
def test_what_is_wrong_with_a_sweep_is_told(sweep: str, message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        plan_trials(parsed(sweep))


def test_optuna_goes_on_from_what_was_tried() -> None:
    scenario = parsed(
        f"search: optuna, samples: 9, fields: {{{NOISE}: {{low: 0.1, high: 1}}, training.lr: [0.1, 0.2]}}"
    )
    tried = {
        0: TriedSetting("noise", {NOISE: 0.5, "training.lr": 0.2}, [9.0, 0.8]),
        2: TriedSetting("prune", {"training.lr": 0.1}, [8.0, 0.7]),
    }
    found = make_search(scenario, tried, begun=3)
    suggested = found.setting(found.study.ask())
    assert suggested["index"] == 3
    assert suggested["arm"] in scenario.arms
    assert suggested["values"].keys() == ({NOISE} if suggested["arm"] == "noise" else set()) | {"training.lr"}
    known = found.study.get_trials()
    assert [trial.values for trial in known[:3]] == [[9.0, 0.8], None, [8.0, 0.7]]
    assert known[0].params == {"arm": "noise", NOISE: 0.5, "training.lr": 1}


def test_optuna_takes_values_from_a_table(tmp_path: Path) -> None:
    fields = f"{{{NOISE}: {{low: 0.1, high: 1}}, model.hidden: [[16], [32]], training.batch_size: [8, null]}}"
    scenario = parsed(f"search: optuna, samples: 9, fields: {fields}")
    row = {"trial": "0001-0", "repeat": 0, "status": "finished", "arm": "noise", "psnr": 9.0, "test_accuracy": 0.5}
    folder = SweepFolder(RunFolder.create(str(tmp_path), "sweep"))
    folder.files.write_text("scenario.yaml", scenario.dump())
    folder.write_outcomes([row | {NOISE: 0.5, "model.hidden": "[32]", "training.batch_size": None}])
    (Path(folder.url) / "trials" / "0004-0").mkdir(parents=True)
    found = SweepRecorder(scenario, folder, None, folder.outcomes().to_pylist(), SweepProgress()).search()
    suggested = found.setting(found.study.ask())
    assert suggested["index"] == 5  # behind what was begun, too
    assert found.study.get_trials()[1].params == {
        "arm": "noise",
        NOISE: 0.5,
        "model.hidden": 1,
        "training.batch_size": 1,
    }


@pytest.mark.parametrize("bad", ["training.lr: {low: -1, high: 1}", "training.batch_size: [8, 0]"])
def test_what_optuna_may_try_is_checked_before(bad: str) -> None:
    with pytest.raises(ScenarioError, match="found"):
        sweeps._planned(parsed(f"search: optuna, samples: 2, fields: {{{bad}}}"))


@pytest.mark.engine
def test_a_trial_that_has_no_place_is_told_before(ray_session: None, tmp_path: Path) -> None:
    scenario = parsed("fields: {training.lr: [0.1]}", "resources.clients.num_cpus=64")
    with pytest.raises(ResourceError, match="no node has more than 4 CPU"):
        sweeps.sweep(scenario, str(tmp_path), on_tune(), SweepProgress())


class Seen(SweepProgress):
    def __init__(self) -> None:
        self.rows: dict[str, list[dict[str, Any]]] = {}

    def trial_done(self, trial: Any, rows: Any) -> None:
        self.rows[trial.name] = list(rows)


@pytest.fixture(scope="module")
def scenario() -> Scenario:
    """A grid in which half of the trials fail: their step is so long that the weights overflow."""
    fields = f"fields: {{{NOISE}: [0.01, 1.0], {RATIO}: [0.5], training.lr: [0.1, 1.0e+38]}}"
    return parsed(fields, "sweep.max_concurrent=2")


@pytest.fixture(scope="module")
def swept(scenario: Scenario, tmp_path_factory: pytest.TempPathFactory) -> SweepFolder:
    return sweeps.sweep(scenario, str(tmp_path_factory.mktemp("sweep")), local_sweep, SweepProgress())


def test_the_status_names_settings_that_are_not_over(scenario: Scenario, tmp_path: Path) -> None:
    folder, trials = SweepFolder(RunFolder.create(str(tmp_path), "sweep")), plan_trials(scenario)
    rows = [{"trial": trials[0].name}]
    recorder = sweeps.SweepRecorder(scenario, folder, trials, rows, SweepProgress())
    named = recorder._unplayed()
    assert len(named) == len(trials) - 1
    assert any(one.startswith("noise, sigma 0.01") for one in named)


@pytest.mark.engine
def test_every_trial_is_a_row_and_a_failed_one_says_why(swept: SweepFolder, scenario: Scenario) -> None:
    rows = swept.outcomes().to_pylist()
    assert [row["trial"] for row in rows] == [trial.name for trial in plan_trials(scenario)]
    for row in rows:
        failed = row["training.lr"] > 1
        assert row["status"] == ("failed" if failed else "finished")
        assert (row["error"] is not None) == failed
        assert (row[NOISE] is not None) == (row["arm"] == "noise")
    assert any("lr" in row["error"] for row in rows if row["error"])
    status = exits.read_status(swept.files)
    assert (status["trials_done"], status["trials"]) == (len(plan_trials(scenario)), len(plan_trials(scenario)))
    assert status["unplayed"] == []


def test_a_trial_comes_to_what_its_scenario_comes_to_alone(
    swept: SweepFolder, scenario: Scenario, tmp_path: Path
) -> None:
    trial = next(t for t in plan_trials(scenario) if t.arm == "noise" and t.values["training.lr"] == 0.1)
    alone = runner.launch(make_trial_scenario(scenario, trial), str(tmp_path), local, Progress())
    [own] = compute_outcomes(alone)
    [row] = [row for row in swept.outcomes().to_pylist() if row["trial"] == trial.name]
    for name in ("test_accuracy", "test_loss", "psnr", "max_psnr", "ssim", "bytes_up", "images"):
        assert row[name] == own[name], name
    reference = next(r for r in swept.outcomes().to_pylist() if r["arm"] == "none" and r["training.lr"] == 0.1)
    assert row["pmm"] == pytest.approx(row["test_accuracy"] / reference["test_accuracy"])


def test_what_has_ended_is_not_played_again(swept: SweepFolder) -> None:
    with pytest.raises(RunError, match="nothing to resume"):
        sweeps.resume(swept.url, False, local_sweep, SweepProgress())
    rows = swept.outcomes().to_pylist()
    finished = [row for row in rows if row["status"] == "finished"]
    swept.write_outcomes(finished[1:])
    seen = Seen()
    folder = sweeps.resume(swept.url, False, local_sweep, seen)
    lost = {finished[0]["trial"], *(row["trial"] for row in rows if row["status"] == "failed")}
    assert seen.rows.keys() == lost
    assert folder.outcomes().to_pylist() == rows  # seconds too: it reads what the trial left


@pytest.mark.engine
@pytest.mark.usefixtures("ray_session")
def test_tune_comes_to_the_same_table(swept: SweepFolder, scenario: Scenario, tmp_path: Path) -> None:
    folder = sweeps.sweep(scenario, str(tmp_path), on_tune(), SweepProgress())
    table, expected = (sweep.outcomes().drop_columns(TIMED).to_pylist() for sweep in (folder, swept))
    for row, other in zip(table, expected, strict=True):
        assert {k: repr(v) for k, v in row.items()} == {k: repr(v) for k, v in other.items()}


@pytest.mark.parametrize(
    "where", [pytest.param("here", marks=pytest.mark.engine), pytest.param("on Tune", marks=pytest.mark.slow)]
)
def test_optuna_tries_as_many_settings_as_it_is_told(
    where: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    execution: SweepExecution = local_sweep
    if where == "on Tune":
        request.getfixturevalue("ray_session")
        execution = on_tune()
    text = f"search: optuna, samples: 4, repeats: 2, fields: {{{NOISE}: {{low: 0.001, high: 1, scale: log}}}}"
    rows = sweeps.sweep(parsed(text), str(tmp_path), execution, SweepProgress()).outcomes().to_pylist()
    assert sorted(row["trial"] for row in rows) == [f"{i:04d}-{repeat}" for i in range(4) for repeat in range(2)]
    assert {row["status"] for row in rows} == {"finished"}


@pytest.mark.engine
def test_a_scheduler_stops_what_learns_nothing(ray_session: None, tmp_path: Path) -> None:
    text = "fields: {training.lr: [0.2, 1.0e-8, 1.0e-9]}, scheduler: asha"
    scenario = parsed(text, "federation.rounds=6", "arms={none: []}", "attacks=[]")
    rows = sweeps.sweep(scenario, str(tmp_path), on_tune(), SweepProgress()).outcomes().to_pylist()
    assert [row["status"] for row in rows] == ["finished", "stopped", "stopped"]
    assert [row["rounds"] < 6 for row in rows] == [False, True, True]


@pytest.mark.slow
@pytest.mark.engine
def test_a_tune_script_of_ones_own_is_told_of_every_round(ray_session: None, tmp_path: Path) -> None:
    ACTORS.end_idle()
    scenario = scenarios.parse(BASE, changes=["arms={none: []}"])
    tuner = tune.Tuner(
        trainable(scenario),
        param_space={"training.lr": tune.grid_search([0.05, 0.2])},
        tune_config=tune.TuneConfig(max_concurrent_trials=1, reuse_actors=True),
        run_config=tune.RunConfig(storage_path=str(tmp_path), verbose=0),
    )
    results = tuner.fit()
    assert not results.errors
    frame = results.get_best_result("test_accuracy", "max").metrics_dataframe
    assert list(frame["rounds"]) == [1, 2]
    assert {"train_loss", "test_loss", "test_accuracy", "psnr", "ssim", "label_accuracy"} <= set(frame)


@pytest.mark.slow
@pytest.mark.engine
def test_tensorboard_gets_every_round(ray_session: None, tmp_path: Path) -> None:
    text = "fields: {training.lr: [0.1]}, trackers: {tensorboard: {}}"
    folder = sweeps.sweep(parsed(text, "arms={none: []}"), str(tmp_path), on_tune(), SweepProgress())
    assert list(Path(folder.url).glob("tune/**/events.out.tfevents*"))


@pytest.mark.parametrize("package", ["mlflow", "wandb"])
def test_a_tracker_without_its_package_is_told(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # importing it raises ImportError
    with pytest.raises(MissingExtraError):
        trackers._check(package)


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.usefixtures("ray_session")
def test_a_killed_sweep_resumes_to_the_same_table(swept: SweepFolder, scenario: Scenario, tmp_path: Path) -> None:
    path = tmp_path / "killed.yaml"
    path.write_text(scenario.dump())
    command = [sys.executable, "-m", "rayfed", "sweep", str(path), "--out", str(tmp_path / "runs")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=os.environ, start_new_session=True)
    until = time.monotonic() + 240
    while not list(tmp_path.glob("runs/*/outcomes.parquet")) and time.monotonic() < until:
        time.sleep(0.2)
    process.send_signal(signal.SIGKILL)
    process.wait()
    [url] = tmp_path.glob("runs/*")
    before = {row["trial"] for row in SweepFolder.open(str(url)).outcomes().to_pylist()}
    assert 0 < len(before) < 8
    seen = Seen()
    folder = sweeps.resume(str(url), False, on_tune(), seen)
    assert seen.rows.keys().isdisjoint(before)
    assert folder.outcomes().drop_columns(TIMED).equals(swept.outcomes().drop_columns(TIMED))
