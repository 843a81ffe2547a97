"""PRECODE: a variational bottleneck before the last linear layer, which randomises the gradient.

Sources: Scheliga et al. 2022, "PRECODE - A Generic Model Extension to Prevent Deep Gradient Leakage"; Scheliga et al.
2022, "Combining Variational Modeling with Partial Gradient Perturbation to Prevent Deep Gradient Leakage", for the
attack that ignores the randomised gradients.
"""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from rayfed.defences.base import Defence, Task
from rayfed.models.bottleneck import KnownBottleneck, VariationalBottleneck
from rayfed.models.copying import copy_model
from rayfed.models.head import before_head, path_before_head, untouched
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

    def reveal_randomness(self, model: nn.Module, weights: Named, update: Named) -> nn.Module:
        """Return a model with the random numbers of the latents, which the gradients of the bottleneck reveal.

        The gradient of a linear layer is a product of its input and the gradient of its bias. So the update has the
        features f, from the encoder, and the latents z, from the decoder: the noise is (z - mean(f)) / deviation(f).
        """
        revealed = copy_model(model)
        path = path_before_head(revealed, "precode")
        bottleneck = revealed.get_submodule(path)
        assert isinstance(bottleneck, VariationalBottleneck)
        features, latents = (_input_of(update, f"{path}.{part}") for part in ("encode", "decode"))
        encoder = f"{path}.encode"
        code = weights[f"{encoder}.weight"].double() @ features + weights[f"{encoder}.bias"].double()
        mean, log_variance = code.chunk(2)
        noise = (latents - mean) / (log_variance / 2).exp()
        revealed.set_submodule(path, KnownBottleneck(bottleneck, noise))
        return revealed

    def exposed(self, update: Update) -> Named:
        """Return a mask of the layers before the bottleneck, whose gradients are randomised only indirectly."""
        return untouched(update.tensors, "precode")


def _input_of(update: Named, layer: str) -> Tensor:
    """Return the input (I,) of a linear layer for a single sample, from its gradient."""
    weight, bias = update[f"{layer}.weight"].double(), update[f"{layer}.bias"].double()
    return weight.T @ bias / bias.square().sum().clamp(min=torch.finfo(bias.dtype).tiny)
