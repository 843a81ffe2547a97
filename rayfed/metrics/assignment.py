"""Distances of reconstructions from samples, and their assignment: a batch's gradient does not know an order."""

from __future__ import annotations

import torch
from torch import Tensor

from rayfed.samples import Pixels, Records, SampleSpec, Tokens

_IMAGE = Pixels(1, 1, 1)


def distances(true: Tensor, reconstructed: Tensor, sample: SampleSpec = _IMAGE) -> Tensor:
    """Return how far reconstructions (M, *shape) are from samples (N, *shape), (N, M) float64.

    Of images it is the root of the summed squared errors, of texts the number of tokens that differ, and of records the
    number of columns that do; among equally many those are nearer whose squared error is smaller.
    """
    known, found = true.double().flatten(1), reconstructed.double().flatten(1)
    if isinstance(sample, Tokens):
        return torch.cdist(known, found, p=0)
    # Not by matrix product, whose rounding error is of the order of a good reconstruction's distance.
    apart = torch.cdist(known, found, compute_mode="donot_use_mm_for_euclid_dist")
    if not isinstance(sample, Records):
        return apart
    columns = zip(sample.columns, sample.split(true), sample.split(reconstructed), strict=True)
    wrong = sum((~column.near(column.values(a)[:, None], column.values(b)[None])).double() for column, a, b in columns)
    return wrong + apart / (1 + apart)


def assign(true: Tensor, reconstructed: Tensor, sample: SampleSpec = _IMAGE) -> Tensor:
    """Return the permutation (N,) int64 for which `reconstructed[p]` lines up with `true`, both (N, *shape).

    It minimises the sum of the pairs' `distances`: by the triangle inequality no exact copy is then given to another
    image, as squares would do. A reconstruction that is not finite comes last.
    """
    usable = reconstructed.flatten(1).isfinite().all(1)
    cost = distances(true, reconstructed.nan_to_num(0), sample)
    cost[:, ~usable] = cost[:, usable].amax() + 1 if usable.any() else 0.0
    return matched(cost).to(reconstructed.device)


def matched(cost: Tensor) -> Tensor:
    """Return for each row of costs (N, M), N <= M, a column of its own, (N,) int64, so that their sum is least."""
    from scipy.optimize import linear_sum_assignment  # half a second of imports, in processes that may never score

    _, columns = linear_sum_assignment(cost.cpu().numpy())
    return torch.from_numpy(columns)
