"""Updates of attacked clients are computed once in a round, and a process that computes them again finds equal bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import cloudpickle
import pytest
import torch
import yaml

from rayfed import scenario
from rayfed.simulation.client import local
from rayfed.simulation.client.server_message import Sent, State
from rayfed.simulation.client.update_cache import ClientUpdate, UpdateCache, UpdateKey
from rayfed.simulation.client.visit import ObservationRequest, ObservedClient, Truth
from rayfed.simulation.executors.worker import ClientWorker
from rayfed.simulation.inputs import prepare_inputs
from rayfed.update import Observation, Update

CPU = torch.device("cpu")
FEW: Sequence[dict[str, Any]] = (
    {"name": "dlg"},
    {"name": "idlg", "observes": "gradient"},
    {"name": "inverting_gradients", "observes": "gradient"},
)
MANY: Sequence[dict[str, Any]] = (
    *FEW,
    {"name": "dlg", "label": "code", "knowledge": ["defence", "code"]},
    {"name": "dlg", "label": "of four", "observes": "gradient", "batch_size": 4},
    {"name": "dlg", "label": "mean", "averages": 3, "knowledge": ["defence"]},
    {"name": "dlg", "label": "mean of gradients", "observes": "gradient", "averages": 3, "knowledge": ["defence"]},
    {"name": "imprint", "observes": "gradient", "batch_size": 4, "knowledge": ["public"], "bins": 8},
    {"name": "imprint", "label": "more", "observes": "gradient", "batch_size": 4, "knowledge": ["public"], "bins": 16},
    {"name": "membership", "knowledge": ["candidates"]},
)
EARLIER = {"name": "dlg", "label": "earlier", "observes": "gradient", "earlier": 1, "rounds": [1]}
KEY_KNOWN = {"name": "dlg", "label": "key", "observes": "gradient", "knowledge": ["key"]}
DEFENCES: dict[str, Any] = {
    "none": [],
    "noisy": [{"name": "gaussian", "sigma": 0.1}],
    "feedback": [{"name": "top_k", "k": 0.5, "error_feedback": True}],
    "dropout": [{"name": "dropout", "rate": 0.5}],
    "passport": [{"name": "passport"}],
}


def attacks_on(arm: str) -> Sequence[dict[str, Any]]:
    """Return all attacks that an arm supports."""
    return (*MANY, {"passport": KEY_KNOWN, "feedback": MANY[0] | {"label": "last"}}.get(arm, EARLIER))


def new_worker(arm: str, attacks: Sequence[dict[str, Any]] = FEW, **training: Any) -> ClientWorker:
    document = {
        "name": "t",
        "data": {"name": "digits", "size": 8, "train_samples": 60, "test_samples": 20, "public": 0.2},
        "model": {"name": "mlp", "hidden": [16]} if attacks is FEW else {"name": "lenet", "norm": "batch"},
        "training": {"batch_size": 5, "lr": 0.1, **training},
        "federation": {"rounds": 3, "clients": 4},
        "arms": {arm: DEFENCES[arm]},
        "attacks": [{"rounds": [0], "victims": [1], **attack} for attack in attacks],
    }
    inputs = prepare_inputs(scenario.parse(yaml.safe_dump(document)))
    return ClientWorker(inputs.scenario, inputs.data, inputs.parts, CPU, inputs.validation)


def message(worker: ClientWorker, arm: str, round: int = 0) -> Sent:
    built = worker.arm(arm)
    return Sent(round, built.weights, built.buffers)


def state_of(worker: ClientWorker, arm: str) -> dict[int, State]:
    """Return the states of clients 1 and 2 after two rounds."""
    states: dict[int, State] = {}
    for round in range(2):
        states = worker.cohorts(arm, message(worker, arm, round), 0, [[1, 2]], states)[0].states
    return states


def observe(
    worker: ClientWorker, arm: str, train: bool = True, states: dict[int, State] | None = None
) -> list[tuple[Observation, Truth]]:
    """Train the victim if asked, and return its observations by all attacks, each repeated."""
    sent, seen = message(worker, arm), []
    if train:
        worker.cohorts(arm, sent, 0, [[1, 2]], states or {})
    for attack in worker.scenario.attacks:
        earlier = (replace(sent, round=0),) * attack.earlier
        for repeat in range(2):
            request = ObservationRequest(arm, [1], attack, states or {}, repeat, earlier)
            _, [observation], [truth] = worker.observe(sent, request)
            seen.append((observation, truth))
    return seen


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The clients that train, in order."""
    clients, train = list[int](), local._train

    def noting(task: Any, *how: Any) -> Update:
        clients.append(task.client)
        return train(task, *how)

    monkeypatch.setattr(local, "_train", noting)
    return clients


@pytest.mark.parametrize(("arm", "cached", "again"), [("none", 2, 7), ("noisy", 4, 13)])
def test_a_victims_update_is_computed_once(arm: str, cached: int, again: int, trained: list[int]) -> None:
    """That is once for the round and once per batch, and without defences for the distortion of each."""
    observe(new_worker(arm), arm)
    assert trained.count(1) == cached
    trained.clear()
    bare = new_worker(arm)
    bare.update_cache = UpdateCache(max_bytes=0)
    observe(bare, arm)
    assert trained.count(1) == again


@pytest.mark.parametrize("arm", DEFENCES)
def test_observations_are_the_same_without_the_cache_and_in_another_process(arm: str) -> None:
    """As if an actor died, so that another one observes without having trained."""
    first = new_worker(arm, attacks_on(arm))
    states = state_of(first, arm)
    assert bool(states) == (arm in ("feedback", "passport"))
    expected = observe(first, arm, states=states)
    bare = new_worker(arm, attacks_on(arm))
    bare.update_cache = UpdateCache(max_bytes=0)
    copied: dict[int, State] = cloudpickle.loads(cloudpickle.dumps(states))
    other_process = new_worker(arm, attacks_on(arm))
    for found in (observe(bare, arm, states=copied), observe(other_process, arm, train=False, states=copied)):
        for (seen, truth), (other, other_truth) in zip(expected, found, strict=True):
            pairs = [(seen, other), *zip(seen.earlier, other.earlier, strict=True)]
            for one, another in pairs:
                assert_equal(one.update, another.update)
                assert_equal(one.returned_buffers, another.returned_buffers)
            assert truth.distortion == other_truth.distortion
            assert (truth.fit, truth.nats) == (other_truth.fit, other_truth.nats)
            assert (truth.fits is None) == (other_truth.fits is None)
            if truth.fits is not None and other_truth.fits is not None:
                assert torch.equal(truth.fits.nan_to_num(-1), other_truth.fits.nan_to_num(-1))


def assert_equal(tensors: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> None:
    assert tensors.keys() == others.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, others[name])
        assert tensor.stride() == others[name].stride()


def test_a_state_is_part_of_the_key(trained: list[int]) -> None:
    worker = new_worker("feedback")
    states = state_of(worker, "feedback")
    sent, attack = message(worker, "feedback"), worker.scenario.attacks[0]
    copied: dict[int, State] = cloudpickle.loads(cloudpickle.dumps(states))
    trained.clear()
    for some in (states, copied, {1: states[2]}, {}):
        worker.observe(sent, ObservationRequest("feedback", [1], attack, some))
    assert trained == [1] * 2 * 3  # with and without defences


def test_updates_of_joint_training_are_not_cached(trained: list[int]) -> None:
    worker = new_worker("none", vectorise="vmap")
    sent = message(worker, "none")
    worker.cohorts("none", sent, 0, [[1, 2]], {})
    assert not len(worker.update_cache)
    alone = new_worker("none").observe(sent, ObservationRequest("none", [1], worker.scenario.attacks[0]))[1]
    seen = worker.observe(sent, ObservationRequest("none", [1], worker.scenario.attacks[0]))[1]
    assert_equal(seen[0].update, alone[0].update)


def test_only_observed_clients_of_an_attacked_round_are_cached() -> None:
    worker = new_worker("none")
    for round, count in enumerate((1, 0, 0)):
        worker.cohorts("none", message(worker, "none", round), 0, [[0, 1], [2, 3]], {})
        assert len(worker.update_cache) == count


def test_an_undefended_update_stays_with_the_clients() -> None:
    """Neither the results of a worker nor an object that refers to it contain the update that was cached."""
    worker = new_worker("noisy", attacks_on("noisy"))
    sent = message(worker, "noisy")
    for attack in worker.scenario.attacks:
        request = ObservationRequest("noisy", [1], attack)
        for_driver, seen, _ = worker.observe(sent, request)
        update = ObservedClient(worker, request.visit(sent, 1), attack).undefended()
        assert for_driver is None
        assert_without(update, cloudpickle.dumps(seen))
    _, nodes = worker.cohorts("noisy", sent, 0, [[1, 2]], {})
    assert_without(update, cloudpickle.dumps(nodes))
    assert len(worker.update_cache)
    assert not len(cloudpickle.loads(cloudpickle.dumps(worker.update_cache)))


def assert_without(update: Update, pickled: bytes) -> None:
    for tensor in update.tensors.values():
        assert tensor.numpy().tobytes() not in pickled


KEY = UpdateKey("none", "", 1, b"", "", b"")


def one_update() -> ClientUpdate:
    return ClientUpdate(Update(1, 0, {"w": torch.arange(4.0)}, {}, 1, 0.0))


def test_a_caller_may_change_an_update() -> None:
    cache = UpdateCache()
    for _ in range(3):
        update = cache.get(KEY, CPU, one_update).update
        assert update.tensors["w"].tolist() == [0.0, 1.0, 2.0, 3.0]
        update.tensors["w"].zero_()


def test_only_a_rounds_first_updates_are_cached() -> None:
    computed = list[int]()

    def compute() -> ClientUpdate:
        computed.append(1)
        return one_update()

    cache = UpdateCache(max_bytes=16)
    for round, key, count in [(0, KEY, 1), (0, KEY, 1), (0, replace(KEY, client=2), 2), (0, KEY, 2), (1, KEY, 3)]:
        cache.begin_round(round)
        cache.get(key, CPU, compute)
        assert len(computed) == count
