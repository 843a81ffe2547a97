"""That the samples themselves explain what defences send: nobody else is asked to do better."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

from rayfed import scenario
from rayfed.analysis.audit import EXPLAINS
from rayfed.attacks.base import Reconstruction
from rayfed.attacks.fit import fit_of, judged
from rayfed.attacks.forward_probe import without_tracking
from rayfed.attacks.undone import undone
from rayfed.client.sent import Sent
from rayfed.engine.inputs import prepare
from rayfed.engine.worker import ClientWorker
from tests.attack_fixtures import observed

DEFENCES: list[list[dict[str, Any]]] = [
    [{"name": "gaussian", "sigma": 0.1}],
    [{"name": "gaussian", "sigma": 0.001}],
    [{"name": "laplace", "scale": 0.1}],
    [{"name": "prune", "ratio": 0.9}],
    [{"name": "top_k", "k": 0.1}],
    [{"name": "quantise", "bits": 1}],
    [{"name": "quantise", "bits": 4}],
    [{"name": "quantise", "bits": 8}],
    [{"name": "gaussian", "sigma": 0.01}, {"name": "top_k", "k": 0.1}],
    [{"name": "laplace", "scale": 0.1}, {"name": "prune", "ratio": 0.5}],
    [{"name": "gaussian", "sigma": 0.1}, {"name": "gaussian", "sigma": 1.0}],
    [{"name": "dp_sgd", "clip": 1.0, "noise_multiplier": 1.0}],
    [{"name": "dp_sgd", "clip": 1.0, "noise_multiplier": 0.001}],
    [{"name": "soteria", "ratio": 0.5}],
    [{"name": "outpost"}],
    [{"name": "tests.test_understood:LastAlone"}],
    [{"name": "tests.test_understood:RowNumbers"}],
    [{"name": "tests.test_understood:RandomMask"}],
    [{"name": "tests.test_understood:RandomFactor"}],
]


@pytest.mark.engine
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("algorithm", ["fedsgd", "fedavg"])
@pytest.mark.parametrize("defences", DEFENCES, ids=lambda found: " ".join(map(str, found)))
def test_the_samples_explain_what_is_sent_of_them(defences: list[dict[str, Any]], algorithm: str, batch: int) -> None:
    document = {
        "name": "t",
        "data": {"name": "digits", "size": 8, "train_samples": 40, "test_samples": 20},
        "model": {"name": "mlp", "hidden": [64]},
        "federation": {"rounds": 1, "clients": 4},
        "training": {"algorithm": algorithm, "lr": 0.1} | ({"batch_size": 10} if algorithm == "fedavg" else {}),
        "arms": {"defended": defences},
        "attacks": [
            {"name": "dlg", "observes": "gradient", "batch_size": batch, "knowledge": ["defence", "code", "labels"]}
        ],
    }
    inputs = prepare(scenario.parse(yaml.safe_dump(document)))
    worker = ClientWorker(inputs.scenario, inputs.data, inputs.parts, torch.device("cpu"), inputs.validation)
    [account] = inputs.accounts
    sent = Sent(0, account.arm.weights, account.arm.buffers)
    _, [seen], [truth] = worker.observe(account.name, sent, [1], inputs.scenario.attacks[0], {}, 0)
    network = without_tracking(account.arm.model)
    noise = torch.rand(truth.inputs.shape, generator=torch.Generator().manual_seed(0))
    for images, right in ((truth.inputs, True), (noise, False)):
        fit, fits, nats = fit_of(images, truth.labels, undone(seen), network)
        found = Reconstruction(images, truth.labels, fit=fit, fits=fits, nats=nats)
        told = judged(found, truth.fit, truth.fits, truth.nats)
        assert told is None or not right or told <= EXPLAINS
        if not right and defences[0] in (DEFENCES[1][0], DEFENCES[3][0], {"name": "tests.test_understood:LastAlone"}):
            assert algorithm == "fedavg" or (told is not None and told > EXPLAINS), "it is told from the samples"


class Slight(nn.Module):
    """Sees the mean brightness, and in a branch whose slopes are a millionth of the others' every pixel."""

    def __init__(self, image_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.bright = nn.Linear(1, 32)
        self.branch, self.head = nn.Linear(64, 32, bias=False), nn.Linear(32, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (N, 1, 8, 8) to logits (N, K)."""
        flat = images.flatten(1)
        bright = self.bright(flat.mean(1, keepdim=True)).tanh()
        logits: Tensor = self.head(bright + 1e-6 * self.branch(flat))
        return logits


def test_an_answer_has_to_explain_what_moves_little_too() -> None:
    """An image of the same brightness explains all of the gradient but a millionth, which gives the sample away."""
    torch.manual_seed(0)
    model, images, labels = Slight((1, 8, 8), 10), torch.rand(2, 1, 8, 8), torch.tensor([3])
    true, other = images.split(1)
    other = other * true.mean() / other.mean()
    seen = observed(model, true, labels)
    (fit, fits, _), (far, others, _) = (fit_of(one, labels, seen, model) for one in (true, other))
    assert max(fit or 0.0, far or 0.0) < EXPLAINS, "by all values together both explain it"
    assert (judged(Reconstruction(true, labels, fit=fit, fits=fits), None, fits, None) or 0.0) < EXPLAINS
    assert (judged(Reconstruction(other, labels, fit=far, fits=others), None, fits, None) or 0.0) > EXPLAINS


def test_parts_by_which_the_samples_explain_nothing_are_not_asked() -> None:
    """The slope in a bias before a norm is what rounding leaves; what has no angle is not asked either."""
    fits, nan = torch.tensor([0.9, 0.02, torch.nan]), torch.nan
    found = Reconstruction(torch.zeros(1), torch.zeros(1), fit=0.01, fits=fits)
    for own, told in (([0.8, 0.0, nan], 0.02), ([0.0, 0.0, nan], 0.9), ([0.8, 0.8, nan], 0.01)):
        assert judged(found, None, torch.tensor(own), None) == pytest.approx(told)
