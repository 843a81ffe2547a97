"""NaN and infinite numbers are refused where they come in: in scenarios, files of weights and gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import rayfed
from rayfed import scenario as scenarios
from rayfed.attacks.external_update import observe
from rayfed.errors import UserError
from rayfed.metrics.lpips import LpipsUnavailable, _read
from rayfed.models.build import build_model
from rayfed.models.evaluator import Evaluator
from rayfed.models.pretrained import EVALUATOR, NetworkUnavailable, Origin, _save, load_evaluator
from rayfed.samples import Pixels
from rayfed.scenario.trials import check_values, plan_trials
from rayfed.update import list_nonfinite
from tests.helpers.command import run

TEXT = """
name: t
data: {name: digits, size: 8}
model: {name: mlp, hidden: [8]}
federation: {rounds: 2, clients: 4}
"""
FIELDS = [
    "training.lr=X",
    "training.momentum=X",
    "training.weight_decay=X",
    "training.clip_norm=X",
    "training.schedule={kind: step, factor: X}",
    "training.augment={scale: X}",
    "federation.validation=X",
    "federation.server={lr: X}",
    "federation.failures={timeout: X}",
    "privacy.budget=X",
    "metrics.success.psnr=X",
    "resources.timeout=X",
    "resources.clients.num_cpus=X",
    "data.public=X",
    "model.normalise={mean: [X], std: [1.0]}",
    "model.train={layers: [head], lora: {rank: 2, alpha: X}}",
    "arms={a: {training: {lr: X}}}",
    "arms={a: [{name: gaussian, sigma: X}]}",
    "attacks=[{name: inverting_gradients, lr: X}]",
    "partition={name: dirichlet, alpha: X}",
    "loss={name: cross_entropy, label_smoothing: X}",
    "sweep={search: random, samples: 2, fields: {training.lr: {low: 0.1, high: X}}}",
]


@pytest.mark.parametrize("field", FIELDS)
def test_no_field_of_a_scenario_is_infinite(field: str) -> None:
    for value in (".inf", "-.inf", ".nan", "1e999"):
        with pytest.raises(UserError):
            scenarios.parse(TEXT, changes=[field.replace("X", value)])


@pytest.mark.parametrize("path", ["training.lr", "arms.a.defences.gaussian.sigma"])
def test_no_swept_value_is_infinite(path: str) -> None:
    text = TEXT + "arms: {a: [{name: gaussian, sigma: 0.1}]}\n"
    for value in (".inf", ".nan"):
        scenario = scenarios.parse(text, changes=[f"sweep={{fields: {{{path}: [0.1, {value}]}}}}"])
        for check in (plan_trials, check_values):
            with pytest.raises(UserError):
                check(scenario)


def test_a_scenario_with_an_infinite_rate_is_a_mistake_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(TEXT + "training: {lr: .inf}\n")
    code, output = run("validate", str(tmp_path / "s.yaml"))
    assert (code, "training.lr" in output) == (2, True)


def weights(value: float, name: str = "fc1.weight", dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    state = build_model("mlp", {"hidden": [8]}, (1, 8, 8), 10, seed=0).state_dict()
    found = {key: tensor.to(dtype) for key, tensor in state.items()}
    found[name].view(-1)[3] = value
    return found


@pytest.mark.parametrize(
    ("state", "name"),
    [
        (weights(torch.nan), "fc1.weight"),
        (weights(-torch.inf, "fc2.bias"), "fc2.bias"),
        (weights(1e300, dtype=torch.float64), "fc1.weight"),  # infinite in the model's float32
    ],
)
def test_weights_that_are_not_finite_are_refused_with_their_file(
    state: dict[str, Tensor], name: str, tmp_path: Path
) -> None:
    torch.save(state, tmp_path / "w.pt")
    save_file(state, tmp_path / "w.safetensors")
    for file in (tmp_path / "w.pt", tmp_path / "w.safetensors"):
        with pytest.raises(UserError) as error:
            build_model("mlp", {"hidden": [8]}, (1, 8, 8), 10, seed=0, state=file)
        assert (name in str(error.value), file.name in str(error.value)) == (True, True)


class Masked(nn.Module):
    """A network with a mask of infinities, and on request a weight that is none."""

    def __init__(self, image_shape: tuple[int, ...] = (1, 8, 8), classes: int = 10, broken: bool = False) -> None:
        super().__init__()
        self.head = nn.Linear(64, classes)
        self.register_buffer("mask", torch.full((2, 2), -torch.inf))
        if broken:
            self.head.weight.data[0, 0] = torch.nan

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(images.flatten(1))
        return logits


def test_infinities_of_the_model_itself_are_left_alone(tmp_path: Path) -> None:
    torch.save(Masked().state_dict(), tmp_path / "w.pt")
    name = f"{__name__}:Masked"
    built = build_model(name, {}, (1, 8, 8), 10, seed=0, state=tmp_path / "w.pt")
    assert list_nonfinite(built.state_dict()) == ["mask"]
    assert list_nonfinite(built.state_dict(), Masked().state_dict()) == []
    with pytest.raises(UserError, match=r"head\.weight"):
        build_model(name, {"broken": True}, (1, 8, 8), 10, seed=0)


def test_networks_of_files_are_finite(tmp_path: Path) -> None:
    network = Evaluator()
    name = next(iter(dict(network.named_parameters())))
    network.get_parameter(name).data.view(-1)[0] = torch.inf
    _save(tmp_path / "e.pt", EVALUATOR, network, torch.float16, Origin({}, "", 0, 1), {})
    with pytest.raises(NetworkUnavailable) as error:
        load_evaluator(tmp_path / "e.pt", torch.device("cpu"))
    assert (name in str(error.value), "e.pt" in str(error.value)) == (True, True)
    torch.save({"features.0.weight": torch.tensor([torch.nan])}, tmp_path / "a.pth")
    with pytest.raises(LpipsUnavailable, match=r"0\.weight"):
        _read("alex", tmp_path / "a.pth")


def test_one_update_by_hand_is_finite(tmp_path: Path) -> None:
    torch.save(weights(0.0), tmp_path / "good.pt")
    torch.save(weights(torch.nan, "fc2.weight"), tmp_path / "bad.pt")
    given = ("--model", "mlp", "--lr", "0.1", "--shape", "1,8,8", "--classes", "10", "--out", str(tmp_path / "o"))
    for before, after in (("good", "bad"), ("bad", "good")):
        files = "--before", str(tmp_path / f"{before}.pt"), "--after", str(tmp_path / f"{after}.pt")
        code, output = run("attack-update", *files, *given)
        assert (code, "fc2.weight" in output, "bad.pt" in output) == (2, True, True), output


def test_gradients_to_be_attacked_are_finite() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    gradient = [torch.zeros(10, 64).numpy(), torch.zeros(10).numpy()]
    assert observe(net, net.state_dict(), Pixels(1, 8, 8), 10, 1, gradient=gradient).observation.update
    gradient[1][2] = torch.inf
    with pytest.raises(UserError, match=r"1\.bias"):
        observe(net, net.state_dict(), Pixels(1, 8, 8), 10, 1, gradient=gradient)


GAUSSIAN: dict[str, Any] = {"name": "gaussian", "sigma": 1.0}
DP_SGD: dict[str, Any] = {"name": "dp_sgd", "clip": 1.0, "noise_multiplier": 1.0}


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_an_epsilon_is_claimed_of_finite_answers_alone(value: float) -> None:
    net = nn.Linear(3, 2)
    sent = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    bad = sent | {"bias": torch.tensor([0.0, value])}
    claims = rayfed.defend([GAUSSIAN | {"clip": 1.0}], net, rounds=2, seed=0)
    assert claims.guaranteed
    with pytest.raises(UserError, match="bias"):
        claims.answer(bad, sent)
    assert claims.given() == 0
    with pytest.warns(UserWarning, match="bias"):
        answer = claims.answer(sent, bad)
    assert list_nonfinite(answer) == [], "the clip takes zeros in their place, which the epsilon covers"
    rayfed.defend([GAUSSIAN], net, rounds=2, seed=0).answer(bad, sent)  # of which nothing is claimed


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_sample_that_is_not_finite_adds_nothing_to_a_private_gradient(value: float) -> None:
    net = nn.Linear(3, 2)
    guard = rayfed.defend([DP_SGD], net, rounds=2, samples=8, batch_size=4, steps=3, seed=0)
    inputs, labels = torch.rand(4, 3), torch.tensor([0, 1, 0, 1])
    inputs[2, 1] = value
    guard.backward(net, inputs, labels)
    assert list_nonfinite({name: p.grad for name, p in net.named_parameters() if p.grad is not None}) == []
    net.weight.data[0, 0] = value
    guard.backward(net, torch.rand(4, 3), labels)
    assert list_nonfinite({name: p.grad for name, p in net.named_parameters() if p.grad is not None}) == []
