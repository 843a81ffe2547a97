"""Independent random subsets of all samples, for more clients than samples; clients may share samples."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import Field

from rayfed.core.subsets import subsets
from rayfed.data.partitions.base import Parts
from rayfed.errors import UserError
from rayfed.registry import component


@component
class Resampled:
    """An independent random subset of the samples for each client; clients may share samples.

    For federations with many clients. Each client's copy of a sample counts as a separate record, so a privacy
    guarantee per sample covers one client's copy only.
    """

    samples: Annotated[int, Field(ge=1)]
    """Number of distinct samples per client."""

    def split(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> Parts:
        """Return the indices of each client's samples, which other clients may have, too (see `Partition.split`)."""
        if len(labels) < self.samples:
            raise UserError(
                f"partition resampled: a client cannot have {self.samples} different samples out of {len(labels)}; "
                f"lower partition.samples"
            )
        indices = rng.permuted(subsets(rng, clients, len(labels), self.samples), axis=1).reshape(-1)
        return Parts(indices, np.arange(1, clients + 1) * self.samples)
