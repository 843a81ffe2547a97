"""Dropout before the head, used as a defence.

Source: Scheliga et al. 2023, "Dropout is NOT All You Need to Prevent Gradient Leakage", which shows that it is none.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from torch import nn

from rayfed.defences.base import Defence
from rayfed.models.head import before_head, untouched
from rayfed.registry import component
from rayfed.update import Named, Update


@component
class Dropout(Defence):
    """Dropout of the features before the last linear layer, while clients train. Empirical."""

    rate: Annotated[float, Field(gt=0, lt=1)]
    """Probability with which a feature is left out; the others grow to 1 / (1 - rate)."""

    def adapt_model(self, model: nn.Module) -> nn.Module:
        """Put the dropout into the model; raises `UserError` for one without a linear layer."""
        return before_head(model, "dropout", lambda _: nn.Dropout(self.rate))

    def exposed(self, update: Update) -> Named:
        """Return a mask of the layers before the dropout; dropped columns of the head's gradient are 0."""
        return untouched(update.tensors, "dropout")
