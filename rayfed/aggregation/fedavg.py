"""FedAvg: the mean of the updates (McMahan 2017, 'Communication-efficient learning of deep networks', algorithm 1)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

import torch

from rayfed.aggregation.base import Aggregation
from rayfed.registry import component
from rayfed.update import Named, Update


@dataclass(frozen=True)
class WeightedSum:
    """Some clients' updates, weighted and summed."""

    tensors: Named
    buffers: Named
    weight: float


@component
class FedAvg(Aggregation):
    """Mean of the updates, each weighted by its client's samples.

    Source: McMahan et al. 2017, algorithm 1; under fedsgd the same mean of gradients.
    """

    weights: Literal["samples", "uniform"] = "samples"
    """Weigh a client by its samples, or every client alike."""

    def weight(self, update: Update) -> int:
        """A client's weight in the mean."""
        return update.samples if self.weights == "samples" else 1

    def buffers(self, update: Update) -> Named:
        """A client's buffers as they are added."""
        return update.buffers

    def partial(self, updates: Iterable[Update]) -> WeightedSum:
        """The weighted sum over one cohort, in the order of its clients; added up in place, for it may be large."""
        total: WeightedSum | None = None
        for update in updates:
            weight = float(self.weight(update))
            term = WeightedSum(scaled(update.tensors, weight), scaled(self.buffers(update), weight), weight)
            if total is None:
                total = term
                continue
            for sums, terms in ((total.tensors, term.tensors), (total.buffers, term.buffers)):
                for name, t in sums.items():
                    t.add_(terms[name])
            total = replace(total, weight=total.weight + weight)
            del term  # the next client trains meanwhile
        if total is None:
            raise ValueError("a cohort has at least one client")
        return total

    def merge(self, left: WeightedSum, right: WeightedSum) -> WeightedSum:
        """The sum of two sums."""
        return WeightedSum(
            _added(left.tensors, right.tensors), _added(left.buffers, right.buffers), left.weight + right.weight
        )

    def combine(self, total: WeightedSum, generator: torch.Generator) -> tuple[Named, Named]:
        """The weighted mean."""
        return scaled(total.tensors, 1 / total.weight), scaled(total.buffers, 1 / total.weight)


def scaled(tensors: Named, factor: float) -> Named:
    """Every tensor times the same."""
    return {name: t * factor for name, t in tensors.items()}


def _added(left: Named, right: Named) -> Named:
    return {name: torch.add(t, right[name]) for name, t in left.items()}
