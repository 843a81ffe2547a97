"""A variational bottleneck: features pass through a few random numbers that stay near N(0, 1).

Source: Scheliga et al. 2022, "PRECODE - A Generic Model Extension to Prevent Deep Gradient Leakage", section 3; Kingma
and Welling 2014, "Auto-Encoding Variational Bayes", section 2.4 (reparameterisation) and appendix B (the divergence).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rayfed.gradients import Penalised


class Encoder(nn.Linear, Penalised):
    """(N, F) to the means and the logarithms of the variances of Z independent normal numbers: (N, 2 Z)."""

    def __init__(self, features: int, units: int, beta: float) -> None:
        super().__init__(features, 2 * units)
        self.beta = beta

    def penalty(self, output: Tensor) -> Tensor:
        """`beta` times the KL divergence of each sample's distribution from N(0, 1), (N,)."""
        return self.beta * divergence(output)


class VariationalBottleneck(nn.Module):
    """Features (N, F) to features of the same shape; in evaluation mode the mean passes, and nothing is drawn."""

    stochastic = True

    def __init__(self, features: int, units: int, beta: float) -> None:
        super().__init__()
        self.encode = Encoder(features, units, beta)
        self.decode = nn.Linear(units, features)

    def forward(self, features: Tensor) -> Tensor:
        """Encode features, draw the latents, decode them."""
        mean, log_variance = self.encode(features).chunk(2, -1)
        if self.training:
            mean = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        decoded: Tensor = self.decode(mean)
        return decoded


def divergence(code: Tensor) -> Tensor:
    """KL divergence of each sample's distribution from N(0, 1), (N,), from its means and log variances (N, 2 Z)."""
    mean, log_variance = code.chunk(2, -1)
    return (mean.square() + log_variance.exp() - log_variance - 1).flatten(1).sum(1) / 2
