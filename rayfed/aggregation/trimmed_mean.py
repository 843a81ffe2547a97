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
    """Mean of every coordinate without its largest and its smallest values, each client counted once.

    Source: Yin et al. 2018, definition 2, with their share beta as a number of clients.
    """

    malicious: Annotated[int, Field(ge=0)]
    """Clients of a round that may be malicious: as many values are left out at each end. Under half of them."""

    def check(self, clients: int) -> None:
        """Raise `UserError` unless values remain after trimming both ends."""
        if 2 * self.malicious >= clients:
            raise UserError(
                f"trimmed_mean with malicious: {self.malicious} leaves out {2 * self.malicious} values, and a round "
                f"has {clients} clients: lower malicious, or draw more clients"
            )

    def reduce(self, vectors: Tensor, samples: Tensor) -> Tensor:
        """Return the mean of every column without its extreme values."""
        return vectors.sort(dim=0).values[self.malicious : len(vectors) - self.malicious].mean(dim=0)
