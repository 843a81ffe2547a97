"""What the Ray layer decides by itself, tested without Ray."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from math import ceil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actors import actor_pool, cluster, executor, server
from actors.cluster import Alike, Allotment, Node, check, divide
from actors.process import ResourceShare
from rayfed import scenario as scenarios
from rayfed.aggregation.server_optimiser import ServerOptimiser
from rayfed.errors import ResourceError, RunError, ScenarioError
from rayfed.report.html import run as report
from rayfed.runs import runner
from rayfed.runs.recorder import RunRecorder
from rayfed.scenario import Scenario, resolve
from rayfed.simulation.executors.local import local
from rayfed.simulation.gpus import with_devices
from rayfed.simulation.progress import Progress
from rayfed.simulation.server import ArmState, ServerRole
from rayfed.store.folder import RunFolder
from tests.helpers.command import run

TEXT = """
name: t
seed: 987654321
data: {name: digits, size: 8}
model: {name: mlp, hidden: [4]}
federation: {rounds: 1, clients: 2}
"""


def parsed(*changes: str) -> Scenario:
    return with_devices(scenarios.parse(TEXT, changes=changes), {"clients": 0, "attackers": 0})


@pytest.mark.parametrize(
    ("clients", "attackers", "apart"),
    [
        ("{}", "{}", False),  # they take turns on a core
        ("{num_cpus: 1}", "{num_cpus: 0.5}", False),
        ("{num_cpus: 1}", "{num_cpus: 1}", True),
        ("{labels: {kind: cpu}}", "{labels: {kind: gpu}, num_gpus: 0.5}", True),
        ("{num_cpus: 1, num_gpus: 0.5}", "{num_cpus: 1, num_gpus: 0.5}", False),
        ("{num_cpus: 1, num_gpus: 0.5}", "{num_cpus: 1, num_gpus: 1}", True),
    ],
)
def test_attackers_are_apart_where_no_core_and_no_gpu_is_a_clients_too(
    clients: str, attackers: str, apart: bool
) -> None:
    nodes = [Node(4, 2, {"kind": "cpu"}), Node(4, 2, {"kind": "gpu"})]
    s = parsed(f"resources={{clients: {clients}, attackers: {attackers}}}")
    assert divide(nodes, s, 2, 2).apart == apart


def test_a_server_with_a_gpu_adds_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "set_up", lambda share: torch.device("meta"))  # stands for a device of its own
    weights = {"w": torch.rand(3)}
    optimiser = ServerOptimiser("sgd", lr=1.0)
    arm: ArmState = {"weights": weights, "buffers": {}, "state": {}, "memory": {}}
    role = ServerRole(resolve(parsed())["none"], optimiser)
    made = server.ServerActor(ResourceShare(0, 1), {"none": role}, {"none": arm})
    sent, _ = made.sent("none", 0)
    steps: dict[str, Any] = {name: torch.ones_like(w, device="cpu") for name, w in sent.weights.items()}
    made._models["none"].apply(steps, {})
    after, _ = made.sent("none", 1)
    assert all(torch.equal(after.weights[name], w - 1) for name, w in sent.weights.items())


@pytest.mark.parametrize(
    ("nodes", "clients", "expected"),
    [
        ([(8, 2)], "{num_gpus: 0.6}", 2),  # what is left of two GPUs is no third share
        ([(8, 2)], "{num_gpus: 0.5}", 4),
        ([(8, 1)], "{num_cpus: 0.5, num_gpus: 0.1}", 10),
        ([(1.5, 0), (1.5, 0)], "{num_cpus: 1}", 2),  # nor is a half of two nodes a CPU
        ([(2, 0), (3, 1)], "{num_gpus: 1}", 1),
        ([(1, 0)], "{num_cpus: 0.3333333333}", 3),
        ([(64, 0)], "{num_cpus: 1}", 20),  # no more than there are calls
    ],
)
def test_actors_that_fit_on_nodes_and_gpus(nodes: list[tuple[float, float]], clients: str, expected: int) -> None:
    found = divide([Node(*node) for node in nodes], parsed(f"resources.clients={clients}"), 20, 0)
    assert found.clients == expected


def test_clients_and_attackers_share_a_gpu_or_have_one_each() -> None:
    parts = parsed("resources.clients={num_gpus: 0.5}", "resources.attackers={num_gpus: 0.5}")
    found = divide([Node(8, 2)], parts, 20, 20)
    assert (found.clients, found.attackers) == (2, 2)
    more = parsed("resources.clients={num_gpus: 0.6}", "resources.attackers={num_gpus: 0.6}")
    found = divide([Node(8, 3)], more, 20, 20)  # 3.6 GPUs would hold two pairs by their sum
    assert (found.clients, found.attackers) == (1, 1)


def test_the_server_alone_is_where_the_driver_is_while_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [{"NodeID": str(cpus), "Alive": True, "Resources": {"CPU": cpus}, "Labels": {}} for cpus in (4.0, 16.0)]
    here = SimpleNamespace(get_node_id=lambda: "a1" * 28)
    pretended = SimpleNamespace(nodes=lambda: nodes, get_runtime_context=lambda: here)
    monkeypatch.setattr(cluster, "ray", pretended)
    allotment = cluster.allot(parsed(), 8, 0)
    assert (allotment.server.node, allotment.client.node, allotment.attacker.node) == ("a1" * 28, "", "")

    asked: list[dict[str, Any]] = []

    class Made:
        arrive = SimpleNamespace(remote=lambda share: None)

    class Remote:
        def options(self, **options: Any) -> Any:
            asked.append(options)
            return SimpleNamespace(remote=lambda *_: Made())

    monkeypatch.setattr(actor_pool, "ray", SimpleNamespace(remote=lambda kind: Remote()))
    pool = actor_pool.ActorPool()
    pool.acquire(server.ServerActor, allotment.server)
    pool.acquire(server.ServerActor, allotment.client)
    of_server, of_client = (options["scheduling_strategy"] for options in asked)
    assert (of_server.node_id, of_server.soft, of_client) == ("a1" * 28, True, None)


def first_fit(nodes: Sequence[Node], actors: Sequence[Alike]) -> bool:
    """Place one actor after the other on the first node, and the first GPUs, with room for it."""
    free = [[node.cpus, [1.0] * int(node.gpus), node.labels] for node in nodes]

    def placed(share: ResourceShare) -> bool:
        each = share.num_gpus
        for node in free:
            able = [i for i, left in enumerate(node[1]) if left > each - 1e-6][: ceil(each)]
            if share.may_be_on(node[2]) and share.num_cpus <= node[0] + 1e-6 and len(able) == ceil(each):
                node[0] -= share.num_cpus
                for i in able:
                    node[1][i] -= each
                return True
        return False

    shares = [share for share, number in actors for _ in range(number)]
    shares.sort(key=lambda share: (bool(share.labels), share.num_gpus, share.num_cpus), reverse=True)
    return all(map(placed, shares))


LABELS = st.sampled_from([{}, {}, {"market": "spot"}, {"role": "attack"}, {"market": "spot", "role": "attack"}])
NODES = st.builds(Node, st.sampled_from([0, 0.5, 1, 1.5, 2.5, 4, 7]), st.sampled_from([0, 0, 1, 2, 3]), LABELS)
CPUS = [None, 0, 0.1, 0.25, 0.3333, 0.5, 0.7, 1, 1.5, 2]
KINDS = st.fixed_dictionaries(
    {
        "num_cpus": st.sampled_from(CPUS),
        "num_gpus": st.sampled_from([0, 0, 0.1, 0.3, 0.3333, 0.5, 0.6, 1]),
        "labels": LABELS,
        "actors": st.sampled_from([None, None, 1, 3]),
    }
)


@given(
    st.lists(NODES, min_size=1, max_size=5),
    KINDS,
    KINDS,
    st.sampled_from(CPUS),
    st.integers(0, 40),
    st.integers(0, 40),
)
def test_numbers_of_actors_are_those_of_placing_one_after_the_other(
    nodes: list[Node],
    clients: dict[str, Any],
    attackers: dict[str, Any],
    server_cpus: float | None,
    client_calls: int,
    attack_calls: int,
) -> None:
    resources = {"clients": clients, "attackers": attackers, "server": {"num_cpus": server_cpus}}
    s = parsed(f"resources={json.dumps(resources)}")
    counted = divide(nodes, s, client_calls, attack_calls)
    actors = [(counted.server, 1), (counted.client, counted.clients), (counted.attacker, counted.attackers)]
    assert cluster.fits(nodes, actors) == first_fit(nodes, actors)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(cluster, "fits", first_fit)
        assert divide(nodes, s, client_calls, attack_calls) == counted


def test_a_thousand_nodes_are_divided_in_no_time() -> None:
    began = time.process_time()
    assert divide([Node(16, 0)] * 1000, parsed(), 32_000, 0).clients == 16_000
    assert time.process_time() - began < 4, "seconds; placing one after the other takes half a minute"


def test_nodes_are_divided_again_where_others_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = {"a": Node(4, 0)}
    here = SimpleNamespace(get_runtime_context=lambda: SimpleNamespace(get_node_id=lambda: "a"))
    monkeypatch.setattr(cluster, "ray", here)
    monkeypatch.setattr(cluster, "alive", lambda: nodes)
    first = cluster.allot(parsed(), 20, 0)
    assert cluster.allot(parsed(), 20, 0, first) is first
    nodes["b"] = Node(2, 0)
    second = cluster.allot(parsed(), 20, 0, first)
    assert (first.clients, second.clients, second.nodes) == (4, 6, {"a", "b"})


def test_looks_at_the_cluster_are_apart_however_long_one_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    now, looks = [0.0], list[Allotment | None]()

    def room(before: Allotment | None) -> Allotment:
        looks.append(before)
        now[0] += 1.5 * executor.LOOK
        return before or divide([Node(1, 0)], parsed(), 1, 0)

    monkeypatch.setattr(executor, "monotonic", lambda: now[0])
    there = executor.RayExecutor(room, actor_pool.ActorPool(), print)
    now[0] += executor.LOOK
    for _ in range(5):
        there._look(False)
    assert len(looks) == 2
    assert looks[1] is there._allotment, "which is not divided again"


PLAIN, SPOT, ATTACK = Node(2, 0), Node(4, 0, {"market": "spot"}), Node(3, 0, {"role": "attack"})


@pytest.mark.parametrize(
    ("nodes", "changes", "clients", "attackers"),
    [
        ([PLAIN, ATTACK], ["attackers.labels={role: attack}"], 2, 3),  # clients stay off, and nobody takes turns
        ([PLAIN, SPOT], ["clients.labels={market: spot}"], 4, 2),
        ([PLAIN, SPOT, ATTACK], ["clients.labels={market: spot}", "attackers.labels={role: attack}"], 4, 3),
        ([PLAIN, SPOT, ATTACK], ["clients.labels={role: attack}", "attackers.labels={role: attack}"], 3, 3),
        ([PLAIN, SPOT], ["attackers.labels={market: spot}", "attackers.num_cpus=2"], 2, 2),
    ],
)
def test_actors_that_fit_on_nodes_with_labels(
    nodes: list[Node], changes: list[str], clients: int, attackers: int
) -> None:
    found = divide(nodes, parsed(*(f"resources.{change}" for change in changes)), 20, 20)
    assert (found.clients, found.attackers) == (clients, attackers)
    check(found, nodes)


@pytest.mark.parametrize(
    ("nodes", "changes", "expected"),
    [
        ([PLAIN], ["attackers.labels={role: attack}"], r"attackers\.labels: no node has role=attack \(nodes have no"),
        ([PLAIN, SPOT], ["clients.labels={role: attack}"], r"nodes have market=spot.*ray start --labels role=attack"),
        ([ATTACK], ["attackers.labels={role: attack}"], r"resources\.clients: every node has role=attack"),
        ([PLAIN, SPOT], ["clients={labels: {market: spot}, num_cpus: 5}"], "no node has more than 4 CPU"),
    ],
)
def test_labels_that_no_node_has(nodes: list[Node], changes: list[str], expected: str) -> None:
    found = divide(nodes, parsed(*(f"resources.{change}" for change in changes)), 20, 20)
    with pytest.raises(ResourceError, match=expected):
        check(found, nodes)


@pytest.mark.parametrize("command", ["launch", "sweep", "attack"])
def test_an_address_of_rays_client_is_refused(command: str, tmp_path: Path) -> None:
    (file := tmp_path / "s.yaml").write_text(TEXT + "sweep: {fields: {training.lr: [0.1]}}\n" * (command == "sweep"))
    exit_code, _ = run(command, str(file), "--address", "ray://127.0.0.1:10001", "--out", str(tmp_path / "runs"))
    assert exit_code == 2
    assert not (tmp_path / "runs").exists()


def test_labels_are_not_for_sweeps() -> None:
    with pytest.raises(ResourceError, match="labels"):
        cluster.allot_trial(parsed("resources.clients.labels={market: spot}"))


@pytest.mark.parametrize("labels", ["{market: '!spot'}", "{market: 'in(a, b)'}", "{'a b': c}"])
def test_labels_are_names_and_values(labels: str) -> None:
    with pytest.raises(ScenarioError, match=r"resources\.clients\.labels"):
        parsed(f"resources.clients.labels={labels}")


@pytest.mark.parametrize(("kind", "gpus"), [("server", 0.5), ("clients", 1.5), ("clients", 2), ("attackers", 3)])
def test_gpus_that_nothing_would_use(kind: str, gpus: float) -> None:
    with pytest.raises(ScenarioError) as refused:
        parsed(f"resources.{kind}.num_gpus={gpus}")
    assert [path for path, _ in refused.value.problems] == [("resources", kind, "num_gpus")]


@pytest.mark.parametrize(
    "change", ["server.num_gpus=0", "clients.num_gpus=auto", "clients.num_gpus=1", "attackers.num_gpus=0.5"]
)
def test_gpus_that_may_be_asked_for(change: str) -> None:
    parsed(f"resources.{change}")


def test_more_actors_than_parts_of_gpus() -> None:
    s = parsed("resources.clients={actors: 3, num_gpus: 0.6}")
    with pytest.raises(ResourceError, match=r"3 client actors .* ask for 3 CPU and 1\.8 GPU together"):
        check(divide([Node(8, 2)], s, 20, 0), [Node(8, 2)])


@pytest.mark.usefixtures("reports")
def test_what_fails_after_a_failure_does_not_hide_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def unwritable(folder: RunFolder) -> str:
        raise RunError("the disk is full")

    monkeypatch.setattr(report, "write_report", unwritable)
    folder = RunFolder.create(str(tmp_path), "t")
    folder.write_text("checkpoint/latest.json", "damaged")
    with pytest.raises(ZeroDivisionError), RunRecorder(folder, "training", 3).recording(2):
        raise ZeroDivisionError
    status = json.loads(folder.read_text("status.json"))
    assert (status["state"], status["rounds_done"], status["error"]) == ("failed", 2, "ZeroDivisionError: ")
    assert "the disk is full" in folder.read_text("log.txt")


@pytest.mark.usefixtures("reports")
def test_a_log_that_cannot_be_written_does_not_hide_the_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def unwritable(self: RunFolder, name: str, data: bytes) -> None:
        raise RunError("the disk is full")

    def fail() -> None:
        monkeypatch.setattr(RunFolder, "write_bytes", unwritable)
        raise ZeroDivisionError

    folder = RunFolder.create(str(tmp_path), "t")
    with pytest.raises(ZeroDivisionError), RunRecorder(folder, "training", 3).recording(0):
        fail()


@pytest.mark.usefixtures("reports")
@pytest.mark.parametrize("end", [KeyboardInterrupt, RunError])
def test_attacks_without_training_cannot_be_resumed(end: type[BaseException], tmp_path: Path) -> None:
    folder = RunFolder.create(str(tmp_path), "t")
    folder.write_text("scenario.yaml", parsed().dump())
    with pytest.raises(end), RunRecorder(folder, "attack", 0).recording(0):
        raise end
    assert "rayfed resume" not in folder.read_text("report.html")
    with pytest.raises(RunError, match="nothing to resume"):
        runner.resume(folder.url, local, Progress())
