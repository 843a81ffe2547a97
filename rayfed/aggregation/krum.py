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
    """Update that lies closest to its n - f - 2 nearest neighbours, or the mean of several such (multi-Krum).

    Source: Blanchard et al. 2017. Every client counts once; the score is the sum of the squared Euclidean distances.
    """

    malicious: Annotated[int, Field(ge=0)]
    """Clients of a round that may be malicious, f: a round needs 2 f + 3 clients or more."""
    keep: Annotated[int, Field(ge=1)] = 1
    """Updates with the best scores whose mean is taken: 1 is Krum, up to n - f is multi-Krum."""

    def check(self, clients: int) -> None:
        """Raise `UserError` for fewer clients than the proof asks for, or fewer honest ones than are kept."""
        if clients < 2 * self.malicious + 3:
            raise UserError(
                f"krum with malicious: {self.malicious} needs {2 * self.malicious + 3} clients a round or more, and a "
                f"round has {clients}: lower malicious, or draw more clients"
            )
        if self.keep > clients - self.malicious:
            raise UserError(
                f"krum with keep: {self.keep} takes more than the {clients - self.malicious} of {clients} clients that "
                f"are honest with malicious: {self.malicious}: lower keep"
            )

    def reduce(self, vectors: Tensor, samples: Tensor) -> Tensor:
        """Return the mean of the rows with the lowest scores."""
        # by differences: outliers would drown the distances of the others in the rounding of a matrix product
        squared = torch.cdist(vectors, vectors, compute_mode="donot_use_mm_for_euclid_dist").square()
        neighbours = len(vectors) - self.malicious - 2
        scores = squared.sort(dim=1).values[:, 1 : neighbours + 1].sum(dim=1)  # the nearest is the row itself
        return vectors[scores.argsort(stable=True)[: self.keep]].mean(dim=0)
