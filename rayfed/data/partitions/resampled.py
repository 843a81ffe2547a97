"""Independent draws from all samples, for more clients than samples; clients may share samples."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import Field

from rayfed.data.partitions.base import Parts
from rayfed.errors import UserError
from rayfed.registry import component
from rayfed.subsets import subsets


@component
class Resampled:
    """Draw each client's samples independently; clients may share samples.

    For federations of many clients. Each client's copy of a sample counts as a record of its own: a privacy guarantee
    for one sample speaks of one client's copy.
    """

    samples: Annotated[int, Field(ge=1)]
    """Distinct samples of one client."""

    def split(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> Parts:
        """Return the clients' indices, see `Partition.split`; several clients may get the same sample."""
        if len(labels) < self.samples:
            raise UserError(
                f"partition resampled: a client cannot draw {self.samples} different samples of {len(labels)}; "
                f"lower partition.samples"
            )
        indices = rng.permuted(subsets(rng, clients, len(labels), self.samples), axis=1).reshape(-1)
        return Parts(indices, np.arange(1, clients + 1) * self.samples)
