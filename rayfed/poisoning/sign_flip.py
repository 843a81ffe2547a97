"""Sign flipping (Li 2019, 'RSA: Byzantine-robust stochastic aggregation methods')."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from pydantic import Field

from rayfed.aggregation.weighted_sum import scaled
from rayfed.poisoning.base import Insight, Poisoning
from rayfed.registry import component
from rayfed.update import Update


@component
class SignFlip(Poisoning):
    """Send the update multiplied by minus `factor`, so that the server ascends the loss.

    Source: Li et al. 2019, 'RSA: Byzantine-robust stochastic aggregation methods'.
    """

    factor: Annotated[float, Field(gt=0)] = 1.0
    """Factor on the honest update."""

    def poison_update(self, update: Update, insight: Insight) -> Update:
        """Return the update multiplied by minus `factor`."""
        return replace(update, tensors=scaled(update.tensors, -self.factor))
