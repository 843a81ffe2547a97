"""Scaled updates (Bagdasaryan 2020, 'How to backdoor federated learning': model replacement)."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from pydantic import Field

from rayfed.aggregation.weighted_sum import scaled
from rayfed.poisoning.base import Insight, Poisoning
from rayfed.registry import component
from rayfed.update import Update


@component
class ScaledUpdate(Poisoning):
    """Send the update scaled up so that the mean becomes the client's model.

    Source: Bagdasaryan et al. 2020, equation 3. Without a backdoor, it only outweighs the other clients. `backdoor`
    also has a `scale`.
    """

    factor: Annotated[float, Field(gt=0)] | None = None
    """Factor on the honest update. Default: the number of clients in the round, by which the mean divides it."""

    def poison_update(self, update: Update, insight: Insight) -> Update:
        """Return the update multiplied by `factor`."""
        return replace(update, tensors=scaled(update.tensors, self.factor or float(insight.clients)))
