"""Weight norm undone for closed forms; the oracle is autograd on the same model without weight norm."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, weight_norm

from rayfed.attacks.closed_form.analytic import Analytic
from rayfed.attacks.closed_form.buffers import Buffers
from rayfed.attacks.closed_form.weight_norm import without_weight_norm
from rayfed.attacks.external_update import observe
from rayfed.samples import Pixels
from rayfed.update import LocalTraining, Named, Observation

SHAPE, CLASSES = (2, 3, 4), 5
Norm = Callable[..., nn.Module]
both = pytest.mark.parametrize("norm", [weight_norm, parametrizations.weight_norm])


def unchanged(layer: nn.Module, **_: object) -> nn.Module:
    return layer


def net(norm: Norm, dim: int | None = 0) -> nn.Module:
    torch.manual_seed(1)
    conv, linear = norm(nn.Conv2d(2, 3, 2), dim=dim), norm(nn.Linear(24, 12), dim=dim)
    model = nn.ModuleDict({"linear": linear, "conv": conv, "head": nn.Linear(18 + 12, CLASSES)})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 1.5  # lengths are no norms of directions any more

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, images: Tensor) -> Tensor:
            parts = self.parts
            rows = torch.cat([torch.tanh(parts["linear"](images.flatten(1))), parts["conv"](images).flatten(1)], 1)
            logits: Tensor = parts["head"](rows)
            return logits

    return Net()


def data(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    return torch.rand(count, *SHAPE, generator=generator), torch.arange(count) % CLASSES


def slopes(model: nn.Module, images: Tensor, labels: Tensor) -> Named:
    named = dict(model.named_parameters())
    return dict(
        zip(named, torch.autograd.grad(F.cross_entropy(model(images), labels), list(named.values())), strict=True)
    )


def seen(model: nn.Module, images: Tensor, labels: Tensor) -> Observation:
    gradient = slopes(model, images, labels)
    return observe(model, model.state_dict(), Pixels(*SHAPE), CLASSES, len(images), gradient=gradient).observation


@both
@pytest.mark.parametrize("dim", [0, 1, None])
def test_the_gradient_of_the_weight_is_that_of_autograd(norm: Norm, dim: int | None) -> None:
    model, batch = net(norm, dim), data(3)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    plain, [found] = without_weight_norm(model, [seen(model, *batch)])
    own = net(unchanged)
    own.load_state_dict(found.weights)
    expected = slopes(own, *batch)
    assert found.update.keys() == expected.keys() == dict(plain.named_parameters()).keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found.update[name], tensor, atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(own(batch[0]), model(batch[0]))
    assert model.state_dict().keys() == before.keys(), "the model itself keeps its weight norm"
    assert slopes(model, *batch).keys() == dict(model.named_parameters()).keys()


def test_a_decayed_step_gives_the_gradient_too() -> None:
    model, batch = net(weight_norm), data(2)
    sent = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    expected = without_weight_norm(model, [seen(model, *batch)])[1][0].gradient
    optimiser = torch.optim.SGD(model.parameters(), lr=0.3, weight_decay=0.2)
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    optimiser.step()
    local = LocalTraining(steps=1, lr=0.3, weight_decay=0.2)
    given = observe(model, sent, Pixels(*SHAPE), CLASSES, 2, returned=model.state_dict(), local=local)
    [found] = without_weight_norm(model, [given.observation])[1]
    for name, tensor in found.gradient.items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-5, rtol=1e-3)


@both
def test_closed_forms_apply(norm: Norm) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), norm(nn.Linear(24, 40)), nn.ReLU(), nn.Linear(40, CLASSES))
    for count in (1, 2):
        images, labels = data(count)
        [found] = Analytic().reconstruct([seen(model, images, labels)], model, [torch.Generator()])
        assert found.status == "ok"
        distances = torch.cdist(found.images.flatten(1), images.flatten(1)).min(0).values
        assert distances.max() < 1e-3


def test_statistics_in_front_of_a_weight_norm_are_solved() -> None:
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(24))
            self.layer = weight_norm(nn.Linear(24, CLASSES))

        def forward(self, images: Tensor) -> Tensor:
            rows = images.flatten(1)
            if self.training:
                self.mean = 0.9 * self.mean + 0.1 * rows.mean(0).detach()
            logits: Tensor = self.layer(rows)
            return logits

    model, (image, label) = Mean(), data(1)
    sent = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    F.cross_entropy(model(image), label).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= parameter.grad
    local = LocalTraining()
    given = observe(model, sent, Pixels(*SHAPE), CLASSES, 1, returned=model.state_dict(), local=local)
    [found] = Buffers().reconstruct([given.observation], model, [torch.Generator()])
    torch.testing.assert_close(found.images, image, atol=1e-4, rtol=0)


def test_a_weight_norm_that_is_trained_in_part_stays() -> None:
    model, batch = net(weight_norm), data(2)
    model.parts["linear"].weight_g.requires_grad_(False)  # type: ignore[union-attr,index]
    gradient = {
        name: tensor
        for name, tensor in slopes(net(weight_norm), *batch).items()
        if not name.endswith("linear.weight_g")
    }
    observed = observe(model, model.state_dict(), Pixels(*SHAPE), CLASSES, 2, gradient=gradient).observation
    plain, [found] = without_weight_norm(model, [observed])
    assert "parts.conv.weight" in found.update
    assert "parts.linear.weight_v" in found.update
    assert plain(batch[0]).shape == (2, CLASSES)


def test_models_without_weight_norm_are_passed_on() -> None:
    model = net(unchanged)
    observation = seen(model, *data(2))
    assert without_weight_norm(model, [observation]) == (model, [observation])


@pytest.mark.parametrize("norm", [nn.utils.spectral_norm, parametrizations.spectral_norm])
def test_a_layer_that_is_divided_by_its_norm_hides_no_other_layer(norm: Norm) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(24, 12), nn.ReLU(), norm(nn.Linear(12, CLASSES)))
    image, label = data(1)
    [found] = Analytic().reconstruct([seen(model, image, label)], model, [torch.Generator()])
    torch.testing.assert_close(found.images, image, atol=1e-4, rtol=0)
