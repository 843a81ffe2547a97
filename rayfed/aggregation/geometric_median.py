"""Geometric median by the smoothed Weiszfeld algorithm (Pillutla 2022, 'Robust aggregation for federated learning')."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from rayfed.aggregation.gathering import Gathering
from rayfed.aggregation.median import middle
from rayfed.registry import component

_TOLERANCE = 1e-6
"""Share of the median distance to the updates below which a step is the last."""


@component
class GeometricMedian(Gathering):
    """Point with the smallest sum of distances to the updates, weighted by samples.

    Robust as long as malicious clients hold less than half of the total weight. Source: Pillutla et al. 2022 (RFA),
    algorithm 2, started at the coordinate-wise median because outliers influence the mean.
    """

    weights: Literal["samples", "uniform"] = "samples"
    """Weight of a client: its number of samples, as in the paper, or 1. With `uniform`, false sample counts have no
    effect."""
    smoothing: Annotated[float, Field(gt=0)] = 1e-6
    """Minimum distance used as a divisor (nu in the paper)."""
    iterations: Annotated[int, Field(ge=1)] = 100
    """Maximum number of steps. The algorithm stops earlier when steps are short."""

    def reduce(self, vectors: Tensor, samples: Tensor) -> Tensor:
        """Return the geometric median (d,) of the clients' vectors (n, d), by Weiszfeld's fixed-point iteration."""
        shares = samples if self.weights == "samples" else torch.ones_like(samples)
        centre = middle(vectors)
        for _ in range(self.iterations):
            distances = torch.linalg.vector_norm(vectors - centre, dim=1)
            weights = shares / distances.clamp(min=self.smoothing)
            before, centre = centre, weights @ vectors / weights.sum()
            if torch.linalg.vector_norm(centre - before) <= _TOLERANCE * distances.median():
                break
        return centre
