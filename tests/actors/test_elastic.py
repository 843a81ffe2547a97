"""Runs on clusters whose nodes come and go, or have labels, with the bits of a run in one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from rayfed import scenario as scenarios
from rayfed.runs import runner
from rayfed.simulation.executors.local import local
from rayfed.simulation.progress import Progress
from tests.helpers import faults
from tests.helpers.processes import in_own_process

pytestmark = pytest.mark.engine

RUN = """
import sys, logging
import ray
from ray.cluster_utils import Cluster
from actors import executor
from rayfed.runs import runner
from rayfed.simulation.rounds import node_sums
from rayfed.simulation.progress import Progress
from tests.helpers import faults
from rayfed import scenario as scenarios

executor.LOOK = 0.0
node_sums.LEAST = 0

class Waiting(executor.RayExecutor):
    # has new actors up before they are given work, and notes which nodes did a round's
    def run_clients(self, calls):
        self._clients.wait()
        for done in super().run_clients(calls):
            nodes.add(done.node)
            yield done

class Changing(Progress):
    # another node after the first round; it goes again amid the fourth
    left = False
    def clients_done(self, round, done, total):
        if round == 3 and not self.left:
            self.left = True
            cluster.remove_node(second, allow_graceful=True)
    def round_done(self, rows, attacks, inferences):
        global second
        print("NODES", rows[0]["round"], len(nodes), flush=True)
        if rows[0]["round"] == 0:
            second = cluster.add_node(num_cpus=1)
            cluster.wait_for_nodes()
        nodes.clear()
    def note(self, message):
        print("NOTE", message, flush=True)

executor.RayExecutor, nodes = Waiting, set()
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
s = scenarios.parse(faults.TEXT, changes=["resources={}"])
print("RUN", runner.launch(s, sys.argv[1], executor.on_ray(), Changing()).url, flush=True)
ray.shutdown()
cluster.shutdown()
"""


def test_a_cluster_that_doubles_and_halves_changes_no_bit(tmp_path: Path) -> None:
    s = scenarios.parse(faults.TEXT, changes=["resources={}"])
    alone = runner.launch(s, str(tmp_path / "alone"), local, Progress())
    said = in_own_process(RUN, str(tmp_path / "there")).splitlines()
    words = [line.partition(" ")[::2] for line in said]
    nodes = {int(round): int(number) for word, rest in words if word == "NODES" for round, number in [rest.split()]}
    assert [nodes[round] for round in (0, 2, 5)] == [1, 2, 1], "nodes that did a round's work"
    changes = [rest.partition("the cluster has changed: ")[2] for word, rest in words if word == "NOTE"]
    assert [change[:1] for change in changes if change] == ["2", "1"]
    [run] = [rest for word, rest in words if word == "RUN"]
    assert not faults.differences(Path(run), Path(alone.url))


LABELLED = """
import sys, logging
import ray
from ray.cluster_utils import Cluster
from actors import executor
from rayfed.runs import runner
from rayfed.simulation.progress import Progress
from rayfed import scenario as scenarios
from tests.actors.test_elastic import SMALL

class Telling(executor.RayExecutor):
    def close(self, keep=False):
        labels = {node["NodeID"]: node["Labels"].get("role") for node in ray.nodes()}
        for kind, pool in (("clients", self._clients), ("attackers", self._attackers)):
            print("ON", kind, *(labels[node] for node in pool.nodes()), flush=True)
        super().close(keep)

executor.RayExecutor = Telling
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
cluster.add_node(num_cpus=1, labels={"role": "attack"})
cluster.add_node(num_cpus=1, labels={"role": "train"})
cluster.wait_for_nodes()
ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
resources = "resources={clients: {labels: {role: train}}, attackers: {labels: {role: attack}}}"
print("RUN", runner.launch(scenarios.parse(SMALL, changes=[resources]), sys.argv[1], executor.on_ray(), Progress()).url)
ray.shutdown()
cluster.shutdown()
"""
SMALL = """
name: t
data: {name: digits, size: 8, train_samples: 40, test_samples: 10}
model: {name: mlp, hidden: [8]}
federation: {rounds: 1, clients: 2}
attacks: [{name: analytic, rounds: [0], victims: 1, observes: gradient}]
"""


@pytest.mark.slow
def test_actors_are_on_nodes_with_their_labels(tmp_path: Path) -> None:
    alone = runner.launch(scenarios.parse(SMALL), str(tmp_path / "alone"), local, Progress())
    said = in_own_process(LABELLED, str(tmp_path / "there")).splitlines()
    assert [line for line in said if line.startswith("ON")] == ["ON clients train", "ON attackers attack"]
    [run] = [line.removeprefix("RUN ") for line in said if line.startswith("RUN")]
    assert not faults.differences(Path(run), Path(alone.url))
