"""Insertion of a defence's block before the last linear layer of a network."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import Tensor, nn

from rayfed.errors import UserError
from rayfed.update import Named


def before_head(model: nn.Module, name: str, block: Callable[[int], nn.Module]) -> nn.Module:
    """Insert a block before a model's last linear layer, in place; `block` makes the block from the layer's input size.

    The layer `fc` becomes a sequence of `fc.NAME` and `fc.head`. Raises `UserError` for a model without a linear layer.
    """
    layers = [path for path, module in model.named_modules() if isinstance(module, nn.Linear)]
    if not layers:
        raise UserError(
            f"the defence {name} is inserted before the last linear layer, but the model has no linear layer: "
            f"choose another defence, or a model that ends in a linear layer"
        )
    head = model.get_submodule(layers[-1])
    assert isinstance(head, nn.Linear)
    model.set_submodule(layers[-1], nn.Sequential(OrderedDict({name: block(head.in_features), "head": head})))
    return model


def path_before_head(model: nn.Module, name: str) -> str:
    """Return the path of the block that `before_head` inserted."""
    paths: list[str] = [path for path, _ in model.named_modules()]
    return next(path for path in paths if path.rpartition(".")[2] == name)


class KnownDropout(nn.Module):
    """Multiplication of features (N, F) by given factors (F,), in every mode."""

    def __init__(self, factors: Tensor) -> None:
        super().__init__()
        self._factors = factors

    def forward(self, features: Tensor) -> Tensor:
        """Return the features times the factors."""
        return features * self._factors.to(features.device, features.dtype)


def untouched(tensors: Named, name: str) -> Named:
    """Return masks of an update: false in the block that `before_head` inserted and in the layer after that block."""

    def spoilt(parameter: str) -> bool:
        module = parameter.rpartition(".")[0]
        return f".{name}." in f"{module}." or module.endswith(".head")

    return {n: torch.full_like(t, not spoilt(n), dtype=torch.bool) for n, t in tensors.items()}
