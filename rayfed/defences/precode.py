"""PRECODE: a variational bottleneck before the head, which randomises the gradient.

Sources: Scheliga et al. 2022, "PRECODE - A Generic Model Extension to Prevent Deep Gradient Leakage"; Scheliga et al.
2022, "Combining Variational Modeling with Partial Gradient Perturbation to Prevent Deep Gradient Leakage", for the
attack that leaves the random gradients out.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from torch import nn

from rayfed.defences.base import Defence
from rayfed.models.bottleneck import VariationalBottleneck
from rayfed.models.head import before_head, untouched
from rayfed.registry import component
from rayfed.update import Named, Update


@component
class Precode(Defence):
    """Put a variational bottleneck before the last linear layer; its KL divergence times `beta` joins the loss.

    Empirical. The model learns with the bottleneck, and everybody knows it: it is part of the architecture.
    """

    bottleneck: Annotated[int, Field(ge=1)] = 256
    """Number of random numbers that the features are encoded to."""
    beta: Annotated[float, Field(ge=0)] = 1e-3
    """Weight of the KL divergence from N(0, 1) in the loss."""

    def adapt_model(self, model: nn.Module) -> nn.Module:
        """Put the bottleneck into the model; raises `UserError` for one without a linear layer."""
        return before_head(
            model, "precode", lambda features: VariationalBottleneck(features, self.bottleneck, self.beta)
        )

    def exposed(self, update: Update) -> Named:
        """Return a mask of the layers before the bottleneck, which its random draws reach only weakened."""
        return untouched(update.tensors, "precode")
