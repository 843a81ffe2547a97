"""The weight of the total variation, chosen from the gradient alone.

A search that minimises the distance d of the gradients times exp(k TV) is where log d + k TV has its minimum: the
negative logarithm of a posterior from which the deviation of what the images do not explain is integrated out. n values
of a gradient leave n/2 log d, differences of D pixels from their neighbours, of a Laplace density of scale b, leave
D TV / b, so k is 2 D / (b n). The weight of the variation is k d, then, which vanishes where the gradient is met.

The values of a gradient are far from independent, and how many count is not known. As if no more than the pixels did, k
is 2 / b: photographs come out of LeNets and trained networks in few steps, but a search for a drawing with sharp edges
may stay at a flat image. As if a quarter of all values did: those, and photographs out of untrained ConvNets. So a
short search is played under each, and a whole one under that whose end is the better. Ends are compared by k = 2 / 5b.

The gradients of R rounds have R times the values, of which R times as many count: k is an R-th.

Where an update tells signs alone, the end counts that is described in the fewest nats: its n signs, a share d of which
is wrong, in n H(d), with H the entropy, and its images in D TV / b.

Noise is no distance that the images could make up for, but for its share in their D directions among the n values of a
gradient. So what counts of a distance d, whose part by noise is e, is d - e and D/n of e.

How much noise there is follows from a linear layer. Its gradient has at most the rank of the number of samples, and
noise has every rank, so that the further singular values are noise alone.

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
"""2 / b: that of a mean difference of 0.2 between neighbours."""
_COUNTING = 1 / 4
"""Share of a gradient's values that count under the smaller weight: of 1, 1/2, 1/4, 1/8, 1/16 the best on a ConvNet."""
_APART = 1 / 2
"""Ratio of the weights from which on they are too near each other to play both."""
_COMPARING = _PER_VARIATION / 5
"""k by which ends of searches are compared, as if five values of a gradient counted for each pixel: neither rough
images that fit a little better win, nor flat ones. Of the pairs of ends of 19 settings (digits, faces, photographs,
behind noise, levels, pruning) it picks the one that is worse by 1 dB at most on average, 5 by 4 dB."""
_LARGEST = 1024
"""Largest number of rows or columns, whichever are fewer, of a matrix whose singular values are looked at."""
_LEAST = 1e-3
"""Least cosine that a gradient in noise is taken to have."""


@dataclass(frozen=True)
class RelativeVariation:
    """Distance of V victims' gradients times the exponential of the variation of their first `count` images."""

    cosines: Tensor
    """(V,): of the exact gradient and the observed one, as the noise in that tells."""
    reach: float
    """Share of the gradient's directions in which the images can move it: D/n, at most 1."""
    count: int
    rounds: int = 1
    """Number of rounds whose gradients are met together."""
    weight: float = _PER_VARIATION
    """k, the factor of the variation in the exponential."""

    @property
    def weights(self) -> tuple[Self, ...]:
        """Copies of this prior, one for each weight of the total variation under which a search is tried."""
        smaller = _PER_VARIATION * self.reach / _COUNTING
        first = replace(self, weight=_PER_VARIATION / self.rounds)
        return (first, replace(self, weight=smaller)) if smaller < _APART * first.weight else (first,)

    @property
    def judge(self) -> Self:
        """Copy of this prior with the weight by which the ends of searches are compared."""
        return replace(self, weight=_COMPARING / self.rounds)

    @classmethod
    def of(cls, observations: Sequence[Observation], sent: Sent | None) -> Self:
        """Return that of observations of one batch size; where not all was `sent` as it was, no noise is estimated."""
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
        """Return the objective of distances (Q,), one minus the cosine, and images (Q, N, C, H, W) of victims (Q,)."""
        cosine = self.cosines[victims].to(distance)
        # (1 - c^2) / 2c is the weight that log(1 - c^2) has; near c = 1 that is the distance itself
        within = self.reach * (1 - cosine.square()) / (2 * cosine)
        above = distance - (1 - cosine)
        # below the noise's own distance the weight stays; where there is none that is no case
        below = within * (above / within.clamp(min=torch.finfo(distance.dtype).tiny)).clamp(max=0).exp()
        counts = torch.where(above > 0, above.clamp(min=0) + within, below)
        return counts * (self.weight * total_variation(images[:, : self.count]).mean(1)).exp()


def _noise_share(rounds: Sequence[Observation]) -> float:
    """Return the share of the squared norm of several rounds' gradients, as one vector, that is noise."""
    squares = [float(norm(o.gradient)) ** 2 for o in rounds]
    noise = [noise_share(o.gradient, o.batch_size * o.local.steps) for o in rounds]
    return sum(map(mul, noise, squares)) / sum(squares) if len(rounds) > 1 and sum(squares) > 0 else noise[0]


def image_nats(images: Tensor) -> Tensor:
    """Return D TV / b of images (Q, N, C, H, W), (Q,): the nats that describe them, but for a constant."""
    return _PER_VARIATION / 2 * images[0].numel() * total_variation(images).mean(1)


def noise_share(gradient: Named, rank: int) -> float:
    """Return the share of a gradient's squared norm that is noise, from 0 to 1, by its linear layers' lower ranks.

    `rank` is the largest that an exact gradient has. Of the layers' deviations the smallest counts, as a layer that
    sees a sample at several places has a higher rank; 0 where no layer tells.
    """
    found = [_variance(tensor.double(), rank) for tensor in gradient.values() if tensor.ndim == 2]
    told = [variance for variance in found if variance is not None]
    squares = sum(float(tensor.double().square().sum()) for tensor in gradient.values())
    if not told or not squares > 0:
        return 0.0
    return min(1.0, min(told) * sum(tensor.numel() for tensor in gradient.values()) / squares)


def _variance(matrix: Tensor, rank: int) -> float | None:
    """Return the mean square of the noise on a matrix (R, C) of a known rank; None if it cannot be estimated."""
    low, high = sorted(matrix.shape)
    if not rank < low <= _LARGEST or not matrix.isfinite().all():
        return None
    gram = matrix @ matrix.T if matrix.shape[0] == low else matrix.T @ matrix
    beyond = torch.linalg.eigvalsh(gram)[: low - rank].clamp(min=0).sum()
    return float(beyond) / ((low - rank) * (high - rank))
