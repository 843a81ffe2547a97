"""GAN attack: a client trains a generator against the received model to generate images of a class.

The received model is the discriminator, and the generator is trained until the model assigns its images to the class.
The attacker uses only the weights, no update.

Source: Hitaj et al. 2017, "Deep Models Under the GAN: Information Leakage from Collaborative Deep Learning",
algorithm 1, without its active step: the attacker sends no false updates that make victims reveal more.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from rayfed.attacks.base import Inference, InferenceMetric
from rayfed.attacks.forward_probe import buffers_for
from rayfed.attacks.inference.one_by_one import OneByOne
from rayfed.attacks.progress import tell
from rayfed.core import seeds
from rayfed.registry import component
from rayfed.samples import Modality
from rayfed.update import Observation

_LATENT = 64
_CHANNELS = 32
_BATCH = 32


class Generator(nn.Module):
    """Image generator with a linear layer and two upsampling convolutions."""

    def __init__(self, image_shape: tuple[int, ...]) -> None:
        super().__init__()
        channels, self.height, self.width = image_shape
        self.start = (_CHANNELS, -(-self.height // 4), -(-self.width // 4))
        self.linear = nn.Linear(_LATENT, self.start[0] * self.start[1] * self.start[2])
        self.conv1 = nn.Conv2d(_CHANNELS, _CHANNELS, 3, padding=1)
        self.conv2 = nn.Conv2d(_CHANNELS, channels, 3, padding=1)

    def forward(self, latent: Tensor) -> Tensor:
        """Generate images (G, C, H, W) in [0, 1] from latents (G, 64)."""
        hidden = F.leaky_relu(self.linear(latent), 0.2).unflatten(1, self.start)
        hidden = F.leaky_relu(self.conv1(F.interpolate(hidden, scale_factor=2)), 0.2)
        images: Tensor = self.conv2(F.interpolate(hidden, (self.height, self.width))).sigmoid()
        return images


@component
class Gan(OneByOne):
    """Generate images of a class from the received weights only, as any client could; metric: share of the class.

    The share is determined by the nearest neighbours among the test images, not by the attacked model.
    """

    needs_classes: ClassVar[bool] = True
    takes: ClassVar[tuple[Modality, ...]] = ("pixels",)
    metric: ClassVar[InferenceMetric] = "class_share"
    reads_update: ClassVar[bool] = False

    target_class: Annotated[int, Field(ge=0)] = 0
    """Class to generate, counted from 0."""
    iterations: Annotated[int, Field(ge=1)] = 300
    """Number of Adam steps of the generator, each on 32 latents."""
    lr: Annotated[float, Field(gt=0)] = 1e-3
    """Learning rate of Adam."""
    images: Annotated[int, Field(ge=1)] = 16
    """Number of generated images to evaluate."""

    def _inference(self, observation: Observation, model: nn.Module, generator: torch.Generator) -> Inference:
        if self.target_class >= observation.classes:
            message = f"target_class: must be between 0 and {observation.classes - 1}, found {self.target_class}"
            return Inference(metric=self.metric, status="not applicable", message=message)
        device = next(iter(observation.weights.values())).device
        state = {**observation.weights, **buffers_for(model, observation)}
        model = model.to(device)
        maker = _initialised(observation.sample.shape, generator).to(device)
        adam = torch.optim.Adam(maker.parameters(), self.lr, betas=(0.5, 0.999))
        wanted = torch.full((_BATCH,), self.target_class, device=device)
        for i in range(self.iterations):
            made = maker(torch.randn(_BATCH, _LATENT, generator=generator).to(device))
            loss = F.cross_entropy(functional_call(model, state, (made,)), wanted)
            tell(i, self.iterations, loss.detach()[None])
            adam.zero_grad()
            loss.backward()
            adam.step()
        with torch.no_grad():
            images = maker(torch.randn(self.images, _LATENT, generator=generator).to(device)).cpu()
        if not images.isfinite().all():
            return Inference(metric=self.metric, status="diverged", message="some generated images are not finite")
        chance = 1 / observation.classes
        return Inference(metric=self.metric, images=images, label=self.target_class, chance=chance)


def _initialised(image_shape: tuple[int, ...], generator: torch.Generator) -> Generator:
    """Return a generator whose weights are seeded from `generator`."""
    with seeds.global_stream(seeds.sample_key(generator)):
        return Generator(image_shape)
