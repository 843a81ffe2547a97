"""Multi-layer perceptron (MLP).

Source: McMahan et al. 2017, "Communication-Efficient Learning of Deep Networks from Decentralized Data", section 3: the
2NN with two hidden layers of 200 units and ReLU, 199,210 parameters on MNIST.
"""

from __future__ import annotations

from collections import OrderedDict
from math import prod
from typing import Annotated

from pydantic import Field
from torch import nn

from rayfed.models.activation import Activation, activation
from rayfed.registry import component


@component
class Mlp:
    """Multi-layer perceptron: fully connected layers over the flattened image, of any size."""

    hidden: tuple[Annotated[int, Field(ge=1)], ...] = (200, 200)
    """Number of units of each hidden layer; empty for a linear model."""
    activation: Activation = "relu"
    """Activation after every hidden layer."""

    def build(self, image_shape: tuple[int, int, int], classes: int) -> nn.Module:
        """Return the network for images (N, C, H, W), with logits (N, classes)."""
        layers: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
        features = prod(image_shape)
        for index, units in enumerate(self.hidden, start=1):
            layers[f"fc{index}"] = nn.Linear(features, units)
            layers[f"act{index}"] = activation(self.activation)
            features = units
        layers[f"fc{len(self.hidden) + 1}"] = nn.Linear(features, classes)
        return nn.Sequential(layers)
