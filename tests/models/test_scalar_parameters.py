"""Parameters without dimensions, such as a learnt temperature, in every defence, protection, rule and attack."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rayfed
from rayfed import registry
from rayfed.attacks.matching.sent import _denied
from rayfed.attacks.text.tag import _distance
from rayfed.defences.base import Batch, Task
from rayfed.defences.dp_sgd import DpSgd
from rayfed.defences.noise import sample_norms
from rayfed.gradients import buffers_of, clipped, gradient, norm, sample_rows, weights_of
from rayfed.scenario import Training
from rayfed.simulation.client.cohort import cohort_updates
from rayfed.simulation.client.local import gradient_method
from tests.helpers.component_fixtures import required, variants

HERE = "tests.models.test_scalar_parameters"


class Tempered(nn.Module):
    """Two blocks of a convolution, a gain before and a temperature after, the gain the first of all parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.first, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.second, self.norm2 = nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.leave = nn.Linear(256, 10)
        self.temperature = nn.Parameter(torch.tensor(0.5))
        self.register_buffer("shift", torch.tensor(0.1))

    def forward(self, images: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.first(images * self.gain)))
        hidden = torch.relu(self.norm2(self.second(hidden)))
        return self.leave(hidden.flatten(1)) / self.temperature.exp() + self.shift


FEDERATIONS: dict[str, dict[str, Any]] = {
    "fedasync": {"clients_per_round": 1, "system": {}},
    "fedboosting": {"validation": 0.2},
    "fedbuff": {"clients_per_round": 2, "system": {}},
    "krum": {"aggregation": {"name": "krum", "malicious": 0}},
}
"""Settings of the federation that an aggregation rule needs with three clients."""
ATTACKS = [
    "analytic",
    {"name": "dlg", "iterations": 1, "restarts": 1},
    {"name": "inverting_gradients", "iterations": 2, "knowledge": ["defence", "code"]},
    {"name": "gradinversion", "iterations": 2},
    {"name": "grnn", "iterations": 2},
    "peel",
    {"name": "membership", "knowledge": ["candidates"]},
    {"name": "membership", "score": "lira", "knowledge": ["candidates", "public"]},
    {"name": "property_inference", "knowledge": ["public"]},
]


def launched(folder: Path, **fields: Any) -> Any:
    scenario = {
        "name": "scalars",
        "data": {"name": "digits", "size": 8, "train_samples": 60, "test_samples": 10, "public": 0.2},
        "model": {"name": f"{HERE}:Tempered"},
        "training": {"epochs": 1, "batch_size": 10, "lr": 0.1, "momentum": 0.5, "clip_norm": 1.0},
        "federation": {"rounds": 1, "clients": 3},
    }
    return rayfed.launch(scenario | fields, out=folder)


@pytest.mark.engine
@pytest.mark.parametrize("name", sorted(registry.table("defences")))
def test_every_defence_takes_them(name: str, tmp_path: Path) -> None:
    for parameters in variants(name):
        run = launched(tmp_path, defences=[{"name": name} | parameters])
        assert run.clients["status"].to_pylist() == ["ok"] * 3


@pytest.mark.engine
@pytest.mark.parametrize("name", sorted(registry.table("aggregations")))
def test_every_rule_takes_them(name: str, tmp_path: Path) -> None:
    rule = {"name": name} | required("aggregations", name)
    federation = {"rounds": 1, "clients": 3, "aggregation": rule} | FEDERATIONS.get(name, {})
    run = launched(tmp_path, federation=federation)
    assert run.status["state"] == "finished"


@pytest.mark.engine
@pytest.mark.parametrize("name", sorted(registry.table("protections")))
def test_every_protection_takes_them(name: str, tmp_path: Path) -> None:
    key = {"key_bits": 512, "insecure": True} if name == "paillier" else {}
    protection = {"name": name} | required("protections", name) | key
    run = launched(tmp_path, federation={"rounds": 1, "clients": 3, "protection": protection})
    assert run.status["state"] == "finished"


@pytest.mark.engine
@pytest.mark.parametrize("defences", [[], [{"name": "prune", "ratio": 0.5}]])
def test_no_attack_fails_on_them(defences: list[dict[str, Any]], tmp_path: Path) -> None:
    attacks = [{"name": one} if isinstance(one, str) else one for one in ATTACKS]
    written = [
        {"label": str(place), "victims": 1, "observes": "gradient", "batch_size": 2} | one
        for place, one in enumerate(attacks)
    ]
    run = launched(tmp_path, defences=defences, attacks=written)
    statuses = run.attacks["status"].to_pylist() + run.inferences["status"].to_pylist()
    assert len(statuses) >= len(ATTACKS)
    assert "failed" not in statuses


def small_task() -> Task:
    torch.manual_seed(0)
    model = Tempered()
    images = torch.rand(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    data = Batch(images, torch.tensor([1, 2, 1]), places=torch.arange(3))
    return Task(0, 0, model, weights_of(model), buffers_of(model), data, torch.Generator(), order=0, batch_size=3)


def test_gradients_with_them_are_clipped_to_the_bound() -> None:
    task = small_task()
    slope, _ = gradient(task.model, task.weights, task.buffers, task.data.inputs, task.data.labels)
    assert float(norm(clipped(slope, 0.01))) == pytest.approx(0.01, rel=1e-3)
    stacked = {name: torch.stack([g, 2 * g]) for name, g in slope.items()}
    both = clipped(stacked, 0.01, leading=1)
    for name, g in clipped(slope, 0.01).items():
        torch.testing.assert_close(both[name], torch.stack([g, g]))


def test_one_sample_at_a_time_their_noiseless_sum_is_the_gradient() -> None:
    task = small_task()
    sent, _ = gradient_method([DpSgd(clip=1e3, noise_multiplier=0.0)])(task, task.weights, task.data)
    expected, _ = gradient(task.model, task.weights, task.buffers, task.data.inputs, task.data.labels)
    torch.testing.assert_close(sent, expected)


def test_norms_and_rows_of_samples() -> None:
    numbers = torch.tensor([3.0, -4.0, 0.0])
    assert sample_norms(numbers).tolist() == [3.0, 4.0, 0.0]
    assert sample_rows({"a": numbers, "b": torch.ones(3, 2)}).shape == (3, 3)


@pytest.mark.parametrize("vectorise", ["vmap", "fused"])
def test_cohorts_with_them_are_trained_together(vectorise: str) -> None:
    training = Training(epochs=1, batch_size=2, lr=0.1)
    [alone] = cohort_updates([small_task()], training, [])
    together = training.model_copy(update={"vectorise": vectorise})
    for made in cohort_updates([small_task(), small_task().replace(client=1)], together, []):
        torch.testing.assert_close(made.tensors, alone.tensors, rtol=1e-4, atol=1e-6)


def test_distances_of_texts_and_visible_zeros_take_them() -> None:
    gradients = {"scale": torch.tensor([1.0, 3.0]), "weight": torch.ones(2, 2, 2)}
    targets = {"scale": torch.tensor([0.0, 0.0]), "weight": torch.zeros(2, 2, 2)}
    assert _distance(1.0, gradients, targets).tolist() == [5 + 5, 13 + 7]
    assert _denied({"a.weight": torch.ones(2, 2), "a.bias": torch.tensor(1.0)}) == []
