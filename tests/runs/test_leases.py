"""One driver at a time: who may play a run folder, who takes it over, and what becomes of who has lost it."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from typer.testing import CliRunner

from rayfed import scenario as scenarios
from rayfed.cli import app
from rayfed.errors import LeaseError, RunError
from rayfed.runs import runner, sweeps
from rayfed.runs.local_sweep import local_sweep
from rayfed.scenario import Scenario
from rayfed.simulation.executors.local import local
from rayfed.simulation.progress import Progress, SweepProgress
from rayfed.store import lease
from rayfed.store.folder import RunFolder
from rayfed.store.lease import hold_lease
from tests.helpers.faults import differences
from tests.helpers.run_fixtures import Noting

TEXT = """
name: t
data: {name: digits, size: 8, train_samples: 60, test_samples: 20}
model: {name: mlp, hidden: [4]}
training: {batch_size: 8}
federation: {rounds: 3, clients: 3, cohort_size: 1}
arms: {none: [], pruned: [{name: prune, ratio: 0.7, error_feedback: true}]}
resources: {clients: {actors: 1}, attackers: {actors: 1}}
"""
NOON = datetime(2025, 3, 1, 12, 30, 5)


def parsed(*changes: str) -> Scenario:
    return scenarios.parse(TEXT, changes=changes)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run that nobody disturbed."""
    return runner.launch(parsed(), str(tmp_path_factory.mktemp("alone")), local, Progress())


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder.create(str(tmp_path), "t", NOON)
    made.write_text("scenario.yaml", "name: t\n")
    return made


class Meanwhile(Noting):
    """Does something in the middle of a round, once."""

    def __init__(self, act: Callable[[], object], round: int = 1) -> None:
        super().__init__()
        self.act, self.round, self.acted = act, round, False

    def clients_done(self, round: int, done: int, total: int) -> None:
        if round == self.round and not self.acted:
            self.acted = True
            self.act()


def only(folder: Path) -> Path:
    [path] = folder.iterdir()
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("gone", ["checkpoint", "lease", "checkpoint lease"])
def test_a_driver_whose_folder_is_changed_does_not_go_on(gone: str, tmp_path: Path) -> None:
    def change() -> None:
        for name in gone.split():
            shutil.rmtree(only(tmp_path) / name)

    with pytest.raises(RunError, match=r"was changed during the run|this driver lost its lease"):
        runner.launch(parsed(), str(tmp_path), local, Meanwhile(change))
    if "lease" not in gone:
        assert json.loads((only(tmp_path) / "status.json").read_text())["state"] == "failed"


def test_an_older_copy_that_is_put_back_is_not_gone_on_from(tmp_path: Path) -> None:
    class Restored(Noting):
        def clients_done(self, round: int, done: int, total: int) -> None:
            run = only(tmp_path / "runs")
            if round == 1 and not (tmp_path / "copy").exists():
                shutil.copytree(run / "checkpoint", tmp_path / "copy")
            if round == 2:
                shutil.rmtree(run / "checkpoint")
                shutil.copytree(tmp_path / "copy", run / "checkpoint")

    with pytest.raises(RunError, match="was changed during the run"):
        runner.launch(parsed(), str(tmp_path / "runs"), local, Restored())


@pytest.mark.engine
def test_two_drivers_of_one_number_do_not_play_one_folder(alone: RunFolder, tmp_path: Path) -> None:
    """Whoever removes the lease like a lock file and resumes has the run; the driver before stops."""

    def other() -> None:
        shutil.rmtree(only(tmp_path) / "lease")
        runner.resume(str(only(tmp_path)), local, Progress())

    with pytest.raises(LeaseError):
        runner.launch(parsed(), str(tmp_path), local, Meanwhile(other))
    assert not differences(only(tmp_path), Path(alone.url))


@pytest.mark.engine
def test_numbers_go_on_where_leases_are_lost(alone: RunFolder, tmp_path: Path) -> None:
    for _ in range(2):
        with suppress(KeyboardInterrupt):
            stop = Meanwhile(_interrupted, 2 if list(tmp_path.iterdir()) else 1)
            if list(tmp_path.iterdir()):
                runner.resume(str(only(tmp_path)), local, stop)
            else:
                runner.launch(parsed(), str(tmp_path), local, stop)
        shutil.rmtree(only(tmp_path) / "lease")
    runner.resume(str(only(tmp_path)), local, Progress())
    assert not differences(only(tmp_path), Path(alone.url))


def _interrupted() -> None:
    raise KeyboardInterrupt


def test_a_copy_of_the_drivers_process_writes_nothing(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    with hold_lease(folder, print) as held:
        held.write_text("log.txt", "")
        with monkeypatch.context() as patched:
            patched.setattr(os, "getpid", lambda: -1)
            with pytest.raises(LeaseError, match="is a forked copy"):
                held.write_text("log.txt", "")
            pickle.loads(pickle.dumps(held)).write_text("log.txt", "trial")  # as it is sent to a trial
    assert folder.read_text("log.txt") == "trial"


@pytest.mark.usefixtures("reports")
def test_a_live_run_is_not_resumed(alone: RunFolder, tmp_path: Path) -> None:
    said = list[str]()

    def resume() -> None:
        before = contents(only(tmp_path))
        result = CliRunner().invoke(app, ["resume", str(only(tmp_path)), "--executor", "local"])
        said.append(result.output)
        assert result.exit_code == 2
        assert contents(only(tmp_path)) == before

    runner.launch(parsed(), str(tmp_path), local, Meanwhile(resume))
    assert "is in use by process" in said[0]
    assert not differences(only(tmp_path), Path(alone.url))


def test_a_live_sweep_is_not_resumed(tmp_path: Path) -> None:
    refused = list[str]()

    class View(SweepProgress):
        def trial_done(self, *_: Any) -> None:
            if not refused:
                with pytest.raises(LeaseError) as caught:
                    sweeps.resume(str(only(tmp_path)), False, local_sweep, SweepProgress())
                refused.append(str(caught.value))

    swept = parsed("sweep={fields: {training.lr: [0.1, 0.2]}}", "federation.rounds=1")
    found = sweeps.sweep(swept, str(tmp_path), local_sweep, View())
    assert "is in use by process" in refused[0]
    assert set(found.outcomes()["status"].to_pylist()) == {"finished"}


@pytest.mark.usefixtures("reports")
def test_who_is_taken_over_stops_and_writes_nothing(
    alone: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver is silent, as one that is stopped or cut off; another takes over and ends before it goes on."""
    monkeypatch.setattr(lease, "_lives", lambda *_: False)
    left, other = dict[str, bytes](), Noting()

    def overtake() -> None:
        runner.resume(str(only(tmp_path)), local, other)
        left.update(contents(only(tmp_path)))

    with pytest.raises(LeaseError, match=r"taken over by process \d+ on .* has written nothing since"):
        runner.launch(parsed(), str(tmp_path), local, Meanwhile(overtake))
    assert contents(only(tmp_path)) == left
    assert json.loads(left["status.json"])["state"] == "finished"
    [note] = other.notes
    assert "has died or does not respond" in note
    assert note in left["log.txt"].decode()
    assert not differences(only(tmp_path), Path(alone.url))


DIES = """
import os, sys
from rayfed.store.folder import RunFolder
from rayfed.store.lease import hold_lease
with hold_lease(RunFolder.at(sys.argv[1]), print) as held:
    held.write_text("note", "x")
    os._exit(9)
"""


def test_the_lease_of_a_dead_process_is_taken_over_at_once(folder: RunFolder) -> None:
    process = subprocess.Popen([sys.executable, "-c", DIES, folder.url])
    process.wait()
    notes = list[str]()
    with hold_lease(folder, notes.append) as held:
        assert held.token == 2
        assert notes == [
            f"process {process.pid} on {lease.Holder().host}, the previous driver, has died or does not respond: this "
            "driver continues"
        ]
        with pytest.raises(LeaseError, match=f"in use by process {lease.Holder().pid} "), hold_lease(folder, print):
            pass
    with hold_lease(folder, notes.append) as held:
        assert held.token == 3
    assert len(notes) == 1  # who has ended leaves nothing to take over


def test_unfinished_files_of_a_dead_driver_are_removed(folder: RunFolder) -> None:
    unfinished = [f"{name}.{'0' * 32}.tmp" for name in (".status.json", "checkpoint/clients/.run.key")]
    for name in (*unfinished, ".mine.tmp"):
        folder.write_bytes(name, b"half")
    with hold_lease(folder, print), hold_lease(folder, print, told=True) as held:
        assert not [name for name in unfinished if held.exists(name)]
    assert folder.exists(".mine.tmp")


@pytest.mark.parametrize("alive", [True, False])
def test_a_driver_elsewhere_is_watched(alive: bool, folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "_process", lambda _: None)  # as where the system says nothing of processes
    monkeypatch.setattr(lease, "RENEWAL", 0.01 if alive else 1e6)
    monkeypatch.setattr(lease, "PATIENCE", 30.0 if alive else 0.05)
    with hold_lease(folder, print) as held:
        if alive:
            with pytest.raises(LeaseError), hold_lease(folder, print):
                pass
            held.write_text("note", "mine")
        else:
            with hold_lease(folder, print) as other:
                other.write_text("note", "its")
            with pytest.raises(LeaseError):
                held.write_text("note", "mine")
            with pytest.raises(LeaseError):
                held.remove("note")
    assert folder.read_text("note") == ("mine" if alive else "its")


def test_a_lease_that_was_never_written_is_taken_over(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "PATIENCE", 0.05)
    folder.write_bytes("lease/1.json", b"")
    with hold_lease(folder, print) as held:
        assert held.token == 2


def test_what_holds_a_sweep_holds_its_trials(folder: RunFolder) -> None:
    with hold_lease(folder, print) as held:
        trial = RunFolder(folder.fs, f"{folder.root}/trial", held.lease)
        with hold_lease(trial, print, told=True) as playing:
            playing.write_text("note", "x")
            folder.claim("lease/2.json", b"{}")
            with pytest.raises(LeaseError):
                playing.write_text("note", "y")


def test_folders_that_are_made_at_a_time_are_many(tmp_path: Path) -> None:
    made = list[RunFolder]()
    threads = [Thread(target=lambda: made.append(RunFolder.create(str(tmp_path), "t", NOON))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({folder.root for folder in made}) == 8
