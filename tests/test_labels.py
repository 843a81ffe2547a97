"""Label inference on untrained models and real images, and its rules on hand-made gradients."""

from __future__ import annotations

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from rayfed.attacks.labels import column_minima, counted_labels, infer, last_linear, sign_rule, with_labels
from rayfed.models.convnet import ConvNet
from rayfed.models.lenet import LeNet
from rayfed.models.mlp import Mlp
from tests.attack_fixtures import observe

MODELS = {
    "lenet": LeNet(),
    "lenet_sigmoid": LeNet(activation="sigmoid"),
    "lenet_uniform": LeNet(activation="sigmoid", init="uniform"),
    "convnet": ConvNet(width=8),
    "mlp": Mlp(),
}


def digits(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Random 8x8 digits, enlarged to (count, 1, 16, 16), with their labels."""
    data = load_digits()
    chosen = torch.randint(len(data.images), (count,), generator=torch.Generator().manual_seed(seed))
    images = torch.tensor(data.images, dtype=torch.float32)[chosen] / 16
    return images.repeat_interleave(2, 1).repeat_interleave(2, 2)[:, None], torch.tensor(data.target)[chosen]


def inferred(model: nn.Module, images: Tensor, labels: Tensor, seed: int) -> Tensor:
    observation = observe(model, images, labels, known=False)
    head = last_linear(observation.update, 10)
    assert head is not None
    return infer(observation, model, head, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", [1, 4, 16])
@pytest.mark.parametrize("name", MODELS)
def test_labels_of_real_digits(name: str, size: int) -> None:
    right = 0
    for seed in range(5):
        torch.manual_seed(seed)
        model = MODELS[name].build((1, 16, 16), 10).eval()
        images, labels = digits(size, seed)
        found = inferred(model, images, labels, seed)
        assert found.shape == (size,)
        right += int(torch.minimum(found.bincount(minlength=10), labels.bincount(minlength=10)).sum())
    # The estimate of p is crude where U(-.5, .5) makes it peaked: there a label in a batch of 16 may be lost.
    assert right >= (0.9 if name == "lenet_uniform" and size == 16 else 1.0) * 5 * size


@pytest.mark.parametrize("size", [1, 4, 16])
def test_labels_without_a_bias(size: int) -> None:
    torch.manual_seed(0)
    model = LeNet().build((1, 16, 16), 10)
    model.fc = nn.Linear(192, 10, bias=False)
    model.act3 = nn.Sigmoid()
    images, labels = digits(size, 3)
    assert inferred(model, images, labels, 0).tolist() == labels.sort().values.tolist()


def test_repeated_labels_are_counted() -> None:
    torch.manual_seed(0)
    images, _ = digits(8, 0)
    labels = torch.tensor([3, 3, 3, 3, 3, 7, 7, 1])
    assert inferred(LeNet().build((1, 16, 16), 10), images, labels, 0).tolist() == [1, 3, 3, 3, 3, 3, 7, 7]


def test_counts_invert_the_formula_exactly() -> None:
    probabilities = torch.tensor([0.1, 0.2, 0.3, 0.4])
    counts = torch.tensor([3.0, 0.0, 1.0, 2.0])
    assert counted_labels(probabilities - counts / 6, probabilities, 6).tolist() == [0, 0, 0, 2, 3, 3]


def test_counts_sum_to_the_batch_under_noise() -> None:
    rows = torch.randn(10, generator=torch.Generator().manual_seed(0))
    assert len(counted_labels(rows, torch.full((10,), 0.1), 3)) == 3


def test_sign_rule_and_column_minima() -> None:
    assert sign_rule(torch.tensor([0.2, -0.7, 0.5])).tolist() == [1]
    weight = torch.tensor([[0.1, 0.2], [-0.5, 0.9], [0.0, 0.3], [-0.2, -0.1]])
    assert column_minima(weight, 2).tolist() == [1, 3]


def test_column_minima_on_a_real_gradient() -> None:
    torch.manual_seed(0)
    images, _ = digits(3, 0)
    labels = torch.tensor([2, 5, 9])
    observation = observe(LeNet(activation="sigmoid").build((1, 16, 16), 10), images, labels, known=False)
    assert column_minima(observation.update["fc.weight"], 3).tolist() == [2, 5, 9]


def test_last_linear_is_found_by_its_rows() -> None:
    tensors = {"a.weight": torch.zeros(10, 4), "a.bias": torch.zeros(10), "b.weight": torch.zeros(3, 10)}
    assert last_linear(tensors, 10) == "a"
    assert last_linear(tensors, 3) == "b"
    assert last_linear(tensors, 7) is None


def test_given_labels_stay_and_a_missing_head_is_said() -> None:
    images, labels = digits(4, 0)
    model = Mlp().build((1, 16, 16), 10)
    observation = observe(model, images, labels, known=True)
    (kept,) = with_labels([observation], model, [torch.Generator()]) or []
    assert kept.labels is labels
    body = nn.Sequential(nn.Conv2d(1, 10, 16), nn.Flatten())
    assert with_labels([observe(body, images, labels, known=False)], body, [torch.Generator()]) is None
