"""Updates of attacked clients are computed once in a round, and a process that computes them again finds equal bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import yaml

from rayfed import scenario
from rayfed.client import local
from rayfed.client.sent import Sent
from rayfed.client.update_cache import UpdateCache, UpdateKey
from rayfed.client.visit import ObservationRequest
from rayfed.engine.inputs import prepare
from rayfed.engine.worker import ClientWorker
from rayfed.update import Update

DOCUMENT: dict[str, Any] = {
    "name": "t",
    "data": {"name": "digits", "size": 8, "train_samples": 40, "test_samples": 20},
    "model": {"name": "mlp", "hidden": [16]},
    "training": {"batch_size": 5, "lr": 0.1},
    "federation": {"rounds": 1, "clients": 4},
    "arms": {"none": [], "noisy": [{"name": "gaussian", "sigma": 0.1}]},
    "attacks": [
        {"name": "dlg", "victims": [1]},
        {"name": "idlg", "victims": [1], "observes": "gradient"},
        {"name": "inverting_gradients", "victims": [1], "observes": "gradient"},
    ],
}


def new_worker() -> ClientWorker:
    inputs = prepare(scenario.parse(yaml.safe_dump(DOCUMENT)))
    return ClientWorker(inputs.scenario, inputs.data, inputs.parts, torch.device("cpu"), inputs.validation)


def observe(worker: ClientWorker, arm: str, train: bool = True) -> list[tuple[Any, Any]]:
    """Train the victim if asked, and return its observations by all attacks, each repeated."""
    built = worker.arm(arm)
    sent = Sent(0, built.weights, built.buffers)
    if train:
        worker.cohorts(arm, sent, 0, [[1]], {})
    seen = []
    for attack in worker.scenario.attacks:
        for repeat in range(2):
            _, [observation], [truth] = worker.observe(sent, ObservationRequest(arm, [1], attack, repeat=repeat))
            seen.append((observation, truth))
    return seen


@pytest.mark.parametrize(("arm", "kept", "again"), [("none", 2, 7), ("noisy", 4, 13)])
def test_a_victims_update_is_computed_once(arm: str, kept: int, again: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """That is once for the round and once per batch, and without defences for the distortion of each."""
    counted, train = list[int](), local._train

    def counting(task: Any, *how: Any) -> Update:
        counted.append(task.client)
        return train(task, *how)

    monkeypatch.setattr(local, "_train", counting)
    first = observe(new_worker(), arm)
    assert counted == [1] * kept
    counted.clear()
    bare = new_worker()
    bare.update_cache = UpdateCache(max_bytes=0)
    second = observe(bare, arm)
    assert counted == [1] * again
    third = observe(new_worker(), arm, train=False)
    for (seen, truth), *others in zip(first, second, third, strict=True):
        for other, other_truth in others:
            assert all(torch.equal(seen.update[name], other.update[name]) for name in seen.update)
            assert seen.update.keys() == other.update.keys()
            assert (truth.distortion, truth.fit, truth.nats) == (
                other_truth.distortion,
                other_truth.fit,
                other_truth.nats,
            )


KEY = UpdateKey("none", "", 1, b"", "", b"")


def one_update() -> tuple[Update, None]:
    return Update(1, 0, {"w": torch.arange(4.0)}, {}, 1, 0.0), None


def test_a_caller_may_change_an_update() -> None:
    cache, cpu = UpdateCache(), torch.device("cpu")
    for _ in range(3):
        update, _ = cache.find_or_compute(KEY, cpu, one_update)
        assert update.tensors["w"].tolist() == [0.0, 1.0, 2.0, 3.0]
        update.tensors["w"].zero_()


def test_only_a_rounds_first_updates_are_kept() -> None:
    computed = list[int]()

    def compute() -> tuple[Update, None]:
        computed.append(1)
        return one_update()

    cache, cpu = UpdateCache(max_bytes=16), torch.device("cpu")
    for round, key, count in [(0, KEY, 1), (0, KEY, 1), (0, replace(KEY, client=2), 2), (0, KEY, 2), (1, KEY, 3)]:
        cache.begin(round)
        cache.find_or_compute(key, cpu, compute)
        assert len(computed) == count
