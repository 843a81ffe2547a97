"""Variational bottleneck, which replaces features by a few random latents close to N(0, 1).

Source: Scheliga et al. 2022, "PRECODE - A Generic Model Extension to Prevent Deep Gradient Leakage", section 3; Kingma
and Welling 2014, "Auto-Encoding Variational Bayes", section 2.4 (reparameterisation) and appendix B (the divergence).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rayfed.gradients import Penalised


class Encoder(nn.Linear, Penalised):
    """Linear encoder of features (N, F) into means and log variances of Z latents, (N, 2 Z)."""

    def __init__(self, features: int, units: int, beta: float) -> None:
        super().__init__(features, 2 * units)
        self.beta = beta

    def penalty(self, output: Tensor) -> Tensor:
        """Return `beta` times the KL divergence of each sample's latents from N(0, 1), (N,)."""
        return self.beta * divergence(output)


class VariationalBottleneck(nn.Module):
    """Module that replaces features (N, F) by a reconstruction from few random latents.

    In evaluation mode, the latents are their means.
    """

    stochastic = True

    def __init__(self, features: int, units: int, beta: float) -> None:
        super().__init__()
        self.encode = Encoder(features, units, beta)
        self.decode = nn.Linear(units, features)

    def forward(self, features: Tensor) -> Tensor:
        """Encode features (N, F), sample the latents, and decode them to features (N, F)."""
        mean, log_variance = self.encode(features).chunk(2, -1)
        if self.training:
            mean = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        decoded: Tensor = self.decode(mean)
        return decoded


class KnownBottleneck(VariationalBottleneck):
    """Variational bottleneck with given random numbers (Z,), in every mode."""

    stochastic = False

    def __init__(self, bottleneck: VariationalBottleneck, noise: Tensor) -> None:
        nn.Module.__init__(self)
        self.encode, self.decode, self._noise = bottleneck.encode, bottleneck.decode, noise

    def forward(self, features: Tensor) -> Tensor:
        """Encode features (N, F), add the given noise to the latents, and decode them to features (N, F)."""
        mean, log_variance = self.encode(features).chunk(2, -1)
        noise = self._noise.to(mean.device, mean.dtype)
        decoded: Tensor = self.decode(mean + noise * (log_variance / 2).exp())
        return decoded


def divergence(code: Tensor) -> Tensor:
    """Return the KL divergence of latents from N(0, 1), (N,), given means and log variances (N, 2 Z)."""
    mean, log_variance = code.chunk(2, -1)
    return (mean.square() + log_variance.exp() - log_variance - 1).flatten(1).sum(1) / 2
