"""Consecutive blocks, for data sets whose order says whose a sample is."""

from __future__ import annotations

import numpy as np

from rayfed.data.partitions.base import require
from rayfed.registry import component


@component
class Blocks:
    """Blocks of the samples in the data set's own order, equal to within one sample, one for each client."""

    def split(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        """Return the clients' indices, see `Partition.split`."""
        require(len(labels), clients, 1, "one for each")
        return [rng.permutation(block) for block in np.array_split(np.arange(len(labels)), clients)]
