from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks import peeling
from tests.conftest import imported

pytestmark = pytest.mark.engine

SIZE, SIDE = 96, 3


@pytest.fixture(scope="module")
def network() -> Any:
    """An untrained EfficientNet-Lite0 whose norms have statistics of an image, as trained ones do."""
    timm = imported("timm", "hub")
    torch.manual_seed(0)
    model: Any = timm.create_model("efficientnet_lite0", pretrained=False, num_classes=10, drop_rate=0.0)
    model.train()(torch.rand(16, 3, SIZE, SIZE))
    for norm in (module for module in model.modules() if isinstance(module, nn.BatchNorm2d)):
        norm.momentum = 1.0
        nn.init.uniform_(norm.weight, 0.5, 1.5)
        nn.init.normal_(norm.bias, std=0.3)
    model(torch.rand(16, 3, SIZE, SIZE))
    nn.init.normal_(model.classifier.weight, std=0.05)
    return model.eval()


def seen_of(model: Any, image: Tensor, label: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The gradient by name, and what enters each convolution, (C, H, W)."""
    entered: dict[str, Tensor] = {}
    convolutions = {name: module for name, module in model.named_modules() if isinstance(module, nn.Conv2d)}
    handles = [
        module.register_forward_pre_hook(lambda _, given, name=name: entered.update({name: given[0][0].detach()}))
        for name, module in convolutions.items()
    ]
    names, weights = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(cross_entropy(model(image), torch.tensor([label])), weights)
    for handle in handles:
        handle.remove()
    return dict(zip(names, found, strict=True)), entered


def pooled_slope(model: Any, gradient: dict[str, Tensor]) -> Tensor:
    slope: Tensor = model.classifier.weight.detach().double().T @ gradient["classifier.bias"].double()
    return slope


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_features_come_out_as_they_went_in_block_after_block(network: Any, seed: int) -> None:
    image = torch.rand(1, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(seed))
    gradient, entered = seen_of(network, image, label=seed)
    last, truth = peeling.Cut.of(network.conv_head, network.bn2), entered["conv_head"].double().flatten(1)
    pooled = pooled_slope(network, gradient)

    weight = gradient["conv_head.weight"].double().flatten(1)
    items = peeling.unordered(last, pooled, gradient["bn2.bias"].double(), weight, SIDE**2)
    apart = torch.cdist(truth.T, items.T)
    assert sorted(apart.argmin(1).tolist()) == list(range(SIDE**2))
    assert apart.min(1).values.max() < 1e-3 * truth.norm(dim=0).min()

    features = items[:, apart.argmin(1)]
    slope = last.weight.T @ ((pooled / SIDE**2 * last.scale)[:, None] * last.active(features))
    maps = (part.unflatten(1, (SIDE, SIDE)) for part in (features, slope))
    found = dict(peeling.peeled(network, gradient, *maps))
    assert {"blocks.6.0.conv_pwl", "blocks.6.0.conv_pw"} <= found.keys()
    for name, one in found.items():
        torch.testing.assert_close(one.float(), entered[name], rtol=0, atol=1e-2, msg=name)


def test_what_is_not_sent_is_not_solved_for(network: Any) -> None:
    gradient, entered = seen_of(network, torch.rand(1, 3, SIZE, SIZE), label=0)
    last, features = peeling.Cut.of(network.conv_head, network.bn2), entered["conv_head"].double()
    active = last.active(features.flatten(1))
    slope = last.weight.T @ ((pooled_slope(network, gradient) / SIDE**2 * last.scale)[:, None] * active)
    head = {name: one for name, one in gradient.items() if not name.startswith("blocks")}
    assert not list(peeling.peeled(network, head, features, slope.unflatten(1, (SIDE, SIDE))))


def test_noise_ends_the_closed_form_without_an_answer(network: Any) -> None:
    gradient, entered = seen_of(network, torch.rand(1, 3, SIZE, SIZE), label=0)
    last, truth = peeling.Cut.of(network.conv_head, network.bn2), entered["conv_head"].double().flatten(1)
    noise = torch.Generator().manual_seed(0)
    noisy = {name: one + one.std() * torch.randn(one.shape, generator=noise) for name, one in gradient.items()}
    active = last.active(truth)
    slope = last.weight.T @ ((pooled_slope(network, gradient) / SIDE**2 * last.scale)[:, None] * active)
    maps = (part.unflatten(1, (SIDE, SIDE)) for part in (truth, slope))
    assert not list(peeling.peeled(network, noisy, *maps))


def test_vectors_are_put_in_the_order_of_maps_like_others() -> None:
    draw = torch.Generator().manual_seed(0)
    smooth = torch.nn.functional.avg_pool2d(torch.randn(200, 24, 6, 6, generator=draw), 3, stride=1)
    places = torch.randn(24, 4, 4, generator=draw)
    maps = smooth * 3 + places
    for number in range(3):
        truth = maps[number].double().flatten(1)
        mixed = truth[:, torch.randperm(16, generator=draw)]
        assert torch.equal(peeling.arranged(mixed, maps[3:]), truth)
