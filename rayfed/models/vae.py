"""Variational autoencoder of four dense layers, for images of any size.

Sources: Kingma and Welling 2014, "Auto-Encoding Variational Bayes"; the layers are those of table I of Lin et al. 2022,
"A Secure Federated Learning Mechanism for Data Privacy Protection", which does not state their widths.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rayfed.models.bottleneck import divergence


class Autoencoder(nn.Module):
    """Variational autoencoder that reconstructs images from a few random latents.

    With `classes`, encoder and decoder also receive the label as a vector with a one (a conditional autoencoder, Sohn
    et al. 2015, "Learning Structured Output Representation using Deep Conditional Generative Models").
    """

    def __init__(self, image_shape: tuple[int, ...], hidden: int, latent: int, classes: int = 0) -> None:
        """Create an autoencoder with first dense layers of width `hidden` and a code z of length `latent`."""
        super().__init__()
        pixels = prod(image_shape)
        self.latent = latent
        self.classes = classes
        self.encoder = nn.Sequential(
            nn.Flatten(), nn.Linear(pixels + classes, hidden), nn.ReLU(), nn.Linear(hidden, 2 * latent)
        )
        self.decoder = nn.Sequential(
            nn.Linear(latent + classes, hidden), nn.ReLU(), nn.Linear(hidden, pixels), nn.Unflatten(1, image_shape)
        )

    def forward(self, images: Tensor, draws: Tensor, labels: Tensor | None = None) -> Tensor:
        """Encode images (N, C, H, W), and decode latents with the noise `draws` (N, latent) to images in [0, 1].

        `draws` are samples of N(0, 1). `labels` (N,) int64 are only used with `classes`.
        """
        return self._logits(self._encode(images, labels), draws, labels).sigmoid()

    def loss(self, seen: Tensor, images: Tensor, draws: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return the loss in nats per image, a scalar: cross entropy plus KL divergence of the latents from N(0, 1).

        The cross entropy compares images (N, C, H, W) in [0, 1] with the reconstructions computed from `seen`.
        """
        code = self._encode(seen, labels)
        logits = self._logits(code, draws, labels)
        apart = F.binary_cross_entropy_with_logits(logits, images, reduction="none").flatten(1).sum(1)
        return (apart + divergence(code)).mean()

    def _encode(self, images: Tensor, labels: Tensor | None) -> Tensor:
        """Return mean and log variance of the latents, (N, 2 latent)."""
        code: Tensor = self.encoder(self._with_labels(images.flatten(1), labels))
        return code

    def _logits(self, code: Tensor, draws: Tensor, labels: Tensor | None) -> Tensor:
        """Return the decoder's logits."""
        mean, log_variance = code.chunk(2, -1)
        latents = mean + draws * (log_variance / 2).exp()
        logits: Tensor = self.decoder(self._with_labels(latents, labels))
        return logits

    def _with_labels(self, values: Tensor, labels: Tensor | None) -> Tensor:
        """Append the labels to values (N, D), as vectors with a one, if the autoencoder is conditional."""
        if not self.classes:
            return values
        assert labels is not None
        return torch.cat([values, F.one_hot(labels, self.classes).to(values)], 1)
