"""Total variation prior whose weight is chosen from the observed gradient.

The search minimises the distance d of the gradients times exp(k TV), so it minimises log d + k TV. This is the negative
logarithm of a posterior, with the variance of the residual integrated out. The n values of a gradient contribute n/2
log d. The differences of D pixels from their neighbours, with a Laplace density of scale b, contribute D TV / b. So k
is 2 D / (b n). The effective weight of the variation is k d, which vanishes when the gradient is matched.

The values of a gradient are far from independent, and the effective number is unknown. If it equals the number of
pixels, k is 2 / b: LeNets and trained networks then reveal photographs in few steps, but a search for a drawing with
sharp edges may stay at a flat image. If a quarter of all values counts, drawings and photographs in untrained ConvNets
are reconstructed. The attack therefore runs a short search under each weight, and a full search under the weight with
the better end. Ends are compared with k = 2 / 5b.

The gradients of R rounds have R times the values, so k is divided by R.

If an update contains signs only, the end with the shortest description counts. The n signs, of which a share d is
wrong, take n H(d) nats, with H the entropy. The images take D TV / b nats.

The images cannot fit noise, except its share in their D directions among the n values of a gradient. If the noise part
of a distance d is e, d counts as d - e plus D/n of e.

The noise level follows from a linear layer. The rank of its gradient is at most the number of samples, whereas noise
has full rank. The remaining singular values are therefore noise.

Sources: Rissanen 1978, "Modeling by shortest data description" (nats); MacKay 1992, "Bayesian Interpolation", section 3
(the noise's level by the evidence); Gavish and Donoho 2014, "The Optimal Hard Threshold for Singular Values is
4/sqrt(3)", section 1 (low rank and noise).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import mul
from typing import Self

import torch
from torch import Tensor

from rayfed.attacks.matching.priors import total_variation
from rayfed.attacks.matching.sent import Sent
from rayfed.gradients import norm
from rayfed.update import Named, Observation

_PER_VARIATION = 10.0
"""2 / b, for a mean difference of 0.2 between neighbours."""
_COUNTING = 1 / 4
"""Share of a gradient's values that count under the smaller weight. Best of 1, 1/2, 1/4, 1/8, 1/16 on a ConvNet."""
_APART = 1 / 2
"""Ratio of the weights above which only one of them is tried."""
_COMPARING = _PER_VARIATION / 5
"""k for comparing the ends of searches, as if five gradient values counted per pixel. This favours neither rough images
that fit slightly better, nor flat ones. On pairs of ends in 19 settings (digits, faces, photographs, noise, levels,
pruning), its choice is at most 1 dB worse on average (5 instead: 4 dB)."""
_LARGEST = 1024
"""Maximum of the smaller side of a matrix whose singular values are computed."""
_LEAST = 1e-3
"""Minimum cosine assumed between a noisy gradient and the exact one."""


@dataclass(frozen=True)
class RelativeVariation:
    """Gradient distance of V victims times the exponential of the total variation of their first `count` images."""

    cosines: Tensor
    """(V,), cosine between the exact and the observed gradient, estimated from the noise."""
    reach: float
    """Share of the gradient's directions that the images can reach: D/n, at most 1."""
    count: int
    rounds: int = 1
    """Number of rounds whose gradients are matched together."""
    weight: float = _PER_VARIATION
    """k, the factor of the variation in the exponent."""

    @property
    def weights(self) -> tuple[Self, ...]:
        """Return copies of this prior, one for each weight of the total variation that the search tries."""
        smaller = _PER_VARIATION * self.reach / _COUNTING
        first = replace(self, weight=_PER_VARIATION / self.rounds)
        return (first, replace(self, weight=smaller)) if smaller < _APART * first.weight else (first,)

    @property
    def judge(self) -> Self:
        """Return a copy of this prior with the weight for comparing the end points of searches."""
        return replace(self, weight=_COMPARING / self.rounds)

    @classmethod
    def of(cls, observations: Sequence[Observation], sent: Sent | None) -> Self:
        """Return the prior for observations of equal batch size. Noise is estimated only in unaltered gradients."""
        first = observations[0]
        shares = torch.tensor([_noise_share([o, *o.earlier]) for o in observations])
        if sent is not None:
            shares = shares.masked_fill(sent.altered.cpu(), 0)
        device = next(iter(first.update.values())).device
        values = (1 + len(first.earlier)) * sum(tensor.numel() for tensor in first.update.values())
        pixels = first.sample.blank(first.batch_size).numel()
        cosines = (1 - shares).clamp(min=0).sqrt().clamp(min=_LEAST)
        return cls(cosines.to(device), min(1.0, pixels / values), first.batch_size, 1 + len(first.earlier))

    def __call__(self, distance: Tensor, images: Tensor, victims: Tensor) -> Tensor:
        """Return the objective (Q,) for cosine distances (Q,) and images (Q, N, C, H, W) of victims (Q,)."""
        cosine = self.cosines[victims].to(distance)
        # (1 - c^2) / 2c has the same weight as log(1 - c^2); near c = 1 it equals the distance
        within = self.reach * (1 - cosine.square()) / (2 * cosine)
        above = distance - (1 - cosine)
        # below the noise's distance the weight stays constant; without noise this case does not occur
        below = within * (above / within.clamp(min=torch.finfo(distance.dtype).tiny)).clamp(max=0).exp()
        counts = torch.where(above > 0, above.clamp(min=0) + within, below)
        return counts * (self.weight * total_variation(images[:, : self.count]).mean(1)).exp()


def _noise_share(rounds: Sequence[Observation]) -> float:
    """Return the noise share of the squared norm of several rounds' gradients, taken as one vector."""
    squares = [float(norm(o.gradient)) ** 2 for o in rounds]
    noise = [noise_share(o.gradient, o.batch_size * o.local.steps) for o in rounds]
    return sum(map(mul, noise, squares)) / sum(squares) if len(rounds) > 1 and sum(squares) > 0 else noise[0]


def image_nats(images: Tensor) -> Tensor:
    """Return the description length of images (Q, N, C, H, W), in nats up to a constant, by total variation, (Q,)."""
    return _PER_VARIATION / 2 * images[0].numel() * total_variation(images).mean(1)


def noise_share(gradient: Named, rank: int) -> float:
    """Return the share of a gradient's squared norm that is noise, from 0 to 1, estimated from the linear layers.

    `rank` is the maximum rank of an exact gradient. The smallest estimate of all layers counts, because a layer that
    sees a sample at several positions has a higher rank. The result is 0 if no layer gives an estimate.
    """
    found = [_variance(tensor.double(), rank) for tensor in gradient.values() if tensor.ndim == 2]
    told = [variance for variance in found if variance is not None]
    squares = sum(float(tensor.double().square().sum()) for tensor in gradient.values())
    if not told or not squares > 0:
        return 0.0
    return min(1.0, min(told) * sum(tensor.numel() for tensor in gradient.values()) / squares)


def _variance(matrix: Tensor, rank: int) -> float | None:
    """Return the mean square of the noise on a matrix (R, C) of known rank, or None if it cannot be estimated."""
    low, high = sorted(matrix.shape)
    if not rank < low <= _LARGEST or not matrix.isfinite().all():
        return None
    gram = matrix @ matrix.T if matrix.shape[0] == low else matrix.T @ matrix
    beyond = torch.linalg.eigvalsh(gram)[: low - rank].clamp(min=0).sum()
    return float(beyond) / ((low - rank) * (high - rank))
