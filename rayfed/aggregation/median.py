"""Coordinate-wise median (Yin 2018, 'Byzantine-robust distributed learning', definition 1)."""

from __future__ import annotations

from torch import Tensor

from rayfed.aggregation.gathering import Gathering
from rayfed.registry import component


@component
class Median(Gathering):
    """Median of every coordinate over a round's clients, each with equal weight.

    Source: Yin et al. 2018, definition 1. The server holds every update, so its memory grows with the number of clients
    per round. With an even number of clients, the median is the mean of the two middle values.
    """

    def reduce(self, vectors: Tensor, samples: Tensor) -> Tensor:
        """Return the coordinate-wise median (d,) of the clients' vectors (n, d)."""
        return middle(vectors)


def middle(vectors: Tensor) -> Tensor:
    """Return the median of every column of a tensor (n, d), as a tensor (d,)."""
    ordered = vectors.sort(dim=0).values  # not torch.quantile, which refuses large tensors
    n = len(ordered)
    return (ordered[(n - 1) // 2] + ordered[n // 2]) / 2
