"""A local Ray: where it listens, who may read its files, what it leaves, and what is said when it dies."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import ray

from actors import local_ray, ray_files
from rayfed.errors import UserError, plain
from rayfed.runs.recorder import RunRecorder
from rayfed.store.folder import RunFolder
from tests.conftest import REPOSITORY, missing
from tests.helpers import faults
from tests.helpers.processes import in_own_process, user_namespaces

STARTING = local_ray.starting
"""Itself, in whose place tests have nothing."""
COLOURED = "\x1b[36mray::A.big()\x1b[39m (pid=1)\r\n\tLocal disk is \x07full\x9b1m"


def test_messages_lose_their_control_characters() -> None:
    assert plain(COLOURED) == "ray::A.big() (pid=1)\n\tLocal disk is full1m"
    assert plain("tabs\tand\nlines, ünd Ω") == "tabs\tand\nlines, ünd Ω"


@pytest.mark.parametrize("kind", [UserError, ZeroDivisionError])
def test_a_run_folder_has_no_control_characters(kind: type[Exception], tmp_path: Path) -> None:
    folder = RunFolder.create(str(tmp_path), "t")
    with pytest.raises(kind), RunRecorder(folder, "training", 1).recording(0, reports=False):
        raise kind(COLOURED)
    assert folder.read_mapping("status.json")["error"] == f"{kind.__name__}: {plain(COLOURED)}"
    written = folder.read_text("log.txt") + folder.read_text("status.json")
    assert not {"\x1b", "\x07", "\x9b", "\r", "\\u001b", "\\u0007"} & {*written, *written.split()}
    assert "\\u001b" not in written


def test_the_token_is_readable_for_its_owner_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    token = tmp_path / ".ray" / "auth_token"
    ray_files.guard_token()
    assert token.stat().st_mode & 0o777 == 0o600
    assert len(made := token.read_text()) == 64
    token.chmod(0o644)  # as Ray leaves it
    ray_files.guard_token()
    assert (token.stat().st_mode & 0o777, token.read_text()) == (0o600, made)
    token.unlink()
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    ray_files.guard_token()
    assert not token.exists()


HOLDER = (
    "import sys; from pathlib import Path; from actors import ray_files; lock = ray_files._locked(Path(sys.argv[1]))"
)


def test_only_sessions_of_our_dead_drivers_are_removed(tmp_path: Path) -> None:
    """Those of other programs have no mark; that of a driver which lives is locked, whatever its number was before."""
    dead, alive, foreign = (tmp_path / f"session_{name}" for name in ("dead", "alive", "foreign"))
    for folder in (dead, alive, foreign):
        (folder / "ray_spilled_objects").mkdir(parents=True)
        (folder / "ray_spilled_objects" / "one").write_bytes(b"x")
    (tmp_path / "session_latest").symlink_to(alive)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    subprocess.run([sys.executable, "-c", HOLDER, str(dead)], env=environment, check=True)
    living = subprocess.Popen(
        [sys.executable, "-c", f"{HOLDER}; print(flush=True); sys.stdin.read()", str(alive)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert living.stdout is not None
    living.stdout.readline()
    ray_files.remove_dead(tmp_path)
    assert (dead.exists(), alive.exists(), foreign.exists()) == (False, True, True)
    living.kill()
    living.communicate()
    ray_files.remove_dead(tmp_path)
    assert (alive.exists(), foreign.exists()) == (False, True)


def test_no_thread_of_it_is_left_when_the_block_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that ends while the interpreter does can end the process by a signal."""
    waited = threading.Event.wait

    def slowly(event: Any, *limit: Any) -> bool:
        done = waited(event, *limit)
        if threading.current_thread().name == "local-ray":
            sleep(0.05)
        return done

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(local_ray, "start", lambda: None)
    monkeypatch.setattr(local_ray, "ending", nullcontext)
    monkeypatch.setattr(threading.Event, "wait", slowly)
    with STARTING():
        assert local_ray.is_up()
        assert "local-ray" in [thread.name for thread in threading.enumerate()]
    assert "local-ray" not in [thread.name for thread in threading.enumerate()]


LISTENING = """
import os, signal, socket, sys, threading, time
from pathlib import Path
import psutil, ray
from actors import local_ray, raylet
from rayfed.errors import ResourceError

@ray.remote(num_cpus=0)
class Actor:
    def idle(self, seconds):
        time.sleep(seconds)

with local_ray.starting():
    assert local_ray.is_up()
    session = Path(ray._private.worker._global_node.get_session_dir_path())
    ray.get(Actor.remote().idle.remote(0))
    me = psutil.Process()
    for process in [me, *me.children(recursive=True)]:
        for one in process.net_connections("tcp"):
            if one.status == psutil.CONN_LISTEN:
                print("LISTENS", process.name(), one.laddr.ip, flush=True)
        print("STARTED", *process.cmdline()[:4], flush=True)
print("LEFT", session.exists(), flush=True)

try:
    with local_ray.starting():
        assert local_ray.is_up()
        session = Path(ray._private.worker._global_node.get_session_dir_path())
        actor = Actor.remote()
        ray.get(actor.idle.remote(0))
        ref = actor.idle.remote(600)
        [raylet_process] = [one for one in psutil.Process().children() if one.name() == "raylet"]
        with raylet.watched():
            raylet_process.kill()
            ray.get(ref)
except ResourceError as error:
    print("SAID", error, flush=True)
print("KEPT", (session / "logs" / "raylet.err").exists(), flush=True)
with local_ray.starting():
    local_ray.is_up()
print("REMOVED", not session.exists(), flush=True)
"""


@pytest.mark.engine
@pytest.mark.slow
def test_it_listens_on_loopback_alone_leaves_nothing_and_its_death_is_told() -> None:
    lines = [line.split(maxsplit=1) for line in in_own_process(LISTENING).splitlines() if line[:1].isupper()]
    heard = [line[1].rsplit(maxsplit=1) for line in lines if line[0] == "LISTENS"]
    assert {"raylet", "gcs_server"} <= {name for name, _ in heard}
    assert {address.removeprefix("::ffff:") for _, address in heard} == {"127.0.0.1"}, heard
    started = [line[1] for line in lines if line[0] == "STARTED"]
    assert any("raylet" in one for one in started)
    assert not [
        one for one in started if any(name in one for name in ("monitor", "dashboard.py", "dashboard/dashboard"))
    ]
    said = dict(line for line in lines if len(line) == 2)
    assert (said["LEFT"], said["KEPT"], said["REMOVED"]) == ("False", "True", "True")
    assert "raylet on this machine has died" in said["SAID"]


@pytest.mark.engine
@pytest.mark.parametrize("how", ["long", "no folder"])
def test_a_temporary_folder_that_ray_cannot_use_is_told(how: str, tmp_path: Path) -> None:
    folder = tmp_path / ("a" * 100 if how == "long" else "file")
    folder.mkdir() if how == "long" else folder.touch()
    scenario = tmp_path / "s.yaml"
    scenario.write_text(faults.TEXT)
    command = faults.Command(
        ["-m", "rayfed", "launch", str(scenario), "--out", str(tmp_path / "runs")], {"RAY_TMPDIR": str(folder)}
    )
    assert command.wait() == 2
    said = command.said()
    assert "Ray cannot use its temporary folder" in said
    assert ("AF_UNIX path length cannot exceed" if how == "long" else "Not a directory") in said
    assert "RAY_TMPDIR" in said
    assert "busy" not in said


SPILLING = """
import sys
import ray
from rayfed.runs import runner
from rayfed.simulation.progress import Progress
from rayfed import scenario as scenarios
from actors.executor import on_ray
from tests.helpers.run_fixtures import BIG
from rayfed.errors import ResourceError

ray.init(address="local", num_cpus=2, object_store_memory=80_000_000, object_spilling_directory=sys.argv[2],
         include_dashboard=False, log_to_driver=False)
s = scenarios.parse(BIG)
try:
    runner.launch(s, sys.argv[1], on_ray(), Progress())
except ResourceError as error:
    print("SAID", error)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs a file system in memory")
def test_a_full_spill_disk_is_told(tmp_path: Path) -> None:
    """A round's updates are 8 x 17 MB, for a store of 80 MB and a disk of 20 MB."""
    if not user_namespaces():
        missing("no file system of one's own: allow unprivileged user namespaces")
    spill = tmp_path / "spill"
    spill.mkdir()
    script = f'mount -t tmpfs -o size=20m tmpfs {spill} && exec "$@"'
    command = faults.Command(
        ["-c", SPILLING, str(tmp_path / "runs"), str(spill)], {}, ("unshare", "-Urm", "sh", "-c", script, "sh")
    )
    assert command.wait() == 0, command.said()
    command.left()
    command.output.seek(0)
    assert "SAID Ray's object store is full, and so is the disk that it spills to" in command.output.read()
    [run] = (tmp_path / "runs").iterdir()
    status = RunFolder.open(str(run)).read_mapping("status.json")
    assert status["state"] == "failed"
    assert status["error"] == plain(status["error"])
    assert status["error"].startswith("ResourceError: Ray's object store is full")
