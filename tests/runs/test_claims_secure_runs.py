"""What is claimed of secure runs (`privacy.secure`), seen from outside: only a key that clients know repeats one."""

from __future__ import annotations

import json
import pickle
import stat
from pathlib import Path
from typing import Any

import pytest

from rayfed import scenario as scenarios
from rayfed.errors import RunError
from rayfed.results.sweep_folder import SweepFolder
from rayfed.runs import runner
from rayfed.runs.sweeps import SweepRecorder, make_trials
from rayfed.scenario import Scenario
from rayfed.simulation.executors.local import local
from rayfed.simulation.progress import Progress, SweepProgress
from rayfed.store import checkpoint, run_key
from rayfed.store.checkpoint import Checkpoint
from rayfed.store.folder import RunFolder
from tests.helpers.progress_fixtures import Interrupted
from tests.helpers.run_fixtures import Noting, Spied, assert_same_bits, spied_launch, weights

pytestmark = pytest.mark.usefixtures("reports")

TEXT = """
name: secure
data: {name: digits, size: 8, train_samples: 200, test_samples: 50}
model: {name: mlp, hidden: [8]}
training: {batch_size: 8, steps: 2, sampling: poisson}
federation: {rounds: 2, clients: 8, clients_per_round: 6, sampling: poisson}
privacy: {secure: true}
arms:
  local: [{name: gaussian, sigma: 0.01, clip: 1}]
  central: [{name: dp_fedavg, noise_multiplier: 0.01}]
resources: {clients: {actors: 1}, attackers: {actors: 1}}
attacks:
  - {name: inverting_gradients, rounds: [1], observes: gradient, iterations: 5}
"""


def left_by(scenario: Scenario, out: Path, state: str, key: bool) -> RunFolder:
    """A folder as a run of two rounds leaves it that came to this state, with its key or without."""
    folder = RunFolder.create(str(out), "t")
    folder.write_text("scenario.yaml", scenario.dump())
    status = {"kind": "training", "state": state, "rounds_done": 2, "rounds": 2, "error": state}
    folder.write_text("status.json", json.dumps(status))
    folder.write_text("report.html", "")
    checkpoint.save(folder, Checkpoint(1, {"local": {}, "central": {}}, {}))
    if key:
        run_key.save_key(folder, scenario.run_key)
    return folder


@pytest.fixture(scope="module")
def scenario() -> Scenario:
    return scenarios.parse(TEXT)


@pytest.fixture(scope="module")
def spied(ray_session: None, scenario: Scenario, tmp_path_factory: pytest.TempPathFactory) -> Spied:
    return spied_launch(scenario, tmp_path_factory.mktemp("runs"))


@pytest.mark.engine
def test_the_key_of_a_secure_run_reaches_neither_server_nor_attacker(spied: Spied, scenario: Scenario) -> None:
    """Nor does what clients derive from it: the server is told the keys of its own noise, an attacker none."""
    purposes: list[tuple[Any, ...]] = [("encryption", arm) for arm in scenario.played]
    purposes += [("clients", round) for round in (0, 1)]
    for client in range(8):
        purposes += [("client", r, client, *of) for r in (0, 1) for of in (["order"], ["defences", "local"])]
        purposes.append(("private", client))
    secrets = {"the run's key": scenario.run_key} | {str(p): scenario.secret(*p) for p in purposes}
    told = [given for name, given in spied.calls if name.startswith(("ServerActor", "AttackerActor"))]
    assert len(told) > 4
    message = pickle.dumps([told, spied.put])
    assert not [name for name, secret in secrets.items() if secret in message or secret.hex().encode() in message]
    for process, (texts, numbers) in spied.held.items():
        assert len(texts) > 1000, process
        for name, secret in secrets.items():
            assert not any(secret in text for text in texts), f"{process} holds {name}"
            assert int.from_bytes(secret) not in numbers, f"{process} holds {name}"
    assert scenario.secret("server", 0, "central") in message  # so a key that is sent is found


@pytest.fixture(scope="module")
def whole(scenario: Scenario, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return runner.launch(scenario, str(tmp_path_factory.mktemp("runs")), local, Progress())


@pytest.mark.engine
def test_a_secure_run_leaves_no_key_and_says_that_it_cannot_be_repeated(whole: RunFolder, scenario: Scenario) -> None:
    files = [path for path in Path(whole.root).rglob("*") if path.is_file()]
    assert len(files) > 10
    for path in files:
        content = path.read_bytes()
        assert scenario.run_key not in content, path
        assert scenario.run_key.hex().encode() not in content, path
    assert whole.read_mapping("environment.json")["reproducible"] is False
    assert "cannot be repeated" in whole.read_text("log.txt")
    with pytest.raises(RunError, match="all 2 rounds are finished; nothing to resume"):
        runner.resume(whole.url, local, Progress())


@pytest.mark.engine
def test_a_resumed_secure_run_ends_with_the_same_bits(whole: RunFolder, scenario: Scenario, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        runner.launch(scenario, str(tmp_path), local, Interrupted())
    [path] = tmp_path.iterdir()
    key = path / run_key.FILE
    assert key.read_bytes() == scenario.run_key
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert stat.S_IMODE(key.parent.stat().st_mode) == 0o700
    runner.resume(str(path), local, Progress())
    assert_same_bits(weights(RunFolder.open(str(path))), weights(whole))
    assert not key.exists()


@pytest.mark.engine
def test_two_secure_launches_differ(whole: RunFolder, tmp_path: Path) -> None:
    noting = Noting()
    again = runner.launch(scenarios.parse(TEXT, changes=["attacks=[]"]), str(tmp_path), local, noting)
    assert any("cannot be repeated" in note and "run.key" in note for note in noting.notes)
    ours, theirs = weights(again), weights(whole)
    for arm in ours:
        assert not ours[arm]["weights"].keys() ^ theirs[arm]["weights"].keys()
        assert any((w != theirs[arm]["weights"][name]).any() for name, w in ours[arm]["weights"].items()), arm


@pytest.mark.parametrize("key", [False, True])
def test_a_finished_secure_run_has_nothing_to_resume_and_no_key(key: bool, scenario: Scenario, tmp_path: Path) -> None:
    """A key is there where the process died between its last two steps."""
    folder = left_by(scenario, tmp_path, "finished", key)
    with pytest.raises(RunError, match="all 2 rounds are finished; nothing to resume"):
        runner.resume(folder.url, local, Progress())
    assert not folder.exists(run_key.FILE)


def test_a_secure_run_that_has_lost_its_key_cannot_go_on(scenario: Scenario, tmp_path: Path) -> None:
    folder = left_by(scenario, tmp_path, "interrupted", key=False)
    with pytest.raises(RunError, match=r"privacy.secure"):
        runner.resume(folder.url, local, Progress())


@pytest.mark.parametrize("state", ["finished", "failed"])
def test_a_trial_that_is_not_played_again_has_no_key(state: str, scenario: Scenario, tmp_path: Path) -> None:
    """One that failed keeps it: `resume --failed` plays it on."""
    folder = left_by(scenario, tmp_path, state, key=True)
    if state == "failed":
        with pytest.raises(RunError, match="failed"):
            runner.launch_in(folder, scenario, local, Progress())
    else:
        runner.launch_in(folder, scenario, local, Progress())
    assert folder.exists(run_key.FILE) is (state == "failed")


@pytest.mark.parametrize("error", [None, "DataError: no images"])
def test_a_sweep_removes_the_key_of_a_trial_that_will_not_go_on(error: str | None, tmp_path: Path) -> None:
    swept = scenarios.parse(TEXT + "sweep: {fields: {training.lr: [0.1, 0.2]}, scheduler: asha}\n")
    files = RunFolder.create(str(tmp_path), "t")
    files.write_text("scenario.yaml", swept.dump())
    sweep = SweepFolder(files)
    trial = sweep.trial("trials/0000-0")
    run_key.save_key(trial, bytes(32))
    recorder = SweepRecorder(swept, sweep, [], [], SweepProgress())
    [one] = make_trials({"index": 0, "arm": "local", "values": {"training.lr": 0.1}, "repeats": [0]})
    recorder.end([one], error)
    assert [row["status"] for row in recorder.rows] == ["failed" if error else "stopped"]
    assert trial.exists(run_key.FILE) is (error is not None)
