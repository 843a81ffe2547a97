"""Priors on natural images, which an attacker assumes without knowledge of the gradient.

Sources: Rudin, Osher and Fatemi 1992, "Nonlinear total variation based noise removal algorithms"; Yin et al. 2021, "See
through Gradients", section 3 (L2 norm, batch-norm statistics).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.linalg import vector_norm

Prior = Callable[[Tensor], Tensor]
"""Images (Q, N, C, H, W) -> (Q,), with its graph: smaller for more plausible images."""


def total_variation(images: Tensor) -> Tensor:
    """Return the anisotropic total variation, (..., C, H, W) -> (...): mean absolute difference of adjacent pixels.

    The sum of the vertical and horizontal means, for any number of channels. Only pairs of pixels inside the image
    count, so a bright border adds nothing. Inputs of one row are table records, whose neighbouring columns are
    unrelated: the result is 0.
    """
    if images.shape[-2] == 1:
        return images.new_zeros(images.shape[:-3])
    down = (images[..., 1:, :] - images[..., :-1, :]).abs().mean((-3, -2, -1))
    across = (images[..., 1:] - images[..., :-1]).abs().mean((-3, -2, -1))
    return down + across


def squared_variation(images: Tensor) -> Tensor:
    """Return twice the sum of the mean squared vertical and horizontal differences, (..., C, H, W) -> (...).

    This is the total variation of GRNN's published code. Otherwise as `total_variation`.
    """
    if images.shape[-2] == 1:
        return images.new_zeros(images.shape[:-3])
    down = (images[..., 1:, :] - images[..., :-1, :]).square().mean((-3, -2, -1))
    across = (images[..., 1:] - images[..., :-1]).square().mean((-3, -2, -1))
    return 2 * (down + across)


def euclidean(images: Tensor) -> Tensor:
    """Return the Euclidean norm of each image, (..., C, H, W) -> (...)."""
    norms: Tensor = vector_norm(images, dim=(-3, -2, -1))
    return norms


def latent_divergence(latents: Tensor) -> Tensor:
    """Return the KL divergence from N(0, 1) of a normal with each latent's mean and variance, (..., Z) -> (...)."""
    mean, variance = latents.mean(-1), latents.var(-1, correction=0)
    return (mean.square() + variance - variance.log() - 1) / 2
