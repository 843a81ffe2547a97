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
    """Mean of a buffer of updates in the order in which they arrive, stale ones with less weight.

    The buffer has `clients_per_round` places. While it fills, `federation.system.concurrency` tasks are in flight, each
    on the weights of when it was given out. Source: Nguyen et al. 2022, algorithm 1.
    """

    exponent: Annotated[FiniteFloat, Field(ge=0)] = 0.5
    """An update that is s steps of the server old has the weight (1 + s)^-exponent; 0: all weigh alike."""

    def aged(self, update: WeightedSum, staleness: int, sent: Named, now: Model) -> WeightedSum:
        """Return the update times its weight; buffers (batch-norm statistics) are averaged as they are."""
        return replace(update, tensors=scaled(update.tensors, float((1 + staleness) ** -self.exponent)))
