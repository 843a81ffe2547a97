"""Uniformly random partition: the IID setting of McMahan et al., arXiv:1602.05629, section 3."""

from __future__ import annotations

import numpy as np

from rayfed.data.partitions.base import require_samples
from rayfed.registry import component


@component
class IID:
    """Equal shares of the samples (to within one sample) for all clients, independent of the labels."""

    def split(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        """Return the indices of each client's samples (see `Partition.split`)."""
        require_samples(len(labels), clients, 1, "one per client")
        return np.array_split(rng.permutation(len(labels)), clients)
