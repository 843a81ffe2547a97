"""How a run ends: one word in status.json, an exit code, and what to do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from typer.testing import CliRunner

from actors.ray_errors import in_words_for_people
from rayfed import scenario as scenarios
from rayfed.cli import app
from rayfed.cli.signals import end_on_signals
from rayfed.errors import Killed, LeaseError, RunError
from rayfed.results.loading import open_results
from rayfed.runs import runner
from rayfed.simulation.executors.local import local
from rayfed.simulation.progress import Progress
from rayfed.store import exits
from rayfed.store.folder import RunFolder
from tests.helpers.progress_fixtures import Interrupted

pytestmark = pytest.mark.usefixtures("reports")

TEXT = """
name: t
data: {name: digits, size: 8, train_samples: 60, test_samples: 20}
model: {name: mlp, hidden: [8]}
training: {batch_size: 8, steps: 1}
federation: {rounds: 2, clients: 3}
"""


@pytest.mark.parametrize(
    ("error", "word"),
    [
        (KeyboardInterrupt(), "interrupted"),
        (SystemExit(), "interrupted"),
        (Killed(signal.SIGTERM), "killed"),
        (LeaseError("taken"), "fenced"),
        (RunError("no disk"), "failed"),
        (ZeroDivisionError(), "failed"),
    ],
)
def test_every_end_is_one_word_with_what_to_do(error: BaseException, word: str) -> None:
    assert exits.classify_exit(error) == word


@pytest.fixture
def default_signals(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(Killed, "came", None)
    ours = [signal.SIGTERM, signal.SIGHUP]
    before = {number: signal.signal(number, signal.SIG_DFL) for number in ours}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("default_signals")
def test_only_the_first_signal_counts() -> None:
    """A closing terminal sends two, and status and report are written between them."""
    end_on_signals()
    with pytest.raises(Killed, match="killed by SIGHUP"):
        signal.raise_signal(signal.SIGHUP)
    signal.raise_signal(signal.SIGHUP)
    signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize("when", ["atexit.register(end)", "cli.app = end"])
def test_a_signal_outside_of_a_command_ends_the_process_without_a_traceback(when: str) -> None:
    """Behind the end of a command, as where Ray stops its processes, and before one has begun."""
    code = (
        "import atexit, os, signal, sys\nfrom rayfed import cli\nsys.argv = ['rayfed', '--version']\n"
        f"def end():\n    os.kill(os.getpid(), signal.SIGTERM)\n{when}\ncli.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.returncode in (143, -signal.SIGTERM), "a shell calls either 143"


@pytest.mark.usefixtures("default_signals")
def test_who_was_told_to_ignore_hangups_does() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    end_on_signals()
    signal.raise_signal(signal.SIGHUP)


@pytest.mark.engine
@pytest.mark.parametrize(
    ("executor", "how", "code", "word"),
    [
        ("local", signal.SIGINT, 130, "interrupted"),
        ("local", signal.SIGTERM, 143, "killed"),
        ("local", signal.SIGHUP, 129, "killed"),
        ("ray", signal.SIGTERM, 143, "killed"),
    ],
)
def test_a_run_that_is_told_to_end_writes_how_it_ended(
    executor: str, how: signal.Signals, code: int, word: str, tmp_path: Path
) -> None:
    (tmp_path / "t.yaml").write_text(TEXT.replace("rounds: 2", "rounds: 4000"))
    command = [sys.executable, "-m", "rayfed", "launch", str(tmp_path / "t.yaml"), "--executor", executor]
    process = subprocess.Popen(
        [*command, "--out", str(tmp_path / "runs")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(how, signal.SIG_DFL),  # background jobs ignore SIGINT, and nohup's SIGHUP
    )
    deadline = time.monotonic() + 300
    while not list(tmp_path.glob("runs/*/rounds/part-00001.parquet")):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    os.kill(process.pid, how)
    _, errors = process.communicate(timeout=300)
    [folder] = (tmp_path / "runs").iterdir()
    status = json.loads((folder / "status.json").read_text())
    assert (process.returncode, status["state"]) == (code, word), errors
    assert f"`rayfed resume {folder}`" in errors


@pytest.mark.engine
@pytest.mark.usefixtures("ray_session", "default_signals")
def test_a_signal_that_comes_while_ray_waits_is_named() -> None:
    """Ray makes a plain KeyboardInterrupt of it."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Ray has set its own
    end_on_signals()
    asleep = ray.remote(lambda: time.sleep(10)).options(num_cpus=0).remote()
    threading.Timer(1, signal.pthread_kill, (threading.main_thread().ident, signal.SIGTERM)).start()
    with pytest.raises(Killed, match="killed by SIGTERM"), in_words_for_people():
        ray.get(asleep)
    ray.cancel(asleep, force=True)


class Taken(Progress):
    """Another driver takes the run over after its first round, and this one notices."""

    def starting(self, scenario: Any, folder: RunFolder, where: str) -> None:
        self.folder = folder

    def round_done(self, *tables: Any) -> None:
        self.folder.write_text("status.json", "another's")
        self.folder.write_text("log.txt", "another's")
        raise LeaseError("another driver has this run")


def test_a_fenced_driver_writes_nothing_any_more(tmp_path: Path) -> None:
    with pytest.raises(LeaseError):
        runner.launch(scenarios.parse(TEXT), str(tmp_path), local, Taken())
    [folder] = tmp_path.iterdir()
    assert (folder / "status.json").read_text() == (folder / "log.txt").read_text() == "another's"
    assert not (folder / "report.html").exists()


def test_a_fenced_driver_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayfed.report.terminal.run.RunView.round_done", lambda view, *tables: _fence(view._folder))
    (tmp_path / "t.yaml").write_text(TEXT)
    command = ["launch", str(tmp_path / "t.yaml"), "--executor", "local", "--out", str(tmp_path / "runs")]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 2, done.output
    assert "the run is fenced; another driver has taken over the run" in " ".join(done.output.split())


def _fence(folder: RunFolder) -> None:
    raise LeaseError(f"{folder.url}: another driver has this run")


def test_a_run_whose_driver_died_without_a_word_was_killed(tmp_path: Path) -> None:
    dying = f"""
import os
from rayfed.store.folder import RunFolder
from rayfed.store.lease import hold_lease
folder = RunFolder.create({str(tmp_path)!r}, "t")
with hold_lease(folder, print) as held:
    held.write_text("scenario.yaml", "name: t")
    held.write_text("status.json", '{{"state": "running"}}')
    print(folder.url, flush=True)
    input()
    os._exit(1)
"""
    with subprocess.Popen([sys.executable, "-c", dying], stdin=-1, stdout=-1, text=True) as process:
        assert process.stdin
        assert process.stdout
        folder = RunFolder.open(process.stdout.readline().strip())
        assert exits.read_status(folder)["state"] == "running"
        process.communicate("\n")
    assert exits.read_status(folder)["state"] == open_results(folder.url).status["state"] == "killed"


@pytest.mark.engine
def test_the_last_table_of_a_resumed_run_is_of_the_whole_run(tmp_path: Path) -> None:
    attacked = TEXT + "attacks: [{name: idlg, rounds: [0], observes: gradient, iterations: 3}]\n"
    with pytest.raises(KeyboardInterrupt):
        runner.launch(scenarios.parse(attacked), str(tmp_path), local, Interrupted())
    [folder] = tmp_path.iterdir()
    done = CliRunner().invoke(app, ["resume", str(folder), "--executor", "local"])
    assert done.exit_code == 0, done.output
    assert "Leakage" in done.output
