"""PRECODE: a variational bottleneck before the last linear layer, which randomises the gradient.

Sources: Scheliga et al. 2022, "PRECODE - A Generic Model Extension to Prevent Deep Gradient Leakage"; Scheliga et al.
2022, "Combining Variational Modeling with Partial Gradient Perturbation to Prevent Deep Gradient Leakage", for the
attack that ignores the randomised gradients.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from torch import nn

from rayfed.defences.base import Defence, Task
from rayfed.models.bottleneck import VariationalBottleneck
from rayfed.models.head import before_head, untouched
from rayfed.registry import component
from rayfed.update import Named, Update


@component
class Precode(Defence):
    """Insert a variational bottleneck before the last linear layer; add `beta` times its KL divergence to the loss.

    Empirical. The bottleneck is part of the architecture: it is trained with the model, and attackers know it.
    """

    bottleneck: Annotated[int, Field(ge=1)] = 256
    """Size of the random code of the features."""
    beta: Annotated[float, Field(ge=0)] = 1e-3
    """Weight of the KL divergence from N(0, 1) in the loss."""

    def adapt_model(self, model: nn.Module) -> nn.Module:
        """Insert a variational bottleneck before the last linear layer. Raises `UserError` if there is none."""
        return before_head(
            model, "precode", lambda features: VariationalBottleneck(features, self.bottleneck, self.beta)
        )

    def transform(self, task: Task, tensors: Named) -> Named:
        """Return the gradient unchanged: the model of the task is the adapted one."""
        return tensors

    def exposed(self, update: Update) -> Named:
        """Return a mask of the layers before the bottleneck, whose gradients are randomised only indirectly."""
        return untouched(update.tensors, "precode")
