"""Training the generator that a generative attack searches: a conditional DCGAN on images that no client owns.

Sources: Odena et al. 2017 (see `rayfed/models/dcgan.py`), section 3, for the two parts of the loss; Lim and Ye 2017,
"Geometric GAN", for the hinge in the first; Yazici et al. 2019, "The Unusual Effectiveness of Averaging in GAN
Training".
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import Adam
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from rayfed import seeds
from rayfed.errors import DataError
from rayfed.models.dcgan import Critic, Generator

_LR_GENERATOR, _LR_CRITIC = 5e-4, 1e-3
_BETAS = (0.5, 0.999)
_BATCH = 64
_DECAY = 0.99
"""Of the running average over the generator's weights, a step."""

Progress = Callable[[int, float, float], None]
"""(epochs done, the critic's mean loss, the generator's mean loss)"""


def train(
    images: np.ndarray,
    labels: np.ndarray,
    classes: int,
    *,
    seed: int,
    epochs: int,
    latent: int = 32,
    width: int = 32,
    device: torch.device | None = None,
    progress: Progress = lambda *_: None,
) -> Generator:
    """A generator of images like these, in evaluation mode, on the CPU; it follows from the arguments alone.

    `images` is (N, C, H, W) uint8, `labels` (N,) int64. An epoch leaves out the last, incomplete batch. Raises
    `DataError` for less than one batch of images.
    """
    if len(images) < _BATCH:
        raise DataError(f"a generator needs {_BATCH} images or more to be trained on, not {len(images)}")
    device = device or torch.device("cpu")
    shape = (images.shape[1], images.shape[2], images.shape[3])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        generator = Generator(shape, classes, latent, width).to(device)
        critic = Critic(shape, classes, width).to(device)
    average = AveragedModel(generator, multi_avg_fn=get_ema_multi_avg_fn(_DECAY), use_buffers=True)
    game = _Game(generator, critic)
    pixels, targets = torch.from_numpy(images), torch.from_numpy(labels)
    draws = seeds.torch_generator(seed, "train-generator")
    for epoch in range(1, epochs + 1):
        losses = []
        for index in torch.randperm(len(pixels), generator=draws)[: len(pixels) // _BATCH * _BATCH].split(_BATCH):
            latents = torch.randn(2, _BATCH, latent, generator=draws).to(device)
            real, kind = pixels[index].to(device).float() / 255, targets[index].to(device)
            losses.append(torch.stack([game.criticise(real, latents[0], kind), game.generate(latents[1], kind)]))
            average.update_parameters(generator)
        progress(epoch, *torch.stack(losses).mean(0).tolist())
    generator.load_state_dict(average.module.state_dict())
    return generator.cpu().eval()


class _Game:
    """The two players and their optimisers."""

    def __init__(self, generator: Generator, critic: Critic) -> None:
        self.generator, self.critic = generator, critic
        self._generators = Adam(generator.parameters(), _LR_GENERATOR, _BETAS)
        self._critics = Adam(critic.parameters(), _LR_CRITIC, _BETAS)

    def criticise(self, real: Tensor, latents: Tensor, labels: Tensor) -> Tensor:
        """A step of the critic: tell real from made, and the class of the real; its loss."""
        with torch.no_grad():
            made = self.generator(latents, labels)
        scores, logits = self.critic(torch.cat([real, made]))
        of_real, of_made = scores.chunk(2)
        loss = F.relu(1 - of_real).mean() + F.relu(1 + of_made).mean() + F.cross_entropy(logits[: len(real)], labels)
        return _step(self._critics, loss)

    def generate(self, latents: Tensor, labels: Tensor) -> Tensor:
        """A step of the generator: be taken for real, and for the right class; its loss."""
        scores, logits = self.critic(self.generator(latents, labels))
        return _step(self._generators, F.cross_entropy(logits, labels) - scores.mean())


def _step(optimiser: Adam, loss: Tensor) -> Tensor:
    """One step on the optimiser's own weights, which alone get gradients; the loss, detached."""
    weights = [weight for group in optimiser.param_groups for weight in group["params"]]
    for weight, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
        weight.grad = gradient
    optimiser.step()
    return loss.detach()
