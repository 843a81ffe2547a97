"""Helpers for tests of attacks: real images, small models that leak, and observations of a server."""

from __future__ import annotations

from collections.abc import Sequence

import skimage.data
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from rayfed.defences.base import Batch, Defence, Task
from rayfed.gradients import buffers_of, gradient, weights_of
from rayfed.models.lenet import LeNet
from rayfed.registry import build
from rayfed.samples import Pixels, SampleSpec, Tokens
from rayfed.scenario import Training
from rayfed.simulation.client.local import update_method
from rayfed.update import Observation

LENET = ("lenet", {"activation": "sigmoid", "init": "uniform"})


def digit(index: int) -> Tensor:
    """Return a digit, (1, 1, 8, 8)."""
    return torch.tensor(load_digits().images[index], dtype=torch.float32)[None, None] / 16


def photo(top: int, left: int, size: int = 32) -> Tensor:
    """Return a crop of a photograph of a cat at a quarter of its resolution, (1, 3, size, size)."""
    crop = skimage.data.chelsea()[top : top + 4 * size, left : left + 4 * size]
    return nn.functional.avg_pool2d(torch.tensor(crop).permute(2, 0, 1)[None] / 255, 4)


def sample_of(inputs: Tensor) -> SampleSpec:
    """Return the description of images (N, C, H, W), or of texts (N, L) with 1,024 tokens."""
    if inputs.dtype == torch.int64:
        return Tokens(tuple(map(str, range(1024))), inputs.shape[1])
    return Pixels(*inputs.shape[1:])


def observe(model: nn.Module, images: Tensor, labels: Tensor, known: bool = True) -> Observation:
    weights, buffers = weights_of(model), buffers_of(model)
    update, _ = gradient(model, weights, {n: b.clone() for n, b in buffers.items()}, images, labels)
    return Observation(
        victim=0,
        round=0,
        weights=weights,
        buffers=buffers,
        update=update,
        scale=1.0,
        batch_size=len(images),
        sample=sample_of(images),
        classes=10,
        labels=labels if known else None,
    )


def seeded(*seeds: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def psnr(found: Tensor, true: Tensor) -> float:
    return -10 * float((found - true).square().mean().log10())


def leaky_lenet(shape: tuple[int, int, int], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return LeNet(activation="sigmoid", init="uniform").build(shape, 10)


def two_digits(known: bool = True) -> tuple[nn.Module, list[Observation]]:
    model = leaky_lenet((1, 8, 8))
    return model, [observe(model, digit(i), torch.tensor([i]), known) for i in (3, 5)]


def images_of(name: str, count: int, size: int = 32, skip: int = 0) -> tuple[Tensor, Tensor]:
    data = build("datasets", name, {"size": size, "test_samples": count + skip}).load()
    return torch.from_numpy(data.test_images[skip:]).float() / 255, torch.from_numpy(data.test_labels[skip:])


def observed(
    model: nn.Module, images: Tensor, labels: Tensor, defences: Sequence[Defence] = (), classes: int = 10, seed: int = 0
) -> Observation:
    """Return the observation of a client that sends the gradient of a batch with its defences."""
    generator = torch.Generator().manual_seed(seed)
    task = Task(0, 0, model, weights_of(model), buffers_of(model), Batch(images, labels), generator, order=0)
    sent = update_method(Training(algorithm="fedsgd", batch_size=None), defences)(task)
    sample = sample_of(images)
    return Observation(0, 0, task.weights, task.buffers, sent.tensors, 1.0, len(labels), sample, classes)


def generators(count: int, seed: int = 0) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(1000 * seed + i) for i in range(count)]
