"""Batches of one sample, which norms of a batch cannot be trained on: foreseen, explained, and left where they work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from typer.testing import CliRunner

from rayfed import scenario as scenarios
from rayfed.cli import app
from rayfed.defences.base import Batch, DataMethod, Defence, Task
from rayfed.errors import UserError
from rayfed.registry import component
from rayfed.scenario import Training
from rayfed.simulation.client import plan
from rayfed.simulation.client.local import batches, smallest_batch
from rayfed.simulation.inputs import prepare_inputs
from rayfed.simulation.small_batches import check_batches


class Normed(nn.Module):
    def __init__(self, classes: int, norm: nn.Module) -> None:
        super().__init__()
        self.first, self.between, self.last = nn.Linear(64, 8), norm, nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.between(self.first(x.flatten(1)))))


def batch_norm(image_shape: Any, classes: int) -> nn.Module:
    return Normed(classes, nn.BatchNorm1d(8))


def group_norm(image_shape: Any, classes: int) -> nn.Module:
    return Normed(classes, nn.GroupNorm(8, 8))


def layer_norm(image_shape: Any, classes: int) -> nn.Module:
    return Normed(classes, nn.LayerNorm(8))


def frozen(image_shape: Any, classes: int) -> nn.Module:
    """Has statistics of its own in training mode, too."""
    model = Normed(classes, nn.BatchNorm1d(8))
    model.between.train = lambda mode=True: model.between  # type: ignore[method-assign]
    model.between.training = False
    return model


def on_maps(image_shape: Any, classes: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(72, classes))


def on_points(image_shape: Any, classes: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 8), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(2, classes))


class Functional(nn.Module):
    def __init__(self, image_shape: Any, classes: int) -> None:
        super().__init__()
        self.first = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        return functional.batch_norm(self.first(x.flatten(1)), None, None, training=True)


class Squeezing(nn.Module):
    def __init__(self, image_shape: Any, classes: int) -> None:
        super().__init__()
        self.first = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x.flatten(1)).squeeze()


@component
class Twice(Defence):
    """Has every sample twice."""

    def wrap_data(self, next: DataMethod) -> DataMethod:
        """Repeat the data."""

        def data(task: Task) -> Batch:
            own = next(task)
            return own.rows(torch.arange(len(own.labels)).repeat(2))

        return data


TEXT = """
name: t
data: {{name: digits, size: 8, train_samples: {samples}, test_samples: 8}}
model: {{name: "tests.simulation.test_small_batches:{model}"}}
training: {{batch_size: 4, lr: 0.1}}
federation: {{rounds: 2, clients: 3}}
"""


def remarks(model: str, *changes: str, samples: int = 15) -> list[str]:
    return check_batches(prepare_inputs(scenarios.parse(TEXT.format(model=model, samples=samples), changes=changes)))


def refused(model: str, *changes: str, samples: int = 15) -> str:
    with pytest.raises(UserError) as error:
        remarks(model, *changes, samples=samples)
    return str(error.value)


@pytest.mark.parametrize("samples", [1, 2, 7, 8, 9, 17])
@pytest.mark.parametrize("size", [None, 1, 2, 4, 8])
@pytest.mark.parametrize(
    "how", [{"epochs": 1}, {"epochs": 3}, {"steps": 1}, {"steps": 3}, {"steps": 9}, {"algorithm": "fedsgd"}]
)
def test_the_smallest_batch_is_that_of_a_round(samples: int, size: int | None, how: dict[str, Any]) -> None:
    training = Training(batch_size=size, **how)
    assert smallest_batch(samples, training) == min(map(len, batches(samples, training, order=3)))


@pytest.mark.parametrize("model", ["batch_norm", "group_norm", "on_points", "Functional", "Squeezing"])
def test_models_that_take_no_single_sample_are_refused(model: str) -> None:
    said = refused(model)
    assert all(part in said for part in ("'none'", "0 (5 samples)", "training.batch_size", "data.train_samples"))
    assert ("model.batch_norm" in said) == (model in ("batch_norm", "on_points"))


@pytest.mark.parametrize("model", ["layer_norm", "frozen", "on_maps"])
def test_models_that_take_one_are_not(model: str) -> None:
    assert remarks(model) == []
    assert remarks(model, "training.batch_size=1") == []


@pytest.mark.parametrize(
    "changes",
    [
        ("model.batch_norm=eval",),
        ("training.batch_size=5",),
        ("training.batch_size=null",),
        ("training.steps=1",),
        ("training={algorithm: fedsgd, batch_size: 4}",),
        ("data.train_samples=18",),
        ("defences=['tests.simulation.test_small_batches:Twice']",),
    ],
)
def test_what_has_no_batch_of_one_is_not_refused(changes: tuple[str, ...]) -> None:
    assert remarks("batch_norm", *changes) == []


@pytest.mark.parametrize("size", range(2, 9))
def test_the_batch_size_that_is_named_works(size: int) -> None:
    training = Training(batch_size=size)
    if any(smallest_batch(samples, training) == 1 for samples in (5, 6)):
        said = refused("batch_norm", f"training.batch_size={size}", samples=16)
        better = said.partition("Set training.batch_size to ")[2].partition(",")[0]
        assert remarks("batch_norm", f"training.batch_size={better}", samples=16) == []
    else:
        assert remarks("batch_norm", f"training.batch_size={size}", samples=16) == []


def test_a_client_with_one_sample_needs_another_partition() -> None:
    said = refused("batch_norm", "federation.clients=15")
    assert "(1 sample)" in said
    assert "federation.clients" in said


@pytest.mark.parametrize("seed", range(6))
def test_only_clients_that_take_part_count(seed: int) -> None:
    """Of 16 samples two clients have 5, whose last batch is of one, and the third has 6."""
    changes = ("federation.clients_per_round=1", "federation.rounds=1", f"seed={seed}")
    inputs = prepare_inputs(scenarios.parse(TEXT.format(model="batch_norm", samples=16), changes=changes))
    [drawn] = plan.drawn_clients(inputs.scenario, 0)
    if inputs.parts.sizes[drawn] == 6:
        assert check_batches(inputs) == []
    else:
        with pytest.raises(UserError, match=f"client {drawn} "):
            check_batches(inputs)


def test_an_attack_on_one_sample_is_refused_too() -> None:
    attack = "attacks=[{name: analytic, observes: gradient, batch_size: %d}]"
    assert "attacks.0.batch_size" in refused("batch_norm", "training.batch_size=5", attack % 1)
    assert remarks("batch_norm", "training.batch_size=5", attack % 2) == []
    assert remarks("layer_norm", attack % 1) == []


def test_a_run_that_goes_on_without_them_has_a_remark() -> None:
    [said] = remarks("batch_norm", "federation.failures.then=drop")
    assert "training.batch_size" in said


def invoke(*arguments: str) -> tuple[int, str]:
    found = CliRunner().invoke(app, list(arguments))
    return found.exit_code, " ".join(found.output.split())


def test_commands_refuse_before_there_is_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t.yaml").write_text(TEXT.format(model="batch_norm", samples=15))
    for command in (("validate", "t.yaml"), ("launch", "t.yaml", "--executor", "local", "--out", "runs")):
        code, said = invoke(*command)
        assert (code, "batch norm" in said, "training.batch_size" in said) == (2, True, True)
    assert not Path("runs").exists()
    swept = ("--set", "sweep={fields: {training.batch_size: [3, 5]}}")
    assert invoke("validate", "t.yaml", *swept)[0] == 0


def test_what_shows_in_a_round_only_is_explained_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t.yaml").write_text(TEXT.format(model="batch_norm", samples=15))
    drawn = ("--set", "training={sampling: poisson, batch_size: 1, steps: 9}", "--executor", "local", "--quiet")
    code, said = invoke("launch", "t.yaml", *drawn, "--out", "runs")
    assert (code, "batch norm" in said, "training.batch_size" in said) == (2, True, True)
