"""FedBuff: the server steps on a buffer of updates, each weighted by its staleness.

Source: Nguyen et al. 2022, 'Federated learning with buffered asynchronous aggregation', algorithm 1. The sum of the
weighted updates is divided by the size of the buffer, not by the sum of the weights, so stale updates make the step
shorter.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from pydantic import Field, FiniteFloat

from rayfed.aggregation.asynchronous import AsynchronousRule, Model
from rayfed.aggregation.weighted_sum import WeightedSum, scaled
from rayfed.registry import component
from rayfed.update import Named


@component
class FedBuff(AsynchronousRule):
    """Mean of a buffer of updates in order of arrival, with less weight for stale ones.

    The buffer has `clients_per_round` places. While it fills, `federation.system.concurrency` tasks run at the same
    time, each from the weights of the time when it was assigned. Source: Nguyen et al. 2022, algorithm 1.
    """

    exponent: Annotated[FiniteFloat, Field(ge=0)] = 0.5
    """Weight of an update that is s server steps old: (1 + s)^-exponent. With 0, all updates weigh alike."""

    def aged(self, update: WeightedSum, staleness: int, sent: Named, now: Model) -> WeightedSum:
        """Return the update multiplied by its staleness weight. Buffers (batch-norm statistics) are unchanged."""
        return replace(update, tensors=scaled(update.tensors, float((1 + staleness) ** -self.exponent)))
