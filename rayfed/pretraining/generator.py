"""Train the generator of a generative attack: a conditional DCGAN on public images.

Sources: Radford et al. 2016 (see `rayfed/models/dcgan.py`), section 4, for Adam; Lim and Ye 2017, "Geometric GAN", for
the hinge loss; Yazici et al. 2019, "The Unusual Effectiveness of Averaging in GAN Training".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from math import ceil
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import Adam
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from rayfed.core import seeds
from rayfed.data.base import load_in_memory
from rayfed.errors import DataError, UserError
from rayfed.models.dcgan import Critic, Generator
from rayfed.models.pretrained import Origin, is_trained, save_generator
from rayfed.samples import in_unit_range
from rayfed.scenario import DataSpec

_LR_GENERATOR, _LR_CRITIC = 5e-4, 1e-3
_BETAS = (0.5, 0.999)
_BATCH = 64
_STEPS = 3000
"""Number of steps, enough for digits. After a quarter of them, all images of a class look alike."""
_DECAY = 0.99
"""Decay per step of the running average over the generator's weights."""

Progress = Callable[[int, int, float, float], None]
"""(epochs done, total epochs, critic's mean loss, generator's mean loss)"""


@dataclass(frozen=True)
class GeneratorSize:
    """Size of a generator and of its critic."""

    latent: int = 32
    """Number of latent variables."""
    width: int = 32
    """Number of channels of the layer before the images."""


def train(
    images: np.ndarray,
    labels: np.ndarray,
    classes: int,
    *,
    seed: int,
    epochs: int,
    size: GeneratorSize | None = None,
    progress: Progress = lambda *_: None,
) -> Generator:
    """Train a generator of images on the CPU, and return the generator in evaluation mode. Deterministic.

    `images` is (N, C, H, W) as stored, `labels` (N,) int64. An epoch leaves out the last, incomplete batch. Raises
    `DataError` for fewer images than one batch.
    """
    if len(images) < _BATCH:
        raise DataError(f"training a generator needs at least {_BATCH} images, found {len(images)}; use more images")
    size = size or GeneratorSize()
    shape = (images.shape[1], images.shape[2], images.shape[3])
    with seeds.global_stream(seed, "generator"):
        generator = Generator(shape, classes, size.latent, size.width)
        critic = Critic(shape, classes, size.width)
    average = AveragedModel(generator, multi_avg_fn=get_ema_multi_avg_fn(_DECAY), use_buffers=True)
    game = _Game(generator, critic)
    targets = torch.from_numpy(labels)
    draws = seeds.torch_generator(seed, "train-generator")
    for epoch in range(1, epochs + 1):
        losses = []
        for index in torch.randperm(len(images), generator=draws)[: len(images) // _BATCH * _BATCH].split(_BATCH):
            latents = torch.randn(2, _BATCH, size.latent, generator=draws)
            real = in_unit_range(torch.from_numpy(images[index.numpy()]))
            kind = targets[index]
            losses.append(torch.stack([game.criticise(real, latents[0], kind), game.generate(latents[1], kind)]))
            average.update_parameters(generator)
        progress(epoch, epochs, *torch.stack(losses).mean(0).tolist())
    generator.load_state_dict(average.module.state_dict())
    return generator.eval()


def make(spec: DataSpec, path: Path, epochs: int | None, seed: int, progress: Progress = lambda *_: None) -> bool:
    """Train a generator on the public data and save the file. Returns False if `path` has this generator already.

    Without `epochs`, it takes about 3,000 steps of 64 images. Raises `UserError` if no data are public, or if `path`
    holds another generator.
    """
    data = spec.load()
    if data.public_images is None or data.public_labels is None:
        raise UserError(
            "data.public: a generator is trained on images that no client owns, but there are none; "
            "set a share of the training samples aside, for example `public: 0.1`"
        )
    images = load_in_memory(data.public_images)
    epochs = epochs or ceil(_STEPS / max(1, len(images) // _BATCH))
    origin = Origin(spec.model_dump(mode="json"), sha256(images.tobytes()).hexdigest(), seed, epochs)
    if is_trained(path, origin):
        return False
    classes = len(data.classes)
    generator = train(images, data.public_labels, classes, seed=seed, epochs=epochs, progress=progress)
    save_generator(path, generator, origin)
    return True


class _Game:
    """Both networks of a GAN and their optimisers."""

    def __init__(self, generator: Generator, critic: Critic) -> None:
        self.generator, self.critic = generator, critic
        self._generators = Adam(generator.parameters(), _LR_GENERATOR, _BETAS)
        self._critics = Adam(critic.parameters(), _LR_CRITIC, _BETAS)

    def criticise(self, real: Tensor, latents: Tensor, labels: Tensor) -> Tensor:
        """Take a step of the critic on real and generated images, and return its loss."""
        with torch.no_grad():
            made = self.generator(latents, labels)
        of_real, of_made = self.critic(torch.cat([real, made]), labels.repeat(2)).chunk(2)
        return _step(self._critics, F.relu(1 - of_real).mean() + F.relu(1 + of_made).mean())

    def generate(self, latents: Tensor, labels: Tensor) -> Tensor:
        """Take a step of the generator against the critic, and return its loss."""
        return _step(self._generators, -self.critic(self.generator(latents, labels), labels).mean())


def _step(optimiser: Adam, loss: Tensor) -> Tensor:
    """Take a step only on the optimiser's weights, and return the detached loss."""
    weights = [weight for group in optimiser.param_groups for weight in group["params"]]
    for weight, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
        weight.grad = gradient
    optimiser.step()
    return loss.detach()
