"""Estimate the share of each class in a batch from its gradient by linear regression.

The regression is trained on the attacker's own samples in several stages, because the stage of the victim's samples is
unknown. It is validated on stages that were left out. If the gradient says little about the labels, or differs between
stages, the estimate stays at the shares in the attacker's own samples.

Two quantities are estimated from the batch itself (empirical Bayes). Variation that the own samples do not explain is
noise, which sets a minimum ridge. The spread of the shares is unknown, so estimates for several spreads are averaged,
weighted by their likelihood.

Sources: MacKay 1992, "Bayesian Interpolation" (noise by its evidence); Hoeting et al. 1999, "Bayesian Model Averaging:
A Tutorial"; Roberts et al. 2017, "Cross-validation strategies for data with temporal, spatial, hierarchical, or
phylogenetic structure" (leaving out whole groups).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_RIDGES = torch.logspace(-6, 3, 19)
"""Ridge weights to try, in units of the mean square of all features of the own samples."""
_NOTHING = 1e-60
"""Minimum sum of squares of the features; if it is 0, the shares stay at those of the own samples."""
_AWAY = 2
"""Assumed distance of real samples from the stages, divided by the distance of the stages from each other."""


class _Moments(NamedTuple):
    """Parts of the second moment of predictions (S, M, K) for the own samples, each (K,)."""

    common: Tensor
    """Square of a stage's mean, shared by all batches."""
    between: Tensor
    """Variance of the class means, which depends on a batch's shares."""
    within: Tensor
    """Variance within classes."""

    @classmethod
    def of(cls, numbers: Tensor, labels: Tensor) -> _Moments:
        """Return the moments of the predictions `numbers` (..., S, M, K), averaged over the stages."""
        mean = numbers.mean(-2, keepdim=True)
        means = (labels / labels.sum(0).clamp(min=1)).T @ numbers - mean
        between = labels.mean(0) @ means.square()
        return cls(
            mean.square().mean((-3, -2)),
            between.mean(-2),
            ((numbers - mean).square().mean(-2) - between).mean(-2).clamp(min=0),
        )

    def expected(self, size: int, spread: float) -> Tensor:
        """Return the expected mean square in a batch whose class shares vary `spread` times as much as uniform ones."""
        return _AWAY**2 * self.common + (spread * self.between + self.within) / size


class _Estimate(NamedTuple):
    """Linear estimate for batches with a given spread of shares."""

    slope: Tensor
    """(D, K)"""
    error: Tensor
    """(K,) mean squared error."""


def estimated_shares(shown: Tensor, labels: Tensor, seen: Tensor, size: int, noise: float) -> tuple[Tensor, Tensor]:
    """Return the estimated shares (K,) of the classes in a batch of `size` samples, and their standard deviations.

    `seen` (K, m) are the features of the batch's gradient. `shown` (S, M, K, m) are those of the attacker's single
    samples in S stages, with one-hot `labels` (M, K). `noise` is the variance of the noise in each value of `seen`.
    """
    shown, away = shown.flatten(2), seen.flatten() - shown.mean((0, 1)).flatten()
    learnt = _Learnt.of(shown, labels, size, noise)
    unexplained = learnt.fit.unexplained(away, size)
    # spreads double from 1 (uniform sampling) to `size` (all samples of one class)
    spreads = 2.0 ** torch.arange(size.bit_length(), dtype=torch.float64, device=away.device)
    weights = learnt.weights(away, spreads)
    found = [learnt.estimate(float(spread), unexplained / float(spread)) for spread in spreads]
    moved = torch.stack([away @ one.slope for one in found])
    mean = weights @ moved
    blur = unexplained / (len(learnt.fit.own) * size)
    errors = torch.stack([one.error + blur * one.slope.square().sum(0) for one in found])
    return labels.mean(0) + mean, (weights @ (errors + (moved - mean).square())).sqrt()


class _Learnt(NamedTuple):
    """Regressions on all stages of the own samples, and on all but one for validation."""

    fit: _Fit
    others: list[tuple[_Fit, Tensor]]
    """For each stage, a fit to all other stages and the features (M, D) of this stage; empty with a single stage."""
    labels: Tensor
    size: int
    noise: float

    @classmethod
    def of(cls, shown: Tensor, labels: Tensor, size: int, noise: float) -> _Learnt:
        """Fit ridge regressions of labels on features: to all stages, and to all stages except one for validation."""
        rest = [torch.cat([shown[:s], shown[s + 1 :]]) for s in range(len(shown) if len(shown) > 1 else 0)]
        others = [
            (_Fit.of(own, labels, size, noise), one - own.mean((0, 1))) for own, one in zip(rest, shown, strict=False)
        ]
        return cls(_Fit.of(shown, labels, size, noise), others, labels, size, noise)

    def answers(self, ridge: int, spread: float) -> Tensor:
        """Return cross-validated label predictions (S, M, K) for the attacker's own samples."""
        if not self.others:
            return self.fit.without_each(ridge)[None]
        return torch.stack([one @ fit.slope(ridge, spread) for fit, one in self.others])

    def weights(self, away: Tensor, spreads: Tensor) -> Tensor:
        """Return the probability of each spread of class shares, given a batch's deviation `away` from the mean.

        The density is chi-square. Only the largest ridge weight is used, which emphasises the directions in which
        classes differ most.
        """
        last = len(self.fit.ridges) - 1
        slope, answers = self.fit.slope(last, 1), _Moments.of(self.answers(last, 1), self.labels)
        blurred = self.noise * slope.square().sum() + _NOTHING
        expected = torch.stack([answers.expected(self.size, float(spread)).sum() for spread in spreads]) + blurred
        off = (away @ slope).square().sum()
        # the prior of 1 / spread is uniform on [0, 1]
        return (-(slope.shape[1] - 1) / 2 * (expected.log() + off / expected) - spreads.log()).softmax(0)

    def estimate(self, spread: float, least: Tensor) -> _Estimate:
        """Return the linear estimate with the smallest validation error among ridge weights of at least `least`."""
        tried = [i for i, ridge in enumerate(self.fit.ridges) if ridge >= least]
        told = self.labels - self.labels.mean(0)
        missed = [_Moments.of(self.answers(i, spread) - told, self.labels) for i in tried]
        errors = [one.expected(self.size, spread) for one in missed]
        best = min(range(len(tried)), key=lambda i: float(errors[i].sum()))
        return _Estimate(self.fit.slope(tried[best], spread), errors[best])


class _Fit(NamedTuple):
    """Ridge regressions of labels on the features of samples."""

    directions: Tensor
    """(r, D) orthonormal directions of the features; r is at most D and at most the number of fitted rows"""
    values: Tensor
    """(r,) sums of squares of the rows in these directions"""
    own: Tensor
    """(R, r) rows of samples"""
    labels: Tensor
    """(R, K) labels of the samples minus their mean"""
    apart: Tensor
    """(K, r) rows of classes, weighted by their numbers of samples"""
    classes: Tensor
    """(K, K) labels of the classes minus their mean"""
    ridges: Tensor

    @classmethod
    def of(cls, shown: Tensor, labels: Tensor, size: int, noise: float) -> _Fit:
        """Decompose the differences between samples, stages and classes, for regressions on batches of `size` samples.

        All samples of a batch share a stage, so averaging does not reduce differences between stages. Stages contain no
        information about labels.
        """
        stages, samples, width = shown.shape
        expected, mean = labels.mean(0), shown.mean((0, 1))
        means = (labels / labels.sum(0).clamp(min=1)).T @ shown
        apart = means - means.mean(0)
        whole = torch.einsum("skd,k->sd", apart, expected)
        by_class = (apart - whole[:, None]) * expected[:, None]
        further = (size * samples * (stages + 1) / max(1, stages - 1)) ** 0.5
        own = (shown - mean - whole[:, None]).flatten(0, 1)
        rows = torch.cat([own, further * torch.cat([whole, by_class.flatten(0, 1)])])
        _, lengths, directions = torch.linalg.svd(rows, full_matrices=False)
        often = (stages * samples * expected).sqrt()[:, None]
        ridges = _RIDGES.to(lengths) * own.square().sum().clamp(min=_NOTHING) / width + len(own) * size * noise
        return cls(
            directions,
            lengths.square(),
            own @ directions.T,
            (labels - expected).repeat(stages, 1),
            often * (means.mean(0) - mean) @ directions.T,
            often * (torch.eye(len(expected), dtype=labels.dtype, device=labels.device) - expected),
            ridges,
        )

    def unexplained(self, away: Tensor, size: int) -> Tensor:
        """Return the maximum-likelihood ridge weight for a batch whose features deviate by `away` (D,) from the mean.

        The model is a normal distribution with the variance of the rows plus the ridge in every direction.
        """
        weight = len(self.own) * size
        seen = weight * (self.directions @ away).square()
        rest = (weight * away.square().sum() - seen.sum()).clamp(min=0)
        spare = len(away) - len(seen)
        variances = self.values + self.ridges[:, None]
        fits = (seen / variances + variances.log()).sum(1) + rest / self.ridges + spare * self.ridges.log()
        return self.ridges[fits.argmin()]

    def _solved(self, sums: Tensor, ridge: int, spread: float) -> Tensor:
        """Return the solution (r, n) of the ridge system for `sums`, with classes weighted by `spread` (Woodbury)."""
        inverse = 1 / (self.values + self.ridges[ridge])[:, None]
        sums = inverse * sums
        if spread == 1:
            return sums
        more, across = spread - 1, inverse * self.apart.T
        both = torch.eye(len(self.apart), dtype=sums.dtype, device=sums.device) + more * self.apart @ across
        repeated: Tensor = more * across @ torch.linalg.solve(both, self.apart @ sums)
        return sums - repeated

    def _turned(self, ridge: int, spread: float) -> Tensor:
        """Return the slope (r, K) in the coordinates of `directions`."""
        return self._solved(self.own.T @ self.labels + (spread - 1) * self.apart.T @ self.classes, ridge, spread)

    def slope(self, ridge: int, spread: float) -> Tensor:
        """Return the regression coefficients (D, K) from features to labels."""
        return self.directions.T @ self._turned(ridge, spread)

    def without_each(self, ridge: int) -> Tensor:
        """Return leave-one-out predictions of the labels (R, K) for a spread of 1.

        Larger spreads are not used, because the row of a class would include the sample that is left out.
        """
        kept = self.own.square() @ (1 / (self.values + self.ridges[ridge]))[:, None]
        told = self.own @ self._turned(ridge, 1)
        return (told - kept * self.labels) / (1 - kept)
