"""Krum and multi-Krum (Blanchard 2017, 'Machine learning with adversaries')."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from rayfed.aggregation.gathering import Gathering
from rayfed.errors import UserError
from rayfed.registry import component


@component
class Krum(Gathering):
    """Update with the smallest distance to its n - f - 2 nearest updates, or the mean of several such (multi-Krum).

    Source: Blanchard et al. 2017. All clients weigh alike. The score is the sum of the squared Euclidean distances.
    """

    malicious: Annotated[int, Field(ge=0)]
    """Maximum number f of malicious clients per round. A round needs at least 2 f + 3 clients."""
    keep: Annotated[int, Field(ge=1)] = 1
    """Number of updates with the best scores to average: 1 is Krum, up to n - f is multi-Krum."""

    def check(self, clients: int) -> None:
        """Raise `UserError` if a round has too few clients, or if `keep` exceeds the number of honest clients."""
        if clients < 2 * self.malicious + 3:
            raise UserError(
                f"krum with malicious: {self.malicious} needs at least {2 * self.malicious + 3} clients per round, but "
                f"a round has {clients}: lower malicious, or increase clients_per_round"
            )
        if self.keep > clients - self.malicious:
            raise UserError(
                f"krum with keep: {self.keep} exceeds the number of honest clients, {clients - self.malicious} of "
                f"{clients} with malicious: {self.malicious}: lower keep"
            )

    def reduce(self, vectors: Tensor, samples: Tensor) -> Tensor:
        """Return the mean (d,) of the clients' vectors (n, d) with the lowest Krum scores."""
        # by differences, because outliers cause large rounding errors in a matrix product
        squared = torch.cdist(vectors, vectors, compute_mode="donot_use_mm_for_euclid_dist").square()
        neighbours = len(vectors) - self.malicious - 2
        scores = squared.sort(dim=1).values[:, 1 : neighbours + 1].sum(dim=1)  # the nearest is the row itself
        return vectors[scores.argsort(stable=True)[: self.keep]].mean(dim=0)
