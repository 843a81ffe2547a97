"""Partition into consecutive blocks, for data sets that are sorted by owner."""

from __future__ import annotations

import numpy as np

from rayfed.data.partitions.base import require_samples
from rayfed.registry import component


@component
class Blocks:
    """One block of consecutive samples per client, with equal numbers of samples (to within one)."""

    def split(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        """Return the indices of each client's samples (see `Partition.split`)."""
        require_samples(len(labels), clients, 1, "one per client")
        return [rng.permutation(block) for block in np.array_split(np.arange(len(labels)), clients)]
