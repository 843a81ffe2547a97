"""Base of the rules that need only the weighted sum of the updates, and therefore work over any secure channel."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from rayfed.aggregation.base import Aggregation
from rayfed.update import Named, Update


@dataclass(frozen=True)
class WeightedSum:
    """Weighted sum of the updates and of the buffers of some clients."""

    tensors: Named
    buffers: Named
    weight: float


class WeightedSumRule(Aggregation[Update, WeightedSum, WeightedSum]):
    """Base of the rules that weigh each client independently and compute a step from the sum (`combine`)."""

    def weight(self, update: Update) -> int:
        """Return the weight of a client's update in the sum, at least 1."""
        raise NotImplementedError

    def heaviest(self, clients: int, samples: int) -> int:
        """Return the largest possible total weight of `clients` clients with `samples` samples in total."""
        raise NotImplementedError

    @property
    def step(self) -> float | None:
        """Return the step of which all values are multiples, if channels must keep the values exact; else None."""
        return None

    def buffers(self, update: Update) -> Named:
        """Return a client's buffers in the form in which the server adds them."""
        return update.buffers

    def partial(self, sent: Iterable[Update]) -> WeightedSum:
        """Return the weighted sum of one cohort's updates, added in the order of the clients."""
        total: WeightedSum | None = None
        for update in sent:
            weight = float(self.weight(update))
            term = WeightedSum(scaled(update.tensors, weight), scaled(self.buffers(update), weight), weight)
            if total is None:
                total = term
                continue
            for sums, terms in ((total.tensors, term.tensors), (total.buffers, term.buffers)):
                for name, t in sums.items():
                    t.add_(terms[name])
            total = replace(total, weight=total.weight + weight)
            del term  # frees memory while the next client trains
        if total is None:
            raise ValueError("found a cohort without clients; expected at least one client")
        return total

    def merge(self, left: WeightedSum, right: WeightedSum) -> WeightedSum:
        """Add the weighted sums of two groups of cohorts."""
        return WeightedSum(
            _added(left.tensors, right.tensors), _added(left.buffers, right.buffers), left.weight + right.weight
        )


def scaled(tensors: Named, factor: float) -> Named:
    """Multiply every tensor by a factor, and return the products by name."""
    return {name: t * factor for name, t in tensors.items()}


def _added(left: Named, right: Named) -> Named:
    return {name: torch.add(t, right[name]) for name, t in left.items()}
