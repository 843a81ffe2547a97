"""Shares of the classes in a batch, by the best linear estimate from what its gradient shows.

The estimate is learnt on samples of the attacker's own, in stages, and judged on stages that it was not learnt on: the
victim's samples are of a further one. Where what is shown says little of the labels, as of a model that is right nearly
everywhere, or says something else from stage to stage, it stays at the shares that are expected anyway. Two things
are read from the batch itself (empirical Bayes): what own samples do not explain of it is noise, which no estimate may
trust; and where more is shown of labels than classes that are drawn alike would show, they are skewed: of estimates for
several skews the mean is taken, each weighed by how likely it makes that.

Sources: MacKay 1992, "Bayesian Interpolation" (noise by its evidence); Hoeting et al. 1999, "Bayesian Model Averaging:
A Tutorial"; leaving out whole groups for data of a further one is usual where these differ, as in Roberts et al. 2017,
"Cross-validation strategies for data with temporal, spatial, hierarchical, or phylogenetic structure".
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


def estimated_shares(shown: Tensor, labels: Tensor, seen: Tensor, size: int, noise: float) -> tuple[Tensor, Tensor]:
    """Return the shares (K,) of the classes among `size` samples, whose mean shows `seen` (K, m), and their deviations.

    `shown` (S, M, K, m) is what single samples of one's own show, in S stages; `labels` (M, K) theirs, as 0 and 1;
    `noise` the variance of a number of `seen` by itself.
    """
    shown, away = shown.flatten(2), seen.flatten() - shown.mean((0, 1)).flatten()
    learnt = _Learnt.of(shown, labels, size, noise)
    unexplained = learnt.fit.unexplained(away, size)
    # as many spreads as doublings fit between classes that are drawn alike and samples that are all of one class
    spreads = 2.0 ** torch.arange(size.bit_length(), dtype=torch.float64, device=away.device)
    weights = learnt.weights(away, spreads)
    found = [learnt.estimate(float(spread), unexplained / float(spread)) for spread in spreads]
    moved = torch.stack([away @ one.slope for one in found])
    mean = weights @ moved
    blur = unexplained / (len(learnt.fit.own) * size)
    errors = torch.stack([one.error + blur * one.slope.square().sum(0) for one in found])
    return labels.mean(0) + mean, (weights @ (errors + (moved - mean).square())).sqrt()


class _Learnt(NamedTuple):
    """What own samples tell of labels, and what is told of each stage by the others."""

    fit: _Fit
    others: list[tuple[_Fit, Tensor]]
    """A fit to all other stages, with what a stage (M, D) shows; none where there is one stage."""
    labels: Tensor
    size: int
    noise: float

    @classmethod
    def of(cls, shown: Tensor, labels: Tensor, size: int, noise: float) -> _Learnt:
        """Fit all stages, and all but one."""
        rest = [torch.cat([shown[:s], shown[s + 1 :]]) for s in range(len(shown) if len(shown) > 1 else 0)]
        others = [
            (_Fit.of(own, labels, size, noise), one - own.mean((0, 1))) for own, one in zip(rest, shown, strict=False)
        ]
        return cls(_Fit.of(shown, labels, size, noise), others, labels, size, noise)

    def answers(self, ridge: int, spread: float) -> Tensor:
        """Return what is told of own samples (S, M, K) that the estimate was not learnt on."""
        if not self.others:
            return self.fit.without_each(ridge)[None]
        return torch.stack([one @ fit.slope(ridge, spread) for fit, one in self.others])

    def weights(self, away: Tensor, spreads: Tensor) -> Tensor:
        """Return how likely each spread is where a batch is `away` from the mean, by a chi-square's density.

        The largest ridge tells: it looks where classes differ most, and others show how far real ones are, too.
        """
        last = len(self.fit.ridges) - 1
        slope, answers = self.fit.slope(last, 1), _Moments.of(self.answers(last, 1), self.labels)
        blurred = self.noise * slope.square().sum() + _NOTHING
        expected = torch.stack([answers.expected(self.size, float(spread)).sum() for spread in spreads]) + blurred
        off = (away @ slope).square().sum()
        # before a batch is seen, 1 / spread is as likely to be anything between 0 and 1
        return (-(slope.shape[1] - 1) / 2 * (expected.log() + off / expected) - spreads.log()).softmax(0)

    def estimate(self, spread: float, least: Tensor) -> _Estimate:
        """Return the estimate with a ridge of at least `least` that errs least."""
        tried = [i for i, ridge in enumerate(self.fit.ridges) if ridge >= least]
        told = self.labels - self.labels.mean(0)
        missed = [_Moments.of(self.answers(i, spread) - told, self.labels) for i in tried]
        errors = [one.expected(self.size, spread) for one in missed]
        best = min(range(len(tried)), key=lambda i: float(errors[i].sum()))
        return _Estimate(self.fit.slope(tried[best], spread), errors[best])


class _Fit(NamedTuple):
    """Ridge regressions of labels on what samples show."""

    directions: Tensor
    """(r, D) of what is shown, orthonormal; r at most the smaller of D and the number of rows that are fitted"""
    values: Tensor
    """(r,) sums of squares of the rows in these"""
    own: Tensor
    """(R, r) the rows that are of samples"""
    labels: Tensor
    """(R, K) theirs, less those that are expected"""
    apart: Tensor
    """(K, r) rows of classes, which count as often as they have samples"""
    classes: Tensor
    """(K, K) their labels, less those that are expected"""
    ridges: Tensor

    @classmethod
    def of(cls, shown: Tensor, labels: Tensor, size: int, noise: float) -> _Fit:
        """Decompose differences of samples, of stages and of classes, for batches of `size` samples.

        In a mean over them a stage that was not seen yet counts as a whole; stages tell nothing of labels.
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
        """Return the ridge that makes a batch likeliest which is `away` from the mean: what it has beside own samples.

        Of all rows it is a normal one, with as large a variance in each direction as the ridge adds.
        """
        weight = len(self.own) * size
        seen = weight * (self.directions @ away).square()
        rest = (weight * away.square().sum() - seen.sum()).clamp(min=0)
        spare = len(away) - len(seen)
        variances = self.values + self.ridges[:, None]
        fits = (seen / variances + variances.log()).sum(1) + rest / self.ridges + spare * self.ridges.log()
        return self.ridges[fits.argmin()]

    def _solved(self, sums: Tensor, ridge: int, spread: float) -> Tensor:
        """Return sums (r, n) over the products of the rows, those of classes `spread` - 1 times more (Woodbury)."""
        inverse = 1 / (self.values + self.ridges[ridge])[:, None]
        sums = inverse * sums
        if spread == 1:
            return sums
        more, across = spread - 1, inverse * self.apart.T
        both = torch.eye(len(self.apart), dtype=sums.dtype, device=sums.device) + more * self.apart @ across
        repeated: Tensor = more * across @ torch.linalg.solve(both, self.apart @ sums)
        return sums - repeated

    def _turned(self, ridge: int, spread: float) -> Tensor:
        """Return the slope (r, K) in the directions."""
        return self._solved(self.own.T @ self.labels + (spread - 1) * self.apart.T @ self.classes, ridge, spread)

    def slope(self, ridge: int, spread: float) -> Tensor:
        """Return the slope (D, K) of the labels in what is shown."""
        return self.directions.T @ self._turned(ridge, spread)

    def without_each(self, ridge: int) -> Tensor:
        """Return what is foretold of each sample's labels (R, K) from all others, for the least spread.

        A row of a class would tell of all its samples.
        """
        kept = self.own.square() @ (1 / (self.values + self.ridges[ridge]))[:, None]
        told = self.own @ self._turned(ridge, 1)
        return (told - kept * self.labels) / (1 - kept)
