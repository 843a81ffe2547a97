"""Label shards: the pathological non-IID setting of McMahan et al., arXiv:1602.05629, section 3."""

from __future__ import annotations

from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field

from rayfed.data.partitions.base import require_samples
from rayfed.registry import component


@component
class Shards:
    """Samples sorted by label and cut into equal shards, which are assigned to clients at random."""

    by_label: ClassVar[bool] = True

    shards_per_client: Annotated[int, Field(ge=1)] = 2
    """Number of shards per client, which is roughly its number of classes."""

    def split(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        """Return the indices of each client's samples (see `Partition.split`).

        Shards are equal to within one sample.
        """
        each = self.shards_per_client
        require_samples(len(labels), clients, each, f"one for each of {each} shards per client")
        order = rng.permutation(len(labels))
        by_label = order[np.argsort(labels[order], kind="stable")]
        shards = np.array_split(by_label, clients * each)
        dealt = rng.permutation(len(shards)).reshape(clients, each)
        return [rng.permutation(np.concatenate([shards[i] for i in hand])) for hand in dealt]
