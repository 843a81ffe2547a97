"""Drivers that die, or are taken over, at every operation on files: the run ends as one that nobody disturbed.

Files are operated on by way of `Operations`, which counts what changes something and stops a driver at any of them: no
operation of its own happens after that, as when a process is killed. On a local disk a write is three moments: the
temporary file is there with half its content, then with all of it, and then it has been renamed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from rayfed import scenario as scenarios
from rayfed.errors import LeaseError
from rayfed.results.sweep_folder import SweepFolder
from rayfed.runs import runner, sweeps
from rayfed.runs.local_sweep import local_sweep
from rayfed.scenario import Scenario
from rayfed.simulation.executors.local import local
from rayfed.simulation.progress import Progress, SweepProgress
from rayfed.store import client_states, files, lease
from rayfed.store.folder import RunFolder
from tests.helpers.faults import differences

pytestmark = pytest.mark.engine

TEXT = """
name: t
data: {name: digits, size: 8, train_samples: 40, test_samples: 10}
model: {name: mlp, hidden: [4]}
training: {batch_size: 8}
federation: {rounds: 2, clients: 2}
arms: {pruned: [{name: prune, ratio: 0.7, error_feedback: true}]}
attacks: [{name: analytic, observes: gradient, rounds: [1], victims: 1}]
resources: {clients: {actors: 1}, attackers: {actors: 1}}
"""


class Killed(BaseException):
    """The driver is dead: nothing catches this."""


At = Callable[[int, str], None]


class Operations:
    """Operations on files: counted, and at one of them something happens.

    `at(number, path)` is called at each moment; where it raises, nothing comes after it.
    """

    def __init__(self, patch: pytest.MonkeyPatch, at: At) -> None:
        self.at, self.moments, self.dead = at, 0, False
        self.late: Callable[[], Any] | None = None
        """What the driver had under way when it was stopped."""
        for system in (LocalFileSystem, MemoryFileSystem):
            for name in ("rm_file", "pipe_file"):
                self._wrap(patch, system, name)
        patch.setattr(files, "os", self)
        patch.setattr(client_states, "_THREADS", 1)  # so that the n-th operation is the same every time
        self.O_RDONLY, self.O_DIRECTORY, self.path = os.O_RDONLY, os.O_DIRECTORY, os.path

    def moment(self, path: str, late: Callable[[], Any] | None = None) -> None:
        if self.dead:
            raise Killed
        self.moments += 1
        try:
            self.at(self.moments, path)
        except Killed:
            self.dead, self.late = True, late
            raise

    def _wrap(self, patch: pytest.MonkeyPatch, system: type, name: str) -> None:
        act = getattr(system, name)

        def operation(fs: Any, path: str, *args: Any, **kwargs: Any) -> Any:
            self.moment(path, lambda: act(fs, path, *args, **kwargs))
            done = act(fs, path, *args, **kwargs)
            self.moment("")
            return done

        patch.setattr(system, name, operation)

    # in the place of the module `os` in rayfed.store.files

    def open(self, path: Any, flags: int, mode: int = 0o777) -> int:
        if self.dead:
            raise Killed
        return os.open(path, flags, mode)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def fsync(self, descriptor: int) -> None:
        if not os.path.isfile(f"/proc/self/fd/{descriptor}"):
            return  # of a folder: nobody sees the difference without a power cut
        size = os.fstat(descriptor).st_size
        try:
            self.moment("")
        except Killed:
            os.ftruncate(descriptor, size // 2)
            raise

    def replace(self, temporary: Any, path: Any) -> None:
        self.moment(str(path), lambda: os.replace(temporary, path))
        os.replace(temporary, path)
        self.moment("")

    def unlink(self, path: Any) -> None:
        if self.dead:
            raise Killed
        os.unlink(path)


def dies(at: int) -> At:
    def act(moment: int, _: str) -> None:
        if moment == at:
            raise Killed

    return act


def parsed(*changes: str) -> Scenario:
    return scenarios.parse(TEXT, changes=changes)


@pytest.fixture(autouse=True)
def _plain_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports without their plots, which take longer than the run."""
    monkeypatch.setattr(
        "rayfed.report.html.run.write_report", lambda folder: folder.write_text("report.html", "a report")
    )
    monkeypatch.setattr(lease, "RENEWAL", 1e6)  # no operation comes by the clock
    monkeypatch.setattr(os, "fsync", lambda _: None)  # nobody cuts the power


@pytest.fixture
def memory() -> Iterator[str]:
    """A file system on which each put and each removal is one request, as on an object store."""
    yield "memory://crashes"
    MemoryFileSystem().rm("/crashes", recursive=True)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A run that nobody disturbed."""
    return runner.launch(parsed(), str(tmp_path_factory.mktemp("alone")), local, Progress()).url


def launch(out: Path | str) -> None:
    runner.launch(parsed(), str(out), local, Progress())


def resume(out: Path | str) -> None:
    [run] = runs_in(out)
    runner.resume(run.url, local, Progress())


def runs_in(out: Path | str) -> list[RunFolder]:
    """The folders of runs that have got as far as their scenario."""
    there = RunFolder.at(str(out))
    folders = (RunFolder(there.fs, f"{there.root}/{name}") for name in there.folders(""))
    return [folder for folder in folders if folder.exists("scenario.yaml")]


def is_finished(run: RunFolder) -> bool:
    state = run.read_mapping("status.json")["state"] if run.exists("status.json") else None
    return state == "finished" and run.exists("report.html")


def assert_as(expected: str, out: Path | str) -> None:
    """A run has one history, and nothing lies about that does not belong to it."""
    [run] = runs_in(out)
    assert is_finished(run)
    assert not differences(run.url, expected)
    assert len(run.files("checkpoint")) == 2
    assert len(run.folders("checkpoint/clients")) == 1
    assert len(run.files(f"checkpoint/clients/{run.folders('checkpoint/clients')[0]}")) == 2
    lying = [path for path in Path(run.url).rglob("*.tmp") if path.parent.name != "lease"]
    assert not lying  # who dies as it says that it is done leaves that behind


def moments(act: Callable[[], object]) -> int:
    """The number of moments in what is done."""
    with pytest.MonkeyPatch.context() as patch:
        counted = Operations(patch, lambda *_: None)
        act()
    return counted.moments


def killed(at: At, act: Callable[[], object]) -> Operations:
    """Do something whose driver dies at a moment."""
    with pytest.MonkeyPatch.context() as patch:
        operations = Operations(patch, at)
        with pytest.raises(Killed):
            act()
    return operations


def go_on(out: Path | str) -> None:
    """Do what a user does after a crash: resume, or launch again where there was no run yet."""
    found = runs_in(out)
    if not found:
        launch(out)
    elif not is_finished(found[0]):
        resume(out)


EVERY = [pytest.param(3, id="every third"), pytest.param(1, id="all", marks=pytest.mark.slow)]
"""Moments that are played: neighbours mostly stand for the same."""


@pytest.mark.parametrize("every", EVERY)
def test_a_run_that_is_killed_at_any_moment(alone: str, tmp_path: Path, every: int) -> None:
    total = moments(lambda: launch(tmp_path / "counted"))
    assert total > 90
    for at in range(1, total + 1, every):
        out = tmp_path / str(at)
        killed(dies(at), lambda out=out: launch(out))
        go_on(out)
        assert_as(alone, out)
    print(f"a run: killed at {total // every} moments")


@pytest.mark.slow
def test_a_resume_that_is_killed_at_any_moment(alone: str, tmp_path: Path) -> None:
    """The first driver has died as it was to say that its second round counts: all else of the round is there."""
    pointers = list[int]()

    def second_pointer(moment: int, path: str) -> None:
        if path.endswith("latest.json"):
            pointers.append(moment)
            if len(pointers) == 2:
                raise Killed

    killed(second_pointer, lambda: launch(tmp_path / "died"))
    shutil.copytree(tmp_path / "died", tmp_path / "counted")
    total = moments(lambda: resume(tmp_path / "counted"))
    assert total > 60
    for at in range(1, total + 1):
        out = tmp_path / str(at)
        shutil.copytree(tmp_path / "died", out)
        killed(dies(at), lambda out=out: resume(out))
        go_on(out)
        assert_as(alone, out)
    print(f"a resume: killed at {total} moments")


TIMED = ["train_seconds", "attack_seconds"]
SWEPT = ("sweep={fields: {training.lr: [0.1, 0.2]}}", "federation.rounds=1", "attacks=[]")


def swept(out: Path) -> None:
    """Play a sweep of two trials, from wherever one was left."""
    found = runs_in(out)
    if not found:
        sweeps.sweep(parsed(*SWEPT), str(out), local_sweep, SweepProgress())
    elif SweepFolder(found[0]).outcomes().num_rows < 2:
        sweeps.resume(found[0].url, False, local_sweep, SweepProgress())


@pytest.mark.slow
def test_a_sweep_that_is_killed_at_any_moment(tmp_path: Path) -> None:
    total = moments(lambda: swept(tmp_path / "counted"))
    assert total > 100
    [expected] = map(SweepFolder, runs_in(tmp_path / "counted"))
    for at in range(1, total + 1):
        out = tmp_path / str(at)
        killed(dies(at), lambda out=out: swept(out))
        swept(out)
        [sweep] = map(SweepFolder, runs_in(out))
        assert sweep.outcomes().drop_columns(TIMED).equals(expected.outcomes().drop_columns(TIMED))
        for trial in ("trials/0000-0", "trials/0001-0"):
            assert not differences(sweep.trial(trial).url, expected.trial(trial).url)
    print(f"a sweep and its trials: killed at {total} moments")


def overtake(out: str) -> None:
    """Another driver takes the run over and plays it to its end, where there is something left."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lease, "_lives", lambda *_: False)
        if runs_in(out) and not is_finished(runs_in(out)[0]):
            resume(out)


@pytest.mark.slow
def test_a_driver_that_is_taken_over_at_any_moment_and_goes_on(alone: str, memory: str) -> None:
    """What it had under way arrives when the other has ended; then it notices."""
    total, stopped = moments(lambda: launch(f"{memory}/counted")), 0
    for at in range(1, total + 1):
        out = f"{memory}/{at}"

        def act(moment: int, _: str, at: int = at, out: str = out) -> None:
            if moment == at:
                overtake(out)

        with pytest.MonkeyPatch.context() as patch:
            Operations(patch, act)
            try:
                launch(out)
            except LeaseError:
                stopped += 1
        [run] = runs_in(out)
        assert not differences(run.url, alone)
    assert stopped > total - 20  # it had no scenario, or nothing was left
    print(f"taken over at {total} moments; {stopped} times there was something left to stop")


@pytest.mark.parametrize("every", EVERY)
def test_what_arrives_late_changes_nothing(alone: str, memory: str, every: int) -> None:
    """One driver is stopped at each moment; what it had under way arrives while the next one plays, or as it begins."""
    total, arrived = moments(lambda: launch(f"{memory}/counted")), 0
    for at in range(1, total + 1, every):
        out = f"{memory}/{at}"
        stopped = killed(dies(at), lambda out=out: launch(out))
        if stopped.late is None or not runs_in(out) or is_finished(runs_in(out)[0]):
            continue
        arrived += 1

        def arrives(moment: int, _: str, late: Callable[[], Any] = stopped.late, at: int = at) -> None:
            if moment == 1 + at % 40:
                with suppress(FileNotFoundError):  # whoever sent it is told, if anybody
                    late()

        with pytest.MonkeyPatch.context() as patch:
            Operations(patch, arrives)
            resume(out)
        [run] = runs_in(out)
        assert not differences(run.url, alone)
    assert arrived > 20 / every
    print(f"{arrived} requests arrived late")
