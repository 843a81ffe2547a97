"""Dropout before the last linear layer, used as a defence.

Source: Scheliga et al. 2023, "Dropout is NOT All You Need to Prevent Gradient Leakage", which shows that it does not
protect.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from torch import nn

from rayfed.defences.base import Defence, Task
from rayfed.models.copying import copy_model
from rayfed.models.head import KnownDropout, before_head, path_before_head, untouched
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

    def reveal_randomness(self, model: nn.Module, weights: Named, update: Named) -> nn.Module:
        """Return a model that drops the features whose columns of the head's gradient are zero."""
        revealed = copy_model(model)
        path = path_before_head(revealed, "dropout")
        head = path.rpartition(".")[0] + ".head.weight"
        kept = (update[head] != 0).any(0)
        revealed.set_submodule(path, KnownDropout(kept / (1 - self.rate)))
        return revealed

    def exposed(self, update: Update) -> Named:
        """Return a mask of the layers before the dropout layer. Dropped columns of the last layer's gradient are 0."""
        return untouched(update.tensors, "dropout")
