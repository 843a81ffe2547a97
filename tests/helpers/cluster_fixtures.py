"""Helpers that start clusters of several Ray nodes on this machine, which require tokens."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rayfed.store.folder import RunFolder
from tests.conftest import REPOSITORY
from tests.helpers.faults import Command

NODES = """
import sys, os
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
for _ in range(2):
    os.chdir(sys.argv[1])
    cluster.add_node(num_cpus=1)
cluster.wait_for_nodes()
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""
"""Script that starts a head without CPUs and two workers, until its standard input is closed."""


def environment(token: str = "1" * 64, **more: str) -> dict[str, str]:
    """Return the environment of a process that uses this token and otherwise equals a user's process."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "PYTEST")) and k != "PYTHONPATH"}
    own = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    return {**kept, **own, **more}


@contextmanager
def head(port: int, *options: str, env: dict[str, str], dashboard: int | None = None) -> Iterator[str]:
    """Run `ray start --head` at a port, with a `dashboard` port if given, and yield its address."""
    arguments = ["-m", "ray.scripts.scripts", "start", "--head", "--block", f"--port={port}", *options]
    # Another Ray on this machine may use the default agent port, and jobs would fail.
    shown = [f"--dashboard-port={dashboard}", f"--dashboard-agent-listen-port={free_port()}"]
    arguments += shown if dashboard else ["--include-dashboard=false"]
    started = Command(arguments, env)
    try:
        until = time.monotonic() + 60
        while not all(map(_listens, filter(None, [port, dashboard]))):
            assert started.process.poll() is None, started.said()
            assert time.monotonic() < until, started.said()
            time.sleep(0.5)
        yield f"127.0.0.1:{port}"
    finally:
        started.process.terminate()
        started.process.wait(60)
        started.left(0)


def free_port() -> int:
    """Return an unused port."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _listens(port: int) -> bool:
    with socket.socket() as asking:
        return asking.connect_ex(("127.0.0.1", port)) == 0


def rayfed(*arguments: str, cwd: Path, env: dict[str, str], seconds: float = 180) -> subprocess.CompletedProcess[str]:
    """Run `rayfed` with these arguments in a process, which must end within so many seconds."""
    command = [sys.executable, "-m", "rayfed", *arguments]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=seconds, check=False)


def finished(out: Path) -> RunFolder:
    """Return the only run in a folder, and check that it has finished."""
    [path] = out.iterdir()
    folder = RunFolder.open(str(path))
    assert folder.read_mapping("status.json")["state"] == "finished"
    return folder


def document(**changes: Any) -> str:
    """Return a scenario with two client actors of one CPU each, as JSON."""
    base = {
        "name": "t",
        "data": {"name": "digits", "size": 8, "train_samples": 100, "test_samples": 20},
        "model": {"name": "mlp", "hidden": [8]},
        "federation": {"rounds": 2, "clients": 4},
        "resources": {"clients": {"actors": 2, "num_cpus": 1}},
    }
    return json.dumps({**base, **changes})


AUTOSCALING = """
cluster_name: fake
max_workers: 2
idle_timeout_minutes: 0.1
upscaling_speed: 10
provider: {type: fake_multinode, gcs_address: "ADDRESS", use_node_id_as_ip: true, disable_node_updaters: true}
auth: {}
docker: {}
head_node_type: ray.head.default
available_node_types:
  ray.head.default: {resources: {CPU: 0}, node_config: {}, max_workers: 0}
  cpu: {resources: {CPU: 1, object_store_memory: 100000000}, node_config: {}, min_workers: 0, max_workers: 2}
initialization_commands: []
setup_commands: []
head_setup_commands: []
worker_setup_commands: []
head_start_ray_commands: []
worker_start_ray_commands: []
file_mounts: {}
cluster_synced_files: []
file_mounts_sync_continuously: false
rsync_exclude: []
rsync_filter: []
"""
"""Configuration of Ray's fake cloud, whose nodes of one CPU are processes of this machine."""
