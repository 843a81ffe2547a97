"""Distance and rank of private layers, and the bounds that follow from them in the theorem on private passports.

Source: Gu et al. 2021, "Federated Deep Learning with Bayesian Privacy", theorem 1, section 5.3 and figures 4 and 5. An
attacker replaces the private layer W of a client by its own, W'. The printed proof of the lower bound has the transpose
of W where it needs the pseudo-inverse; with the pseudo-inverse it holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from statistics import fmean

import torch
from torch import Tensor

_SHARE = 0.99
_COMPARED = 10
"""Maximum number of clients whose pairs are compared, each of which needs a singular value decomposition."""


def distance(weights: Sequence[Tensor]) -> float:
    """Return the mean squared Euclidean distance over all pairs of clients' weights, including equal clients."""
    stacked = torch.stack([w.flatten() for w in weights]).double()
    return 2 * float((stacked - stacked.mean(0)).square().sum(1).mean())


def rank(matrix: Tensor) -> int:
    """Return a matrix's numerical rank: the number of largest singular values that add up to 99 % of the total.

    This is our interpretation of the paper's threshold.
    """
    values = torch.linalg.svdvals(matrix.double())
    missing = values.sum() - values.cumsum(0)
    return 1 + int((missing > (1 - _SHARE) * values.sum()).sum()) if values[0] > 0 else 0


def compute_upper_bound(matrices: Sequence[Tensor]) -> float | None:
    """Return the mean over pairs of clients of ||W^+|| ||W'^+|| ||W - W'||, in spectral norms (equation 19).

    Up to a constant, it bounds the root mean squared error of an attacker that has W' and the layer's normalised
    outputs, if both matrices have the same rank. The pairs are those of the first ten clients. None for fewer than two
    clients, and for a matrix of zeros.
    """
    precise = _comparable(matrices)
    inverses = [_spectral_norm(torch.linalg.pinv(matrix)) for matrix in precise]
    bounds = []
    for i, j in combinations(range(len(precise)), 2):
        bounds.append(inverses[i] * inverses[j] * _spectral_norm(precise[i] - precise[j]))
    return fmean(bounds) if bounds else None


def compute_lower_bound(matrices: Sequence[Tensor]) -> float | None:
    """Return the mean over pairs of clients of 1 / (||W|| + ||W'||), in spectral norms (equations 21 and 22).

    It bounds that error from below if W' has a lower rank, for normalised outputs orthogonal to the columns of W'. The
    pairs are those of the first ten clients. None for fewer than two clients, and for a matrix of zeros.
    """
    norms = [_spectral_norm(matrix) for matrix in _comparable(matrices)]
    bounds = [1 / (first + second) for first, second in combinations(norms, 2)]
    return fmean(bounds) if bounds else None


def _spectral_norm(matrix: Tensor) -> float:
    return float(torch.linalg.matrix_norm(matrix, 2))


def _comparable(matrices: Sequence[Tensor]) -> list[Tensor]:
    """Return the first clients' matrices in double precision, or none if one is zero or not finite."""
    precise = [matrix.double() for matrix in matrices[:_COMPARED]]
    return precise if all(matrix.any() and matrix.isfinite().all() for matrix in precise) else []
