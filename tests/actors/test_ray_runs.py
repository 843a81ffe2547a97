"""Runs on Ray: the same bits as in one process, whatever happens to the actors, and nobody is sent what is not his."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from pydantic import BaseModel
from ray.exceptions import ObjectLostError

from actors import workers
from actors.actor_pool import ActorPool
from actors.executor import RayExecutor, on_ray
from actors.process import Renewable, ResourceShare
from actors.servers import only_adds
from rayfed.data.base import Dataset
from rayfed.errors import ResourceError
from rayfed.runs import runner
from rayfed.scenario import Scenario
from rayfed.simulation.executors.base import Call
from rayfed.simulation.executors.local import local
from rayfed.simulation.inputs import prepare_inputs
from rayfed.simulation.progress import Progress
from rayfed.simulation.rounds.federation import Federation
from rayfed.store.folder import RunFolder
from rayfed.threat_model.observations import Truth
from tests.helpers.faults import differences
from tests.helpers.run_fixtures import Killer, Noting, Spied, assert_same_bits, kill, spied_launch, weights
from tests.helpers.small_runs import ATTACK, BOOSTED, assert_same_votes, parsed

APART = "resources.server.num_cpus=0"
"""Asks for an actor for the server, which else is in this process where all that it does is add."""

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("ray_session")]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return runner.launch(parsed(extra=ATTACK), str(tmp_path_factory.mktemp("runs")), local, Progress())


@pytest.fixture(scope="module")
def spied(ray_session: None, tmp_path_factory: pytest.TempPathFactory) -> Spied:
    return spied_launch(parsed(APART, extra=ATTACK), tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize(("actors", "server"), [(1, ()), (2, (APART,)), (4, ())])
def test_weights_do_not_depend_on_the_number_of_actors(
    actors: int, server: tuple[str, ...], undisturbed: RunFolder, tmp_path: Path
) -> None:
    s = parsed(f"resources.clients.actors={actors}", "resources.clients.num_cpus=1", *server)
    folder = runner.launch(s, str(tmp_path), on_ray(), Progress())
    assert_same_bits(weights(folder), weights(undisturbed))


def test_fused_cohorts_do_not_depend_on_the_number_of_actors(tmp_path: Path) -> None:
    changes = ("training.vectorise=fused", "federation.cohort_size=3")
    here = runner.launch(parsed(*changes), str(tmp_path), local, Progress())
    there = parsed(*changes, "resources.clients.actors=2", "resources.clients.num_cpus=1")
    assert_same_bits(weights(runner.launch(there, str(tmp_path), on_ray(), Progress())), weights(here))


@pytest.mark.parametrize(
    "changes",
    [
        ("federation.clients_per_round=4", "federation.system={over_selection: 2, compute_spread: 1, reference: 1e6}"),
        (
            "federation.clients_per_round=2",
            "federation.aggregation=fedbuff",
            "federation.system={concurrency: 4, compute_spread: 1, reference: 1e6}",
        ),
    ],
    ids=["over-selection", "fedbuff"],
)
def test_virtual_time_does_not_depend_on_the_executor(changes: tuple[str, ...], tmp_path: Path) -> None:
    here, there = (runner.launch(parsed(*changes), str(tmp_path), on, Progress()) for on in (local, on_ray()))
    for arm in ("none", "noise"):
        assert_same_bits(weights(there)[arm]["weights"], weights(here)[arm]["weights"])
    timed = ["arm", "round", "client", "status", "simulated_seconds", "staleness", "sent_bytes"]
    assert there.read_table("clients").select(timed).equals(here.read_table("clients").select(timed))
    times = ["arm", "round", "simulated_seconds", "idle", "dropped"]
    assert there.read_table("rounds").select(times).equals(here.read_table("rounds").select(times))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ((), True),
        ((APART,), False),
        (("resources.timeout=60",), False),
        (("privacy.secure=true",), False),
        (("federation.aggregation=median",), False),
        (("model={name: mlp, hidden: [80000]}",), False),
    ],
)
def test_the_server_is_in_the_driver_where_it_only_adds(
    changes: tuple[str, ...], expected: bool, ray_session: None
) -> None:
    assert only_adds(prepare_inputs(parsed(*changes))) == expected


def test_no_attacker_starts_where_nobody_is_attacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    acquire, kinds = ActorPool.acquire, list[str]()

    def noting(self: ActorPool, kind: type, *given: Any) -> Any:
        kinds.append(kind.__name__)
        return acquire(self, kind, *given)

    monkeypatch.setattr(ActorPool, "acquire", noting)
    runner.launch(parsed(), str(tmp_path), on_ray(), Progress())
    assert set(kinds) == {"ClientActor"}


@pytest.mark.parametrize("victim", ["ClientActor", "ServerActor"])
def test_weights_are_the_same_after_an_actor_is_killed(victim: str, undisturbed: RunFolder, tmp_path: Path) -> None:
    killer = Killer(victim, round=1)
    folder = runner.launch(parsed(APART), str(tmp_path), on_ray(), killer)
    assert killer.killed == 1
    assert "died" in " ".join(killer.notes)
    assert_same_bits(weights(folder), weights(undisturbed))
    assert folder.read_table("clients").num_rows == 3 * 2 * 7


def kill_server_before(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, so that what it is asked for never comes."""
    ask, killed = Federation.ask_server, list[str]()

    def deadly(self: Federation, asked: str, *arguments: Any) -> Any:
        if asked == method and not killed:
            killed.append(asked)
            kill(self.executor._server.actor)
        return ask(self, asked, *arguments)

    monkeypatch.setattr(Federation, "ask_server", deadly)


@pytest.mark.parametrize("method", [pytest.param("sent", marks=pytest.mark.slow), "finish"])
def test_weights_are_the_same_when_the_server_dies_before_it_answers(
    method: str, undisturbed: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill_server_before(method, monkeypatch)
    progress = Noting()
    folder = runner.launch(parsed(APART), str(tmp_path), on_ray(), progress)
    assert_same_bits(weights(folder), weights(undisturbed))
    [note] = progress.notes  # and none of the clients' actors was taken for dead
    assert "round 1 is rerun: the server died" in note


@pytest.mark.slow
def test_attacks_alone_survive_the_death_of_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = runner.attack(parsed(extra=ATTACK), None, str(tmp_path), local, Progress())
    kill_server_before("sent", monkeypatch)
    progress = Noting()
    folder = runner.attack(parsed(APART, extra=ATTACK), None, str(tmp_path), on_ray(), progress)
    a, b = (f.read_table("attacks").drop_columns(["seconds"]) for f in (folder, expected))
    assert a.equals(b)
    assert len(progress.notes) == 1


def test_weights_are_the_same_after_objects_are_lost(
    undisturbed: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the node dies that held what the server had sent; a test has one node, so Ray's error is pretended."""
    run, asked = workers.Workers.run, list[int]()

    def failing(self: workers.Workers, calls: Any, *others: Any) -> Any:
        if calls and calls[0].method == "evaluate":
            asked.append(1)
            if len(asked) == 2:
                raise ObjectLostError("00" * 28, "", "")
        return run(self, calls, *others)

    monkeypatch.setattr(workers.Workers, "run", failing)
    progress = Noting()
    folder = runner.launch(parsed(APART), str(tmp_path), on_ray(), progress)
    assert_same_bits(weights(folder), weights(undisturbed))
    [note] = progress.notes
    assert "round 2 is rerun: an object was lost" in note


class Worker(Renewable):
    def __init__(self, share: ResourceShare) -> None:
        pass

    def work(self, what: Any) -> Any:
        return what

    def miss(self) -> None:
        raise ObjectLostError("00" * 28, "", "")


class Pool(ActorPool):
    """Makes actors that ask for so many CPUs, one after another; 100 are more than there are."""

    def __init__(self, cpus: list[float]) -> None:
        super().__init__()
        self._shares = iter(cpus)

    def acquire(self, *_: Any) -> Any:
        return super().acquire(Worker, ResourceShare(next(self._shares), 0))


def test_actors_without_a_place_are_waited_for_no_longer_than_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "START_TIMEOUT", 1.0)
    nowhere = workers.Workers(Pool([100, 100]), 2)
    with pytest.raises(ResourceError, match="2 of 2 actors did not start within 1 s"):
        nowhere.wait()
    with pytest.raises(ResourceError, match="2 of 2 actors did not start within 1 s"):
        list(nowhere.run([Call("work", (1,))]))
    nowhere.close()


def test_the_living_do_the_work_of_an_actor_that_cannot_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "PATIENCE", 0.5)
    two = workers.Workers(Pool([0, 0, 100]), 2)
    two.wait()
    kill(two._actors[1])
    assert sorted(result for _, result, *_ in two.run([Call("work", (i,)) for i in range(9)])) == list(range(9))
    assert two.losses == 1
    two.close()


def test_what_finds_no_place_gets_that_of_another_pools_actor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "PATIENCE", 0.5)
    half = ray.available_resources()["CPU"] / 2
    large = workers.Workers(Pool([half] * 3), 2)
    small = workers.Workers(Pool([0, half]), 1, make_room=large.give_place)
    for each in (large, small):
        each.wait()
    kill(small._actors[0])
    assert [result for _, result, *_ in small.run([Call("work", (7,))])] == [7]
    assert small.losses == 1
    assert sorted(result for _, result, *_ in large.run([Call("work", (i,)) for i in range(4)])) == list(range(4))
    small.close()
    large.close()


def test_a_lost_argument_costs_no_actor() -> None:
    one = workers.Workers(Pool([0]), 1)
    one.wait()
    with pytest.raises(ObjectLostError):
        list(one.run([Call("miss", ())]))
    assert one.losses == 0
    one.close()


class AttackerKiller(Killer):
    """Kills an attacker when the first of a round's attacks is over."""

    def clients_done(self, round: int, done: int, total: int) -> None:
        pass

    def attacks_done(self, round: int, done: Sequence[tuple[str, float]], waiting: Sequence[str]) -> None:
        if done:
            super().clients_done(round, len(done), len(done) + len(waiting))


def test_attacks_are_the_same_after_an_attacker_is_killed(undisturbed: RunFolder, tmp_path: Path) -> None:
    killer = AttackerKiller("AttackerActor", round=1)
    folder = runner.launch(parsed(extra=ATTACK), str(tmp_path), on_ray(), killer)
    assert killer.killed == 1
    assert "1 attacker died" in " ".join(killer.notes)
    assert_same_bits(weights(folder), weights(undisturbed))
    attacks, expected = (f.read_table("attacks").drop_columns(["seconds"]) for f in (folder, undisturbed))
    assert attacks.equals(expected)
    for table in ("images", "traces", "snapshots"):
        assert folder.read_table(table).equals(undisturbed.read_table(table))


class Order(Noting):
    """Notes in which order the rounds' training and observations come."""

    def __init__(self) -> None:
        super().__init__()
        self.events = list[str]()

    def clients_done(self, round: int, done: int, total: int) -> None:
        self.events.append(f"clients {round}")

    def observations_done(self, round: int, done: int, total: int) -> None:
        self.events.append(f"observations {round}")


OWN_CORES = [f"resources.{kind}.{field}" for kind in ("clients", "attackers") for field in ("actors=1", "num_cpus=1")]


@pytest.mark.parametrize("killed", [False, True])
def test_attackers_with_cores_of_their_own_are_at_work_while_clients_train(
    killed: bool, undisturbed: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the tables are those of attacks after the training, also where an attacker dies meanwhile."""
    begun, started = list[int](), workers.Workers._start

    def start(actor: Any, call: Call) -> Any:
        if call.method == "attack":
            begun.append(len(progress.events))
            if killed and len(begun) == 1:
                kill(actor)
        return started(actor, call)

    monkeypatch.setattr(workers.Workers, "_start", staticmethod(start))
    progress = Order()
    folder = runner.launch(parsed(*OWN_CORES, extra=ATTACK), str(tmp_path), on_ray(), progress)
    assert progress.events.index("observations 1") < progress.events.index("clients 1")
    calls = 4 * (1 + killed)  # of two arms, two victims each and one
    assert len(begun) == calls
    assert max(begun[:4]) <= progress.events.index("clients 1"), "all are handed out before the training"
    assert not differences(folder.url, undisturbed.url)


def test_attacks_that_begin_before_the_training_are_not_on_who_sends_nothing_in_it(tmp_path: Path) -> None:
    changes = "federation.system={deadline: 1000, devices: {phone: {failure: 0.5}}}", "attacks.0.rounds=[0, 1]"
    here = runner.launch(parsed(*changes, extra=ATTACK), str(tmp_path), local, Progress())
    lost = {(row["round"], row["client"]) for row in here.read_table("clients").to_pylist() if row["status"] != "ok"}
    attacked = {(row["round"], row["victim"]) for row in here.read_table("attacks").to_pylist()}
    assert 0 < len(attacked) < 3 + 3, "of those that begin some send nothing"
    assert not attacked & lost
    progress = Order()
    there = runner.launch(parsed(*changes, *OWN_CORES, extra=ATTACK), str(tmp_path), on_ray(), progress)
    assert progress.events.index("observations 0") < progress.events.index("clients 0")
    assert not differences(there.url, here.url)


@pytest.mark.parametrize("how", ["federation.failures.then=drop", "federation.failures.timeout=60"])
def test_attackers_wait_for_clients_that_may_fail_or_hang(how: str, tmp_path: Path) -> None:
    progress = Order()
    runner.launch(parsed(how, *OWN_CORES, extra=ATTACK), str(tmp_path), on_ray(), progress)
    assert progress.events.index("observations 1") > progress.events.index("clients 1")


def test_attackers_that_share_cores_with_clients_wait_for_these(tmp_path: Path) -> None:
    progress = Order()
    runner.launch(parsed(extra=ATTACK), str(tmp_path), on_ray(), progress)
    assert progress.events.index("observations 1") > progress.events.index("clients 1")


@pytest.fixture(scope="module")
def boosted(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return runner.launch(parsed(*BOOSTED), str(tmp_path_factory.mktemp("boosted")), local, Progress())


def test_votes_do_not_depend_on_the_number_of_actors(boosted: RunFolder, tmp_path: Path) -> None:
    one = parsed(*BOOSTED, "resources.clients.actors=1", "resources.clients.num_cpus=1")
    assert_same_votes(runner.launch(one, str(tmp_path), on_ray(), Progress()), boosted)


@pytest.mark.slow
def test_votes_are_the_same_when_the_server_dies_before_it_hears_them(
    boosted: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In round 1, when its memory is that of round 0."""
    consult, answered = RayExecutor.run_clients, list[int]()

    def deadly(self: RayExecutor, calls: Any) -> Any:
        yield from consult(self, calls)
        if calls and calls[0].method == "answer":
            answered.append(len(calls))
            if len(answered) == 2:
                kill(self._server.actor)

    monkeypatch.setattr(RayExecutor, "run_clients", deadly)
    progress = Noting()
    folder = runner.launch(parsed(APART, *BOOSTED), str(tmp_path), on_ray(), progress)
    assert answered == [4] * 4
    assert "round 2 is rerun: the server died" in progress.notes[0]
    assert_same_votes(folder, boosted)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("resources.clients.num_gpus=1", "one actor asks for 1 CPU and 1 GPU"),
        ("resources.clients.num_cpus=400", "no node has more than"),
        ("resources.clients.actors=400", "ask for fewer actors or smaller shares"),
    ],
)
def test_resources_that_the_cluster_does_not_have(change: str, expected: str, tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match=expected):
        runner.launch(parsed(change), str(tmp_path), on_ray(), Progress())


def test_server_and_attackers_are_sent_no_data_and_no_seed(spied: Spied) -> None:
    """Every argument of their constructors and methods, searched for the scenario, the seed and raw images by value."""
    scenario = parsed(extra=ATTACK)
    data = prepare_inputs(scenario).data
    pixels = [images for images in (data.train_images, data.test_images, data.public_images) if images is not None]
    raw = {
        image.tobytes() for images in pixels for i in images for image in (i, (i / np.float32(255)).astype(np.float32))
    }
    curious = [call for call in spied.calls if not call[0].startswith("ClientActor")]
    methods = {"ServerActor.sent", "ServerActor.add", "ServerActor.finish", "AttackerActor.attack"}
    assert {"ServerActor", "AttackerActor", *methods} <= {name for name, _ in curious}
    for value in _walk(curious):
        assert not isinstance(value, Scenario | Truth | Dataset)
        assert str(value) != str(scenario.seed)
        if isinstance(value, torch.Tensor | np.ndarray):
            array = np.ascontiguousarray(value)
            assert array.tobytes() not in raw
            assert not array.ndim or not any(row.tobytes() in raw for row in array)


def _walk(value: Any) -> Any:
    if isinstance(value, ray.ObjectRef):
        value = ray.get(value)
    yield value
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    if isinstance(value, BaseModel):
        children = [field for _, field in value]
    if hasattr(value, "__dataclass_fields__"):
        children = [getattr(value, f) for f in value.__dataclass_fields__]
    for child in children:
        yield from _walk(child)
