"""Small conditional DCGAN: a generator of images of a given class from latents z ~ N(0, I), and a critic.

Sources: Radford et al. 2016, "Unsupervised Representation Learning with Deep Convolutional Generative Adversarial
Networks" (strided convolutions, batch norm in the generator, leaky ReLU in the critic); Miyato et al. 2018, "Spectral
Normalization for Generative Adversarial Networks", and Miyato and Koyama 2018, "cGANs with Projection Discriminator",
for the critic's weights and its use of the class.
"""

from __future__ import annotations

from math import ceil

from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

_SLOPE, _STD = 0.2, 0.02


class Generator(nn.Module):
    """Generator of images of any size: a linear layer and two transposed convolutions of latents and labels."""

    def __init__(self, image_shape: tuple[int, ...], classes: int, latent: int, width: int) -> None:
        """Create a generator with `latent` inputs and `width` channels at half the size (2 * `width` at a quarter)."""
        super().__init__()
        channels, height, width_pixels = image_shape
        self.image_shape, self.classes, self.latent, self.width = image_shape, classes, latent, width
        self._coarse = (2 * width, ceil(height / 4), ceil(width_pixels / 4))
        features = self._coarse[0] * self._coarse[1] * self._coarse[2]
        self.latent_in = nn.Linear(latent, features, bias=False)
        self.class_in = nn.Embedding(classes, features)
        self.layers = nn.Sequential(
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.ConvTranspose2d(width, channels, 4, stride=2, padding=1),
            nn.Sigmoid(),
        )

    def forward(self, latents: Tensor, labels: Tensor) -> Tensor:
        """Generate images (N, C, H, W) in [0, 1] from latents (N, latent) and labels (N,) int64."""
        coarse = (self.latent_in(latents) + self.class_in(labels)).unflatten(1, self._coarse)
        images: Tensor = self.layers(coarse)[..., : self.image_shape[1], : self.image_shape[2]]
        return images


class Critic(nn.Module):
    """Critic that scores images with labels: a higher score means more like a real image of that class."""

    def __init__(self, image_shape: tuple[int, ...], classes: int, width: int) -> None:
        super().__init__()
        channels, height, width_pixels = image_shape
        features = 2 * width * ceil(height / 4) * ceil(width_pixels / 4)
        self.layers = nn.Sequential(
            spectral_norm(nn.Conv2d(channels, width, 5, stride=2, padding=2)),
            nn.LeakyReLU(_SLOPE),
            spectral_norm(nn.Conv2d(width, 2 * width, 5, stride=2, padding=2)),
            nn.LeakyReLU(_SLOPE),
            nn.Flatten(),
        )
        self.score = spectral_norm(nn.Linear(features, 1))
        # Not normalised: with a bound, the class has so little weight that one image in five has the wrong class.
        self.class_in = nn.Embedding(classes, features)
        nn.init.normal_(self.class_in.weight, std=_STD)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the scores (N,) of images (N, C, H, W) with labels (N,) int64."""
        features = self.layers(images)
        scores: Tensor = self.score(features)[:, 0] + (self.class_in(labels) * features).sum(1)
        return scores
