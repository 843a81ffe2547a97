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
    """Sum of the norm-bounded updates of some clients, with the list of the clients' buffers."""

    updates: WeightedSum
    buffers: list[Received]


@component
class NormBounding(Aggregation[Update, Bounded, Bounded]):
    """Mean of the updates, each scaled down if its Euclidean norm exceeds a bound.

    Source: Sun et al. 2019, without their noise. Updates are scaled at the clients and added as they arrive. For float
    buffers a norm has no meaning, so they are aggregated by the coordinate-wise median.
    """

    norm: Annotated[float, Field(gt=0)]
    """Maximum Euclidean norm of an update, over all of its tensors. Longer updates are scaled down to it."""
    weights: Literal["samples", "uniform"] = "samples"
    """Weight of a client: its number of samples, or 1. With `uniform`, false sample counts have no effect."""

    def partial(self, sent: Iterable[Update]) -> Bounded:
        """Return the weighted sum of one cohort's bounded updates, and the list of the clients' buffers."""
        buffers: list[Received] = []
        return Bounded(self._mean.partial(self._bounded(sent, buffers)), buffers)

    def merge(self, left: Bounded, right: Bounded) -> Bounded:
        """Add two sums of bounded updates, and concatenate their lists of buffers."""
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
