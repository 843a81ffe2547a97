"""Dropout before the last linear layer, used as a defence.

Source: Scheliga et al. 2023, "Dropout is NOT All You Need to Prevent Gradient Leakage", which shows that it does not
protect.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from torch import nn

from rayfed.defences.base import Defence, Task
from rayfed.models.head import before_head, untouched
from rayfed.registry import component
from rayfed.update import Named, Update


@component
class Dropout(Defence):
    """Apply dropout to the features before the last linear layer while clients train. Empirical."""

    rate: Annotated[float, Field(gt=0, lt=1)]
    """Probability of setting a feature to zero; the other features are multiplied by 1 / (1 - rate)."""

    def adapt_model(self, model: nn.Module) -> nn.Module:
        """Insert a dropout layer before the last linear layer. Raises `UserError` if the model has no linear layer."""
        return before_head(model, "dropout", lambda _: nn.Dropout(self.rate))

    def transform(self, task: Task, tensors: Named) -> Named:
        """Return the gradient unchanged: the model of the task is the adapted one."""
        return tensors

    def exposed(self, update: Update) -> Named:
        """Return a mask of the layers before the dropout layer. Dropped columns of the last layer's gradient are 0."""
        return untouched(update.tensors, "dropout")
