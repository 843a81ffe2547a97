"""Quantity skew: clients have different numbers of samples from the same distribution.

Li, Diao, Chen and He, "Federated Learning on Non-IID Data Silos", arXiv:2102.02079, section IV-C.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import Field

from rayfed.data.partitions.base import require_samples
from rayfed.registry import component


@component
class Quantity:
    """Unequal shares: one sample per client plus a share ~ Dir(alpha, ..., alpha), independent of the labels."""

    alpha: Annotated[float, Field(gt=0)]
    """Concentration: near 0, one client has nearly all samples; above about 100, all have about the same number."""

    def split(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        """Return the indices of each client's samples (see `Partition.split`)."""
        require_samples(len(labels), clients, 1, "one per client")
        order = rng.permutation(len(labels))
        shares = rng.dirichlet(np.full(clients, self.alpha))
        sizes = 1 + rng.multinomial(len(labels) - clients, shares)
        return np.split(order, np.cumsum(sizes)[:-1])
