"""Runs on clusters of several Ray nodes: the same weights, the user's code on every node, nodes that come and go."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rayfed import load
from rayfed import scenario as scenarios
from rayfed.runs import runner
from rayfed.simulation.executors.local import local
from rayfed.simulation.progress import Progress
from tests.helpers import faults
from tests.helpers.cluster_fixtures import AUTOSCALING, NODES, document, environment, finished, free_port, head, rayfed
from tests.helpers.run_fixtures import assert_same_bits, weights

pytestmark = [pytest.mark.engine, pytest.mark.slow]

OWN_CODE = """
import os
import ray
from my_helpers import note
from rayfed.registry import component
from rayfed.defences.base import Defence


@component
class Noting(Defence):
    place: str

    def wrap_update(self, next):
        note(self.place, ray.get_runtime_context().get_node_id(), __file__)
        return next
"""
HELPERS = """
def note(place, *words):
    with open(place, "a") as file:
        print(*words, __file__, file=file)
"""


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """A head and two workers with a CPU each, which live in an empty folder and find rayfed alone."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    command = [sys.executable, "-c", NODES, str(elsewhere)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment(), stdin=pipe, stdout=pipe, text=True) as nodes:
        assert nodes.stdout is not None
        yield nodes.stdout.readline().strip()
        nodes.communicate(timeout=60)


def test_several_nodes_give_the_same_bits_and_are_sent_the_users_code(address: str, tmp_path: Path) -> None:
    home, cwd = tmp_path / "home", tmp_path / "elsewhere"  # Ray itself tells workers of the working directory
    home.mkdir()
    scenario = str(home / "s.yaml")
    (home / "my_defences.py").write_text(OWN_CODE)
    (home / "my_helpers.py").write_text(HELPERS)
    notes = tmp_path / "notes"
    own = {"name": "my_defences:Noting", "place": str(notes)}
    Path(scenario).write_text(document(defences=[own]))

    alone = rayfed("launch", scenario, "--out", str(tmp_path / "alone"), cwd=cwd, env=environment())
    assert alone.returncode == 0, alone.stderr
    assert {line.split()[1] for line in notes.read_text().splitlines()} == {str(home / "my_defences.py")}
    notes.unlink()

    refused = rayfed("launch", scenario, "--address", address, cwd=cwd, env=environment("2" * 64))
    assert (refused.returncode, "RAY_AUTH_MODE=token" in refused.stderr) == (2, True), refused.stderr

    out = tmp_path / "out"
    together = rayfed("launch", scenario, "--out", str(out), "--address", address, cwd=cwd, env=environment())
    assert together.returncode == 0, together.stderr
    assert_same_bits(weights(finished(out)), weights(finished(tmp_path / "alone")))
    nodes, modules, helpers = zip(*(line.split() for line in notes.read_text().splitlines()), strict=True)
    assert len(set(nodes)) == 2
    for file in {*modules, *helpers}:
        assert "runtime_resources/py_modules_files" in file


@pytest.mark.parametrize("runs", [2, 4])
def test_runs_at_once_on_one_cluster_end_with_the_same_bits(runs: int, tmp_path: Path) -> None:
    """Each alone would take all four CPUs, half of them for attackers."""
    attack = {"name": "inverting_gradients", "rounds": [0], "victims": 4, "batch_size": 1, "iterations": 5}
    small = {"federation": {"rounds": 3, "clients": 8, "cohort_size": 1}, "attacks": [attack], "resources": {}}
    scenario, env = tmp_path / "s.yaml", environment()
    scenario.write_text(document(**small))
    alone = runner.launch(scenarios.parse(document(**small)), str(tmp_path / "alone"), local, Progress())
    with head(free_port(), "--num-cpus=4", env=env) as address, ThreadPoolExecutor(runs) as threads:
        begun = [
            threads.submit(
                rayfed,
                *("launch", str(scenario), "--out", str(out), "--address", address),
                cwd=tmp_path,
                env=env,
                seconds=500,
            )
            for out in (tmp_path / str(number) for number in range(runs))
        ]
        ended = [one.result() for one in begun]
    assert [one.returncode for one in ended] == [0] * runs, [one.stderr for one in ended]
    for number in range(runs):
        assert not faults.differences(finished(tmp_path / str(number)).url, alone.url)


WORKERS = """
import sys, ray, logging
ray.init(address=sys.argv[1], log_to_driver=False, logging_level=logging.ERROR)
print(sum(node["Alive"] and node["Resources"].get("CPU", 0) > 0 for node in ray.nodes()))
"""


@pytest.mark.parametrize("command", ["sweep", "launch"])
def test_a_cluster_grows_for_a_sweep_or_a_run_and_shrinks_after(command: str, tmp_path: Path) -> None:
    """A head without CPUs, and the nodes that Ray's autoscaler pretends to rent."""
    cloud, scenario, out = tmp_path / "cloud.yaml", tmp_path / "s.yaml", tmp_path / "out"
    port = free_port()
    cloud.write_text(AUTOSCALING.replace("ADDRESS", f"127.0.0.1:{port}"))
    sweep = {
        "sweep": {"fields": {"training.lr": [0.01, 0.1]}},
        "resources": {"clients": {"actors": 1, "num_cpus": 1}},
    }
    run = {"federation": {"rounds": 2, "clients": 4, "cohort_size": 1}, "resources": {}}
    scenario.write_text(document(**(sweep if command == "sweep" else run)))
    env = environment(RAY_FAKE_CLUSTER="1")
    with head(port, "--num-cpus=0", f"--autoscaling-config={cloud}", env=env) as address:
        assert workers(address, env) == 0
        played = rayfed(command, str(scenario), "--out", str(out), "--address", address, cwd=tmp_path, env=env)
        assert played.returncode == 0, played.stderr
        [path] = out.iterdir()
        if command == "sweep":
            assert [row["status"] for row in load(str(path)).outcomes().to_pylist()] == ["finished"] * 2
        else:
            assert finished(out).read_table("rounds").num_rows == 2
        until = time.monotonic() + 90
        while (left := workers(address, env)) and time.monotonic() < until:
            time.sleep(20)  # to be asked is work for a node, too
        assert not left


def workers(address: str, env: dict[str, str]) -> int:
    """Nodes with a CPU."""
    asked = subprocess.run(
        [sys.executable, "-c", WORKERS, address], env=env, capture_output=True, text=True, timeout=60, check=True
    )
    return int(asked.stdout.split()[-1])


def test_a_run_is_submitted_as_a_job(tmp_path: Path) -> None:
    home, out, env = tmp_path / "home", tmp_path / "out", environment()
    home.mkdir()
    (home / "s.yaml").write_text(document())
    port = free_port()
    with head(free_port(), "--num-cpus=2", env=env, dashboard=port):
        job = ["job", "submit", "--address", f"http://127.0.0.1:{port}", "--working-dir", str(home), "--"]
        command = [sys.executable, "-m", "rayfed", "launch", "s.yaml", "--address", "auto", "--out", str(out)]
        until = time.monotonic() + 60
        while True:
            said = subprocess.run(
                [sys.executable, "-m", "ray.scripts.scripts", *job, *command],
                env=env,
                capture_output=True,
                text=True,
                timeout=180,
                check=False,
            )
            # Ray's agent comes some seconds after the dashboard listens
            if "No available agent" not in said.stderr or time.monotonic() > until:
                break
            time.sleep(2)
        assert said.returncode == 0, said.stdout + said.stderr
    assert "report.html" in said.stdout
    assert finished(out).read_table("rounds").num_rows == 2
