"""Norm bounding (Sun 2019, 'Can you really backdoor federated learning?')."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from pydantic import Field

from rayfed import gradients
from rayfed.aggregation.base import Aggregation
from rayfed.aggregation.fedavg import FedAvg
from rayfed.aggregation.gathering import Received
from rayfed.aggregation.median import Median
from rayfed.aggregation.weighted_sum import WeightedSum, scaled
from rayfed.registry import component
from rayfed.update import Named, Update


@dataclass(frozen=True)
class Bounded:
    """Sum of some clients' bounded updates, with the list of their buffers."""

    updates: WeightedSum
    buffers: list[Received]


@component
class NormBounding(Aggregation[Update, Bounded, Bounded]):
    """Mean of the updates, each scaled down to a Euclidean norm if it is longer.

    Source: Sun et al. 2019, without their noise. Updates are shortened where they are made and streamed as a sum. Float
    buffers are values and have no norm that says anything: theirs is the coordinate-wise median.
    """

    norm: Annotated[float, Field(gt=0)]
    """Norm of the longest update that counts in full, over all of its tensors."""
    weights: Literal["samples", "uniform"] = "samples"
    """Weigh a client by its samples, or all alike: who lies about its samples gains nothing."""

    def partial(self, sent: Iterable[Update]) -> Bounded:
        """Return the weighted sum of one cohort's bounded updates, and its buffers."""
        buffers: list[Received] = []
        return Bounded(self._mean.partial(self._bounded(sent, buffers)), buffers)

    def merge(self, left: Bounded, right: Bounded) -> Bounded:
        """Add two sums, and concatenate the buffers."""
        return Bounded(self._mean.merge(left.updates, right.updates), left.buffers + right.buffers)

    def combine(self, total: Bounded, generator: torch.Generator) -> tuple[Named, Named]:
        """Return the weighted mean of the updates, and the median of the buffers."""
        step, _ = self._mean.combine(total.updates, generator)
        _, buffers = Median().combine(total.buffers, generator)
        return step, buffers

    @property
    def _mean(self) -> FedAvg:
        return FedAvg(weights=self.weights)

    def _bounded(self, updates: Iterable[Update], buffers: list[Received]) -> Iterable[Update]:
        for update in updates:
            buffers.append(Received({}, update.buffers, update.samples))
            factor = self.norm / max(float(gradients.norm(update.tensors)), self.norm)
            yield replace(update, tensors=scaled(update.tensors, factor), buffers={})
