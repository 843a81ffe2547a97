"""Distance and rank of private layers, which are assumptions of the theorem on private passports.

Source: Gu et al. 2021, "Federated Deep Learning with Bayesian Privacy", section 5.3 and figures 4 and 5.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_SHARE = 0.99


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
