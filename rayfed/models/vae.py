"""Variational autoencoder of four dense layers, for images of any size.

Sources: Kingma and Welling 2014, "Auto-Encoding Variational Bayes"; the layers are those of table I of Lin et al. 2022,
"A Secure Federated Learning Mechanism for Data Privacy Protection", which does not state their widths.
"""

from __future__ import annotations

from math import prod

from torch import Tensor, nn
from torch.nn import functional as F

from rayfed.models.bottleneck import divergence


class Autoencoder(nn.Module):
    """Variational autoencoder that reconstructs images from a few random latents."""

    def __init__(self, image_shape: tuple[int, ...], hidden: int, latent: int) -> None:
        """Create an autoencoder with first dense layers of width `hidden` and a code z of length `latent`."""
        super().__init__()
        pixels = prod(image_shape)
        self.latent = latent
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(pixels, hidden), nn.ReLU(), nn.Linear(hidden, 2 * latent))
        self.decoder = nn.Sequential(
            nn.Linear(latent, hidden), nn.ReLU(), nn.Linear(hidden, pixels), nn.Unflatten(1, image_shape)
        )

    def forward(self, images: Tensor, draws: Tensor) -> Tensor:
        """Encode images (N, C, H, W), and decode latents with the noise `draws` (N, latent) to images in [0, 1].

        `draws` are samples of N(0, 1).
        """
        return self._logits(self.encoder(images), draws).sigmoid()

    def loss(self, seen: Tensor, images: Tensor, draws: Tensor) -> Tensor:
        """Return the loss in nats per image, a scalar: cross entropy plus KL divergence of the latents from N(0, 1).

        The cross entropy compares images (N, C, H, W) in [0, 1] with the reconstructions computed from `seen`.
        """
        code = self.encoder(seen)
        logits = self._logits(code, draws)
        apart = F.binary_cross_entropy_with_logits(logits, images, reduction="none").flatten(1).sum(1)
        return (apart + divergence(code)).mean()

    def _logits(self, code: Tensor, draws: Tensor) -> Tensor:
        """Return the decoder's logits."""
        mean, log_variance = code.chunk(2, -1)
        logits: Tensor = self.decoder(mean + draws * (log_variance / 2).exp())
        return logits
