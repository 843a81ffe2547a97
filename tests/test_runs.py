"""Whole runs on Ray: the same bits whatever happens to the actors, and folders that survive."""

from __future__ import annotations

import json
import time
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
from actors.executor import on_ray
from actors.process import Share
from rayfed import scenario as scenarios
from rayfed.client.visit import Truth
from rayfed.data.base import Dataset
from rayfed.defences.base import Defence, Task, UpdateMethod
from rayfed.engine import runs
from rayfed.engine.federation import Federation
from rayfed.engine.inputs import prepare
from rayfed.engine.progress import Progress
from rayfed.errors import ResourceError, RunError, UserError
from rayfed.registry import component
from rayfed.scenario import Scenario
from rayfed.store.folder import RunFolder
from rayfed.update import Update
from tests.run_fixtures import Killer, Noting, Spied, assert_same_bits, kill, spied_launch, weights

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("ray_session")]

TEXT = """
name: t
seed: 987654321
data: {name: digits, size: 8, train_samples: 400, test_samples: 100}
partition: {name: dirichlet, alpha: 1}
model: {name: mlp, hidden: [16]}
training: {batch_size: 8, momentum: 0.5}
federation: {rounds: 3, clients: 8, clients_per_round: 7, cohort_size: 2, server: {momentum: 0.5}}
arms:
  none: []
  noise: [{name: gaussian, sigma: 0.001}]
resources: {clients: {actors: 2}, attackers: {actors: 1}}
"""
ATTACK = """
attacks:
  - {name: inverting_gradients, rounds: [1], victims: 3, victims_per_call: 2,
     observes: gradient, batch_size: 2, iterations: 5}
"""


def parsed(*changes: str, extra: str = "") -> Scenario:
    return scenarios.parse(TEXT + extra, changes=changes)


@pytest.fixture(scope="module")
def spied(ray_session: None, tmp_path_factory: pytest.TempPathFactory) -> Spied:
    return spied_launch(parsed(extra=ATTACK), tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def undisturbed(spied: Spied) -> RunFolder:
    return spied.folder


@pytest.mark.parametrize("actors", [1, 4])  # two in the run that all are compared with
def test_weights_do_not_depend_on_the_number_of_actors(actors: int, undisturbed: RunFolder, tmp_path: Path) -> None:
    s = parsed(f"resources.clients.actors={actors}", "resources.clients.num_cpus=1")
    folder = runs.launch(s, str(tmp_path), on_ray(), Progress())
    assert_same_bits(weights(folder), weights(undisturbed))


@component
class Slow(Defence):
    """Costs nothing but time."""

    SECONDS = 0.3

    def wrap_update(self, next: UpdateMethod) -> UpdateMethod:
        def update(task: Task) -> Update:
            time.sleep(self.SECONDS)
            return next(task)

        return update


@pytest.mark.parametrize("victim", ["ClientActor", "ServerActor"])
def test_weights_are_the_same_after_an_actor_is_killed(victim: str, undisturbed: RunFolder, tmp_path: Path) -> None:
    killer = Killer(victim, round=1)
    folder = runs.launch(parsed(), str(tmp_path), on_ray(), killer)
    assert killer.killed == 1
    assert "died" in " ".join(killer.notes)
    assert_same_bits(weights(folder), weights(undisturbed))
    assert folder.read_table("clients").num_rows == 3 * 2 * 7


def kill_server_before(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, so that what it is asked for never comes."""
    ask, killed = Federation._ask_server, list[str]()

    def deadly(self: Federation, asked: str, *arguments: Any) -> Any:
        if asked == method and not killed:
            killed.append(asked)
            kill(self._server)
        return ask(self, asked, *arguments)

    monkeypatch.setattr(Federation, "_ask_server", deadly)


@pytest.mark.parametrize("method", [pytest.param("sent", marks=pytest.mark.slow), "finish"])
def test_weights_are_the_same_when_the_server_dies_before_it_answers(
    method: str, undisturbed: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill_server_before(method, monkeypatch)
    progress = Noting()
    folder = runs.launch(parsed(), str(tmp_path), on_ray(), progress)
    assert_same_bits(weights(folder), weights(undisturbed))
    [note] = progress.notes  # and none of the clients' actors was taken for dead
    assert "the server died in round 0" in note


@pytest.mark.slow
def test_attacks_alone_survive_the_death_of_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = runs.attack(parsed(extra=ATTACK), None, str(tmp_path), on_ray(), Progress())
    kill_server_before("sent", monkeypatch)
    progress = Noting()
    folder = runs.attack(parsed(extra=ATTACK), None, str(tmp_path), on_ray(), progress)
    a, b = (f.read_table("attacks").drop_columns(["seconds"]) for f in (folder, expected))
    assert a.equals(b)
    assert len(progress.notes) == 1


def test_weights_are_the_same_after_objects_are_lost(
    undisturbed: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the node dies that held what the server had sent; a test has one node, so Ray's error is pretended."""
    evaluate, asked = Federation._evaluate, list[int]()

    def failing(self: Federation, *arguments: Any) -> Any:
        asked.append(1)
        if len(asked) == 2:
            raise ObjectLostError("00" * 28, "", "")
        return evaluate(self, *arguments)

    monkeypatch.setattr(Federation, "_evaluate", failing)
    progress = Noting()
    folder = runs.launch(parsed(), str(tmp_path), on_ray(), progress)
    assert_same_bits(weights(folder), weights(undisturbed))
    [note] = progress.notes
    assert "an object was lost in round 1" in note


class Worker:
    def work(self, what: Any) -> Any:
        return what

    def miss(self) -> None:
        raise ObjectLostError("00" * 28, "", "")


class Workers(ActorPool):
    """Hires actors that ask for so many CPUs, one after another; 100 are more than there are."""

    def __init__(self, cpus: list[float]) -> None:
        super().__init__()
        self._asked = iter(cpus)

    def acquire(self, *_: Any) -> Any:
        return super().acquire(Worker, Share(next(self._asked), 0))


def test_actors_without_a_place_are_waited_for_no_longer_than_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "START_TIMEOUT", 1.0)
    nowhere = workers.Workers(Workers([100, 100]), 2)
    with pytest.raises(ResourceError, match="2 of 2 actors did not start within 1 s"):
        nowhere.wait()
    with pytest.raises(ResourceError, match="2 of 2 actors did not start within 1 s"):
        list(nowhere.run([pool.Call("work", (1,))]))
    nowhere.close()


def test_the_living_do_the_work_of_an_actor_that_cannot_be_replaced() -> None:
    two = workers.Workers(Workers([0, 0, 100]), 2)
    two.wait()
    kill(two._actors[1])
    assert sorted(result for _, result, _ in two.run([pool.Call("work", (i,)) for i in range(9)])) == list(range(9))
    assert two.losses == 1
    two.close()


def test_what_finds_no_place_gets_that_of_another_pools_actor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "PATIENCE", 0.5)
    half = ray.available_resources()["CPU"] / 2
    large = workers.Workers(Workers([half] * 3), 2)
    small = workers.Workers(Workers([0, half]), 1, make_room=large.give_place)
    for each in (large, small):
        each.wait()
    kill(small._actors[0])
    assert [result for _, result, _ in small.run([pool.Call("work", (7,))])] == [7]
    assert small.losses == 1
    assert sorted(result for _, result, _ in large.run([pool.Call("work", (i,)) for i in range(4)])) == list(range(4))
    small.close()
    large.close()


def test_a_lost_argument_costs_no_actor() -> None:
    one = workers.Workers(Workers([0]), 1)
    one.wait()
    with pytest.raises(ObjectLostError):
        list(one.run([pool.Call("miss", ())]))
    assert one.losses == 0
    one.close()


class AttackerKiller(Killer):
    """Kills an attacker when the first of a round's attacks is scored."""

    def clients_done(self, round: int, done: int, total: int) -> None:
        pass

    def attacks_done(self, round: int, done: int, total: int) -> None:
        super().clients_done(round, done, total)


def test_attacks_are_the_same_after_an_attacker_is_killed(undisturbed: RunFolder, tmp_path: Path) -> None:
    killer = AttackerKiller("AttackerActor", round=1)
    folder = runs.launch(parsed(extra=ATTACK), str(tmp_path), on_ray(), killer)
    assert killer.killed == 1
    assert "1 attacker died" in " ".join(killer.notes)
    assert_same_bits(weights(folder), weights(undisturbed))
    attacks, expected = (f.read_table("attacks").drop_columns(["seconds"]) for f in (folder, undisturbed))
    assert attacks.equals(expected)
    for table in ("images", "traces", "snapshots"):
        assert folder.read_table(table).equals(undisturbed.read_table(table))


class Stop(Progress):
    """Interrupts the driver after some rounds, as Ctrl-C does."""

    def __init__(self, after: int) -> None:
        self.after = after

    def clients_done(self, round: int, done: int, total: int) -> None:
        if round == self.after and done > 4:
            raise KeyboardInterrupt


@pytest.mark.parametrize("after", [pytest.param(0, marks=pytest.mark.slow), 1, pytest.param(2, marks=pytest.mark.slow)])
def test_an_interrupted_run_is_readable_and_resumes_to_the_same_bits(
    after: int, undisturbed: RunFolder, tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        runs.launch(parsed(extra=ATTACK), str(tmp_path), on_ray(), Stop(after))
    [path] = tmp_path.iterdir()
    folder = RunFolder.open(str(path))
    status = json.loads(folder.read_text("status.json"))
    assert (status["state"], status["rounds_done"]) == ("interrupted", after)
    assert folder.exists("report.html")
    assert folder.read_table("rounds").num_rows == 2 * after
    runs.resume(str(path), on_ray(), Progress())
    assert_same_bits(weights(folder), weights(undisturbed))
    for table in ("rounds", "clients", "attacks", "images", "partition"):
        assert folder.read_table(table).num_rows == undisturbed.read_table(table).num_rows
    timed = ["seconds"]
    for table in ("clients", "attacks"):
        a, b = (f.read_table(table).drop_columns(timed) for f in (folder, undisturbed))
        assert a.equals(b)
    with pytest.raises(RunError, match="nothing to resume"):
        runs.resume(str(path), on_ray(), Progress())


BOOSTED = [
    "federation.validation=0.25",
    "arms={mean: [], boosted: {aggregation: {name: fedboosting, smoothing: 0.1}}}",
    "federation.clients_per_round=4",
]


@pytest.fixture(scope="module")
def boosted(ray_session: None, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return runs.launch(parsed(*BOOSTED), str(tmp_path_factory.mktemp("boosted")), on_ray(), Progress())


def assert_same_votes(a: RunFolder, b: RunFolder) -> None:
    assert_same_bits(weights(a), weights(b))
    for table in ("weights", "scores"):
        assert a.read_table(table).equals(b.read_table(table))


def test_clients_votes_are_in_the_tables_and_the_memory_in_the_checkpoint(boosted: RunFolder) -> None:
    votes, scores = (boosted.read_table(table).to_pylist() for table in ("weights", "scores"))
    assert {row["arm"] for row in votes} == {"boosted"}
    for round in range(3):
        drawn = {row["client"]: row["weight"] for row in votes if row["round"] == round}
        assert sum(drawn.values()) == pytest.approx(1)
        pairs = [(row["model"], row["validator"]) for row in scores if row["round"] == round]
        assert pairs == [(model, validator) for model in drawn for validator in drawn]
    assert weights(boosted)["mean"]["memory"] == {}
    assert set(weights(boosted)["boosted"]["memory"]) == {row["client"] for row in votes}


def test_votes_do_not_depend_on_the_number_of_actors(boosted: RunFolder, tmp_path: Path) -> None:
    one = parsed(*BOOSTED, "resources.clients.actors=1", "resources.clients.num_cpus=1")
    assert_same_votes(runs.launch(one, str(tmp_path), on_ray(), Progress()), boosted)


@pytest.mark.slow
def test_votes_are_the_same_when_the_server_dies_before_it_hears_them(
    boosted: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In round 1, when its memory is that of round 0."""
    consult, answered = Federation._run_clients, list[int]()

    def deadly(self: Federation, calls: Any) -> Any:
        yield from consult(self, calls)
        if calls and calls[0].method == "answer":
            answered.append(len(calls))
            if len(answered) == 2:
                kill(self._server)

    monkeypatch.setattr(Federation, "_run_clients", deadly)
    progress = Noting()
    folder = runs.launch(parsed(*BOOSTED), str(tmp_path), on_ray(), progress)
    assert answered == [4] * 4
    assert "the server died in round 1" in progress.notes[0]
    assert_same_votes(folder, boosted)


@pytest.mark.slow
def test_votes_are_the_same_after_a_resume(boosted: RunFolder, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        runs.launch(parsed(*BOOSTED), str(tmp_path), on_ray(), Stop(2))
    [path] = tmp_path.iterdir()
    runs.resume(str(path), on_ray(), Progress())
    assert_same_votes(RunFolder.open(str(path)), boosted)


def test_attacks_leave_rows_images_and_traces(undisturbed: RunFolder) -> None:
    attacks = undisturbed.read_table("attacks").to_pandas()
    assert len(attacks) == 2 * 3 * 2  # arms, victims, images
    assert set(attacks["round"]) == {1}
    assert attacks["psnr"].notna().all()
    victims = [set(rows["victim"]) for _, rows in attacks.groupby("arm")]
    assert victims[0] == victims[1]
    assert undisturbed.read_table("images").num_rows == len(attacks)
    assert undisturbed.read_table("traces").num_rows > 0
    strips = undisturbed.read_table("snapshots").to_pandas()
    assert len(strips) == 2 * 2 * 2  # arms, images of the first victim, iterations 0 and 5
    assert set(strips["victim"]) == {attacks["victim"][0]}
    assert strips["image"].map(bytes).isin(undisturbed.read_table("images").to_pandas()["reconstructed"]).sum() == 4


def test_a_failed_run_leaves_a_readable_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not finite"):
        runs.launch(parsed("training.lr=1e38"), str(tmp_path), on_ray(), Progress())
    [path] = tmp_path.iterdir()
    status = json.loads((path / "status.json").read_text())
    assert status["state"] == "failed"
    assert "not finite" in status["error"]
    assert "not finite" in (path / "report.html").read_text()


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
        runs.launch(parsed(change), str(tmp_path), on_ray(), Progress())


def test_fedsgd_and_adam_run(tmp_path: Path) -> None:
    changes = [
        "training={algorithm: fedsgd, batch_size: null, lr: 0.1}",
        "federation.server={optimiser: adam, lr: 0.01}",
    ]
    folder = runs.launch(parsed(*changes), str(tmp_path), on_ray(), Progress())
    losses = folder.read_table("rounds").to_pandas().query("arm == 'none'")["train_loss"].tolist()
    assert losses[-1] < losses[0]


def test_an_arms_seconds_are_its_own(tmp_path: Path) -> None:
    arms = "arms={slow: [{name: 'tests.test_runs:Slow'}], none: []}"
    s = parsed(arms, "federation.rounds=1", "federation.cohort_size=7", "resources.clients.actors=1")
    folder = runs.launch(s, str(tmp_path), on_ray(), Progress())
    seconds = {row["arm"]: row["actor_seconds"] for row in folder.read_table("rounds").to_pylist()}
    assert seconds["slow"] >= 7 * Slow.SECONDS
    for arm in seconds:
        clients = [row["seconds"] for row in folder.read_table("clients").to_pylist() if row["arm"] == arm]
        assert sum(clients) <= seconds[arm] < sum(clients) + 7 * Slow.SECONDS


def test_server_and_attackers_are_sent_no_data_and_no_seed(spied: Spied) -> None:
    """Every argument of their constructors and methods, searched for the scenario, the seed and raw images by value."""
    scenario = parsed(extra=ATTACK)
    data = prepare(scenario).data
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


@pytest.mark.slow
def test_attacks_alone_see_the_untrained_model_or_what_a_run_has_learnt(tmp_path: Path) -> None:
    whole = runs.launch(parsed(extra=ATTACK), str(tmp_path), on_ray(), Progress())
    before = runs.launch(parsed("federation.rounds=1"), str(tmp_path), on_ray(), Progress())
    alone = runs.attack(parsed("attacks.0.rounds=[0]", extra=ATTACK), before.url, str(tmp_path), on_ray(), Progress())
    timeless = ["seconds"]
    rows, expected = (folder.read_table("attacks").drop_columns(timeless).to_pylist() for folder in (alone, whole))
    assert rows == expected
    assert len(rows) == 2 * 3 * 2
    assert not alone.read_table("rounds").num_rows
    untrained = runs.attack(parsed(extra=ATTACK), None, str(tmp_path), on_ray(), Progress())
    assert {row["round"] for row in untrained.read_table("attacks").to_pylist()} == {0}
    with pytest.raises(RunError, match="attacked without training; nothing to resume"):
        runs.resume(alone.url, on_ray(), Progress())
    other = parsed("model.hidden=[8]", extra=ATTACK)
    with pytest.raises(RunError, match="trained another model"):
        runs.attack(other, before.url, str(tmp_path), on_ray(), Progress())
    with pytest.raises(RunError, match="none of its rounds is complete"):
        runs.attack(other, alone.url, str(tmp_path), on_ray(), Progress())
