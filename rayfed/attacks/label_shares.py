"""Shares of the classes in a batch, by the best linear estimate from what its gradient shows.

The estimate is learnt on samples of the attacker's own, in stages, and judged on stages that it was not learnt on: the
victim's samples are of a further one. Where what is shown says little of the labels, as of a model that is right nearly
everywhere, or says something else from stage to stage, it stays at the shares that are expected anyway. How far it
leaves them is taken from the batch (empirical Bayes): what the estimates vary more than by classes that are drawn alike
and by their own error, the true shares do.

Sources: Efron and Morris 1973, "Stein's Estimation Rule and Its Competitors - An Empirical Bayes Approach" (the true
variance is the observed one less that of the error); leaving out whole groups for data of a further one is usual where
these differ, as in Roberts et al. 2017, "Cross-validation strategies for data with temporal, spatial, hierarchical, or
phylogenetic structure".
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_RIDGES = torch.logspace(-6, 3, 19)
"""Weights of the ridge that are tried, in units of the mean square of what own samples show, all together."""
_NOTHING = 1e-60
"""Least sum of squares of what own samples show: where it is 0 they tell nothing, and shares stay even."""
_AWAY = 2
"""How much farther real samples are supposed to be from the stages than these, all of one kind, from each other."""


class _Moments(NamedTuple):
    """Of numbers (S, M, K) of own samples: what a mean over a batch of one has of it, each (K,)."""

    common: Tensor
    """The square of a stage's mean, which all batches share."""
    between: Tensor
    """The variance of the classes' means, which a batch has by its shares."""
    within: Tensor
    """The variance inside the classes."""

    @classmethod
    def of(cls, numbers: Tensor, labels: Tensor) -> _Moments:
        """Return the moments of numbers (..., S, M, K), averaged over the stages."""
        mean = numbers.mean(-2, keepdim=True)
        means = (labels / labels.sum(0).clamp(min=1)).T @ numbers - mean
        between = labels.mean(0) @ means.square()
        return cls(
            mean.square().mean((-3, -2)),
            between.mean(-2),
            ((numbers - mean).square().mean(-2) - between).mean(-2).clamp(min=0),
        )

    def expected(self, size: int, spread: float) -> Tensor:
        """Return the mean square in a batch of real samples whose shares vary `spread` times as even ones."""
        return _AWAY**2 * self.common + (spread * self.between + self.within) / size


class _Estimate(NamedTuple):
    """The linear estimate for batches of a given spread."""

    slope: Tensor
    """(D, K)"""
    error: Tensor
    """(K,) its mean squared error."""
    answers: _Moments
    """Of what it says of stages that it was not learnt on."""


def estimated_shares(shown: Tensor, labels: Tensor, seen: Tensor, size: int, noise: float) -> tuple[Tensor, Tensor]:
    """Return the shares (K,) of the classes among `size` samples, whose mean shows `seen` (K, m), and their deviations.

    `shown` (S, M, K, m) is what single samples of one's own show, in S stages; `labels` (M, K) theirs, as 0 and 1;
    `noise` the variance of a number of `seen` by itself.
    """
    shown, away = shown.flatten(2), seen.flatten() - shown.mean((0, 1)).flatten()
    even = _estimate(shown, labels, size, noise, 1)
    blurred = even.answers.expected(size, 0) + noise * even.slope.square().sum(0)
    by_shares = even.answers.between.sum() / size
    # what even shares vary by chance, two deviations of a chi-square's: less is no sign of others
    varied = (away @ even.slope).square().sum() / (1 + 2 * (2 / max(1, len(blurred) - 1)) ** 0.5)
    spread = float(((varied - blurred.sum()) / by_shares).nan_to_num(1).clamp(1, size))
    found = even if spread == 1 else _estimate(shown, labels, size, noise, spread)
    shares: Tensor = labels.mean(0) + away @ found.slope
    return shares, (found.error + noise * found.slope.square().sum(0)).sqrt()


def _estimate(shown: Tensor, labels: Tensor, size: int, noise: float, spread: float) -> _Estimate:
    """Return the estimate whose ridge foretells stages that were left out best, or samples where there is one stage."""
    told = labels - labels.mean(0)
    fit = _Fit.of(shown, labels, size, noise, spread)
    if len(shown) == 1:
        answers = torch.stack([fit.without_each(ridge) for ridge in fit.ridges])[:, None]
    else:
        left = [
            (one - rest.mean((0, 1))) @ torch.stack([others.slope(ridge) for ridge in others.ridges])
            for one, rest in ((shown[s], torch.cat([shown[:s], shown[s + 1 :]])) for s in range(len(shown)))
            for others in [_Fit.of(rest, labels, size, noise, spread)]
        ]
        answers = torch.stack(left, 1)
    errors = _Moments.of(answers - told, labels).expected(size, spread)
    best = int(errors.sum(1).argmin())
    return _Estimate(fit.slope(fit.ridges[best]), errors[best], _Moments.of(answers[best], labels))


class _Fit(NamedTuple):
    """Ridge regressions of labels on what samples show."""

    rows: Tensor
    """(R, D) differences: of samples, then of stages and of classes."""
    values: Tensor
    """(r,) eigenvalues of their products but for those that are 0, r at most the smaller of R and D"""
    vectors: Tensor
    """(R, r)"""
    turned: Tensor
    """(r, K) what the rows tell of labels, in these vectors"""
    own: int
    """How many rows are of samples."""
    ridges: Tensor

    @classmethod
    def of(cls, shown: Tensor, labels: Tensor, size: int, noise: float, spread: float) -> _Fit:
        """Decompose the rows for batches of `size` samples whose shares vary `spread` times as even ones.

        In a mean over them a stage that was not seen yet counts as a whole; stages tell nothing of labels.
        """
        stages, samples, width = shown.shape
        expected, mean = labels.mean(0), shown.mean((0, 1))
        means = (labels / labels.sum(0).clamp(min=1)).T @ shown
        apart = means - means.mean(0)
        whole = torch.einsum("skd,k->sd", apart, expected)
        by_class = (apart - whole[:, None]) * expected[:, None]
        further = (size * samples * (stages + 1) / max(1, stages - 1)) ** 0.5
        repeated = ((spread - 1) * stages * samples * expected).sqrt()[:, None]
        own = (shown - mean - whole[:, None]).flatten(0, 1)
        stage_rows = further * torch.cat([whole, by_class.flatten(0, 1)])
        rows = torch.cat([own, stage_rows, repeated * (means.mean(0) - mean)])
        told = torch.cat(
            [
                (labels - expected).repeat(stages, 1),
                labels.new_zeros(len(stage_rows), len(expected)),
                repeated * (torch.eye(len(expected)).to(labels) - expected),
            ]
        )
        vectors, lengths, _ = torch.linalg.svd(rows, full_matrices=False)
        scale = own.square().sum().clamp(min=_NOTHING)
        ridges = _RIDGES.to(lengths) * scale / width + len(own) * size * noise
        return cls(rows, lengths.square(), vectors, vectors.T @ told, len(own), ridges)

    def slope(self, ridge: Tensor) -> Tensor:
        """Return the slope (D, K) of the labels in what is shown."""
        return self.rows.T @ (self.vectors @ (self.turned / (self.values + ridge)[:, None]))

    def without_each(self, ridge: Tensor) -> Tensor:
        """Return what is foretold of each sample's labels (M, K) from all others."""
        kept, vectors = self.values / (self.values + ridge), self.vectors[: self.own]
        told = vectors @ self.turned
        return told - (told - vectors @ (kept[:, None] * self.turned)) / (1 - vectors.square() @ kept)[:, None]
