"""What an attacker believes of natural images before seeing a gradient.

Source: Rudin, Osher and Fatemi 1992, "Nonlinear total variation based noise removal algorithms".
"""

from __future__ import annotations

from torch import Tensor


def total_variation(images: Tensor) -> Tensor:
    """Anisotropic total variation, (..., C, H, W) -> (...): mean absolute difference of neighbours, down plus across.

    Any number of channels. Only pairs of pixels inside the image count, so a bright border costs nothing.
    """
    down = (images[..., 1:, :] - images[..., :-1, :]).abs().mean((-3, -2, -1))
    across = (images[..., 1:] - images[..., :-1]).abs().mean((-3, -2, -1))
    return down + across


def latent_divergence(latents: Tensor) -> Tensor:
    """KL divergence of N(m, v) from N(0, 1), m and v the mean and variance of a latent's numbers: (..., Z) -> (...)."""
    mean, variance = latents.mean(-1), latents.var(-1, correction=0)
    return (mean.square() + variance - variance.log() - 1) / 2
