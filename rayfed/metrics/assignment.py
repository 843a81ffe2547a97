"""Match reconstructions to true samples by distance, because a gradient does not contain the order of the batch."""

from __future__ import annotations

import torch
from torch import Tensor

from rayfed.samples import Pixels, Records, SampleSpec, Tokens

_IMAGE = Pixels(1, 1, 1)


def distances(true: Tensor, reconstructed: Tensor, sample: SampleSpec = _IMAGE) -> Tensor:
    """Return the distances of reconstructions (M, *shape) from samples (N, *shape), (N, M) float64.

    For images, the Euclidean distance. For texts and records, the number of tokens or columns that differ, with ties
    broken by the squared error.
    """
    known, found = true.double().flatten(1), reconstructed.double().flatten(1)
    if isinstance(sample, Tokens):
        return torch.cdist(known, found, p=0)
    # Not as a matrix product, whose rounding error is about as large as the distance of a good reconstruction.
    apart = torch.cdist(known, found, compute_mode="donot_use_mm_for_euclid_dist")
    if not isinstance(sample, Records):
        return apart
    columns = zip(sample.columns, sample.split(true), sample.split(reconstructed), strict=True)
    wrong = sum((~column.near(column.values(a)[:, None], column.values(b)[None])).double() for column, a, b in columns)
    return wrong + apart / (1 + apart)


def assign(true: Tensor, reconstructed: Tensor, sample: SampleSpec = _IMAGE) -> Tensor:
    """Return the permutation p (N,) int64 that matches `reconstructed[p]` to `true`, both (N, *shape).

    It minimises the sum of `distances`. By the triangle inequality, an exact copy is then matched to its image, which
    squared distances would not guarantee. Reconstructions that are not finite are matched last.
    """
    usable = reconstructed.flatten(1).isfinite().all(1)
    cost = distances(true, reconstructed.nan_to_num(0), sample)
    cost[:, ~usable] = cost[:, usable].amax() + 1 if usable.any() else 0.0
    return matched(cost).to(reconstructed.device)


def matched(cost: Tensor) -> Tensor:
    """Return a distinct column for each row of costs (N, M), N <= M, with minimum total cost, (N,) int64."""
    from scipy.optimize import linear_sum_assignment  # takes 0.5 s to import, and some processes never score

    _, columns = linear_sum_assignment(cost.cpu().numpy())
    return torch.from_numpy(columns)
