"""Asynchronous rules: the server steps on updates as they arrive, each computed from possibly stale weights.

They run only in virtual time (`federation.system`): the clients' devices determine how stale an update is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from rayfed.aggregation.weighted_sum import WeightedSum, WeightedSumRule, scaled
from rayfed.update import Named, Update


@dataclass(frozen=True)
class Model:
    """Weights and buffers of a global model."""

    weights: Named
    buffers: Named


class AsynchronousRule(WeightedSumRule):
    """Base of the rules that make one step per `clients_per_round` updates, in order of arrival."""

    asynchronous: ClassVar[bool] = True
    mixes: ClassVar[bool] = False
    """Whether the server mixes models, so that `aged` needs the weights that the client received."""

    def weight(self, update: Update) -> int:
        """Return 1, because all clients have the same weight."""
        return 1

    def heaviest(self, clients: int, samples: int) -> int:
        """Return the largest total weight of a round: the number of clients."""
        return clients

    def aged(self, update: WeightedSum, staleness: int, sent: Named, now: Model) -> WeightedSum:
        """Return an arriving update in the form in which the server adds it, weighted by the update's staleness.

        `staleness` is the number of server steps since the client received the weights `sent`, which are empty unless
        the rule `mixes`. `now` is the model from which the step begins.
        """
        raise NotImplementedError

    def combine(self, total: WeightedSum, generator: torch.Generator) -> tuple[Named, Named]:
        """Return the sum of the weighted updates divided by the number of updates, and the mean of the buffers."""
        return scaled(total.tensors, 1 / total.weight), scaled(total.buffers, 1 / total.weight)
