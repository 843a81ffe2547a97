"""Shares of the classes in a batch, by the best linear estimate from what its gradient shows.

The estimate is learnt on samples of the attacker's own. Where what is shown says little of the labels, as of a model
that is right nearly everywhere, it stays at the shares that are expected anyway.
"""

from __future__ import annotations

import torch
from torch import Tensor

_RIDGES = torch.logspace(-6, 2, 17)
"""Weights of the ridge that are tried, in units of the mean eigenvalue."""
_AWAY = 2
"""How much farther real samples are supposed to be from the stages than these, all of one kind, from each other."""
_LEAST = 1e-3
"""Share of their variance by which real samples are taken to differ from one's own in every direction."""


def estimated_shares(shown: Tensor, labels: Tensor, seen: Tensor, size: int, noise: float) -> tuple[Tensor, Tensor]:
    """Return the shares (K,) of the classes among `size` samples, whose mean shows `seen` (K, m), and their deviations.

    `shown` (S, M, K, m) is what single samples of one's own show, in S stages; `labels` (M, K) theirs, as 0 and 1;
    `noise` the variance of a number of `seen` by itself. The batch is supposed to differ from one's own samples as a
    further stage would, as a whole and class by class.
    """
    rows, told, own = _supposed(shown.flatten(2), labels, size, _AWAY)
    mean, expected = shown.mean((0, 1)).flatten(), labels.mean(0)
    values, vectors = torch.linalg.eigh(rows @ rows.T)
    values, turned = values.clamp(min=0), vectors.T @ told

    def missed(ridge: Tensor) -> Tensor:
        """Return the mean squared error (K,) for a sample, foretold from all others."""
        kept = values / (values + ridge)
        left = (told - vectors @ (kept[:, None] * turned)) / (1 - vectors.square() @ kept)[:, None]
        error: Tensor = left[:own].square().mean(0)
        return error

    ridge = min(_RIDGES.to(values) * values.mean(), key=lambda r: float(missed(r).sum())) + own * size * noise
    slope = rows.T @ (vectors @ (turned / (values + ridge)[:, None]))
    shares: Tensor = expected + (seen.flatten() - mean) @ slope
    return shares, (missed(ridge) / size + noise * slope.square().sum(0)).sqrt()


def likelihood(shown: Tensor, labels: Tensor, seen: Tensor, size: int, noise: float) -> float:
    """Return the logarithm of the normal density of `seen` (K,), but for a constant; `shown` is (S, M, K)."""
    rows, _, own = _supposed(shown, labels, size, 1)
    spread = rows.T @ rows / (own * size)
    spread += (noise + _LEAST * spread.trace()) * torch.eye(len(spread)).to(spread)
    away = seen - shown.mean((0, 1))
    return -float(away @ torch.linalg.solve(spread, away) + torch.linalg.slogdet(spread).logabsdet) / 2


def _supposed(shown: Tensor, labels: Tensor, size: int, away: float) -> tuple[Tensor, Tensor, int]:
    """Return differences (R, D) of samples and of stages, what they tell of labels (R, K), and how many are of samples.

    Stages tell nothing; in a mean over `size` samples one that was not seen yet counts as often, `away` times as far.
    """
    stages, samples, _ = shown.shape
    whole, by_class = _effects(shown, labels)
    further = away * (size * samples * (stages + 1) / max(1, stages - 1)) ** 0.5
    own = (shown - shown.mean((0, 1)) - whole[:, None]).flatten(0, 1)
    rows = torch.cat([own, further * whole, further * by_class.flatten(0, 1)])
    told = (labels - labels.mean(0)).repeat(stages, 1)
    return rows, torch.cat([told, told.new_zeros(len(rows) - len(own), told.shape[1])]), len(own)


def _effects(shown: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return how stages differ as a whole (S, D), and by class, as far as one class moves a batch (S, K, D)."""
    weights = labels / labels.sum(0).clamp(min=1)
    means = torch.einsum("smd,mk->skd", shown, weights)
    away = means - means.mean(0)
    shares = labels.mean(0)
    whole = torch.einsum("skd,k->sd", away, shares)
    return whole, (away - whole[:, None]) * shares[:, None]
