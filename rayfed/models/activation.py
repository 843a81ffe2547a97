"""Activation functions of the papers' networks."""

from __future__ import annotations

from typing import Literal

from torch import nn

Activation = Literal["relu", "sigmoid"]
"""ReLU trains well; sigmoid is smooth, which attacks that match gradients by second-order methods need."""

_MODULES: dict[Activation, type[nn.Module]] = {"relu": nn.ReLU, "sigmoid": nn.Sigmoid}


def activation(name: Activation) -> nn.Module:
    """Return a new activation module by the name of the function, such as `relu`."""
    return _MODULES[name]()
