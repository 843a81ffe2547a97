"""Property inference: whether a class is in the batch shows in the update, and not in noise."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rayfed.attacks.inference.property_inference import PropertyInference
from rayfed.gradients import buffers_of, gradient, weights_of
from rayfed.models.build import build_model
from rayfed.registry import build
from rayfed.samples import Pixels
from rayfed.update import Observation

SIZE = 8


def samples(name: str, split: str) -> tuple[Tensor, Tensor]:
    data = build("datasets", name, {"size": 16}).load()
    images, labels = getattr(data, f"{split}_images"), getattr(data, f"{split}_labels")
    return torch.from_numpy(images).float() / 255, torch.from_numpy(labels)


def victims(name: str, net: nn.Module, target: int, count: int) -> list[tuple[Observation, bool]]:
    """Batches of the test split, one half with the class, and the public images of an attacker."""
    public, (images, labels) = samples(name, "train"), samples(name, "test")
    draw = np.random.default_rng(17)
    weights, buffers = weights_of(net), buffers_of(net)
    found = []
    for i in range(count):
        rows = torch.from_numpy(draw.choice(np.flatnonzero(labels != target), SIZE, replace=False))
        if i % 2:
            rows[0] = int(draw.choice(np.flatnonzero(labels == target)))
        update, _ = gradient(net, weights, buffers, images[rows], labels[rows])
        shape = (images.shape[1], images.shape[2], images.shape[3])
        classes = int(labels.max()) + 1
        seen = Observation(i, 0, weights, buffers, update, 1.0, SIZE, Pixels(*shape), classes, extra={"public": public})
        found.append((seen, bool(i % 2)))
    return found


def accuracy(attack: PropertyInference, net: nn.Module, seen: list[tuple[Observation, bool]]) -> float:
    found = attack.infer([o for o, _ in seen], net, [torch.Generator().manual_seed(i) for i in range(len(seen))])
    assert {f.status for f in found} == {"ok"}
    return float(np.mean([(f.scores.item() > 0.5) == answer for f, (_, answer) in zip(found, seen, strict=True)]))


@pytest.mark.engine
@pytest.mark.parametrize(("name", "target"), [("digits", 8), ("photos", 2)])
def test_a_class_shows_in_the_gradient_and_not_in_noise(name: str, target: int) -> None:
    images, labels = samples(name, "test")
    net = build_model("lenet", {}, (images.shape[1], 16, 16), int(labels.max()) + 1, seed=6)
    attack = PropertyInference(target_class=target, batches=100)
    seen = victims(name, net, target, 16)
    assert accuracy(attack, net, seen) >= 0.8  # by chance once in a hundred
    generator = torch.Generator().manual_seed(3)
    drowned = [
        (replace(o, update={n: 10 * torch.randn(t.shape, generator=generator) for n, t in o.update.items()}), answer)
        for o, answer in seen
    ]
    assert 0.1 < accuracy(attack, net, drowned) < 0.9


def test_chance_is_that_of_public_batches() -> None:
    net = build_model("mlp", {"hidden": [8]}, (1, 16, 16), 10, seed=6)
    [(seen, _)] = victims("digits", net, 8, 1)
    [found] = PropertyInference(target_class=8, batches=10).infer([seen], net, [torch.Generator()])
    _, labels = seen.extra["public"]
    drawn = np.random.default_rng(0).choice(labels.numpy(), (20_000, SIZE))
    share = (drawn == 8).any(1).mean()
    assert found.chance == pytest.approx(max(share, 1 - share), abs=0.02)
    assert found.label == 8


def test_a_result_depends_on_its_own_generator_alone() -> None:
    net = build_model("lenet", {}, (1, 16, 16), 10, seed=6)
    (first, _), (second, _) = victims("digits", net, 8, 2)
    attack = PropertyInference(target_class=8, batches=20)
    together = attack.infer([first, second], net, [torch.Generator().manual_seed(i) for i in (1, 2)])
    [alone] = attack.infer([second], net, [torch.Generator().manual_seed(2)])
    assert torch.equal(together[1].scores, alone.scores)


def test_it_says_what_it_lacks() -> None:
    net = build_model("mlp", {"hidden": [8]}, (1, 16, 16), 10, seed=6)
    [(seen, _)] = victims("digits", net, 8, 1)
    broken = replace(seen, update={n: t * torch.nan for n, t in seen.update.items()})
    attack = PropertyInference(target_class=8)
    nothing, bad = attack.infer([replace(seen, extra={}), broken], net, [torch.Generator()] * 2)
    [absent] = PropertyInference(target_class=11).infer([seen], net, [torch.Generator()])
    assert (nothing.status, bad.status, absent.status) == ("not applicable", "diverged", "not applicable")
    assert "public" in nothing.message
