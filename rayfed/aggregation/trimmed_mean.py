"""Coordinate-wise trimmed mean (Yin 2018, 'Byzantine-robust distributed learning', definition 2)."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from torch import Tensor

from rayfed.aggregation.gathering import Gathering
from rayfed.errors import UserError
from rayfed.registry import component


@component
class TrimmedMean(Gathering):
    """Mean of every coordinate without its largest and smallest values, each client with equal weight.

    Source: Yin et al. 2018, definition 2, with the share beta given as a number of clients.
    """

    malicious: Annotated[int, Field(ge=0)]
    """Maximum number of malicious clients per round: this many values are removed at each end. Must be less than
    half."""

    def check(self, clients: int) -> None:
        """Raise `UserError` if no values remain after both ends have been trimmed."""
        if 2 * self.malicious >= clients:
            raise UserError(
                f"trimmed_mean with malicious: {self.malicious} removes {2 * self.malicious} values, but a round has "
                f"only {clients} clients: lower malicious, or increase clients_per_round"
            )

    def reduce(self, vectors: Tensor, samples: Tensor) -> Tensor:
        """Return the mean (d,) of the clients' vectors (n, d), without the extreme values of each coordinate."""
        return vectors.sort(dim=0).values[self.malicious : len(vectors) - self.malicious].mean(dim=0)
