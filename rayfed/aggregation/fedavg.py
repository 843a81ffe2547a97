"""FedAvg: the mean of the updates (McMahan 2017, 'Communication-efficient learning of deep networks', algorithm 1)."""

from __future__ import annotations

from typing import Literal

import torch

from rayfed.aggregation.weighted_sum import WeightedSum, WeightedSumRule, scaled
from rayfed.registry import component
from rayfed.update import Named, Update


@component
class FedAvg(WeightedSumRule):
    """Mean of the updates, each weighted by the client's number of samples.

    Source: McMahan et al. 2017, algorithm 1; with fedsgd, the same mean of gradients.
    """

    weights: Literal["samples", "uniform"] = "samples"
    """Weight of a client: its number of samples, or 1."""

    def weight(self, update: Update) -> int:
        """Return the weight of a client's update: the client's number of samples, or 1 for uniform weights."""
        return update.samples if self.weights == "samples" else 1

    def heaviest(self, clients: int, samples: int) -> int:
        """Return the largest total weight of a round: the number of samples, or the number of clients."""
        return samples if self.weights == "samples" else clients

    def combine(self, total: WeightedSum, generator: torch.Generator) -> tuple[Named, Named]:
        """Return the weighted mean of the updates, and the weighted mean of the buffers."""
        return scaled(total.tensors, 1 / total.weight), scaled(total.buffers, 1 / total.weight)
