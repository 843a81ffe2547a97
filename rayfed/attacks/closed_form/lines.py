"""Find the scale of samples that are known only up to scale: search lines for the best-fitting points."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_SLACK = 0.01
"""Distance by which rounding and noise may move an entry out of [0, 1]."""
_POINTS = 33
_ZOOMS = 8


def best_points(origins: Tensor, directions: Tensor, miss: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Return the point with the smallest `miss` on each line, within [0, 1], and the points' scales (N,).

    `origins` and `directions` are (N, *shape). `miss(points, scales)` returns (N,) for one point per line. The search
    evaluates evenly spaced points and repeats this around the best one.
    """
    low, high = _inside(origins, directions)
    best = (low + high) / 2
    for _ in range(_ZOOMS):
        scales = low + (high - low) * torch.linspace(0, 1, _POINTS).to(low)[:, None]
        misses = torch.stack([miss(_at(origins, directions, scale), scale) for scale in scales])
        best = scales.gather(0, misses.nan_to_num(torch.inf).argmin(0)[None])[0]
        apart = (high - low) / (_POINTS - 1)
        low, high = torch.maximum(best - apart, low), torch.minimum(best + apart, high)
    return _at(origins, directions, best), best


def _at(origins: Tensor, directions: Tensor, scales: Tensor) -> Tensor:
    return origins + scales.view(-1, *[1] * (origins.ndim - 1)) * directions


def _inside(origins: Tensor, directions: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scales (N,) between which all entries are in [0, 1]; if there are none, the medians over entries."""
    ends = torch.stack([(-_SLACK - origins) / directions, (1 + _SLACK - origins) / directions]).flatten(2)
    ends = ends.where(directions.flatten(1) != 0, torch.tensor([-torch.inf, torch.inf]).to(ends)[:, None, None])
    lower, upper = ends.amin(0), ends.amax(0)
    low, high = lower.amax(1), upper.amin(1)
    empty = low >= high
    finite = [end.where(end.isfinite(), torch.nan).nanmedian(1).values for end in (lower, upper)]
    return torch.where(empty, finite[0], low), torch.where(empty, finite[1], high)
