"""LeNet of the gradient-leakage papers: three convolutions without pooling and one linear layer.

Source: Zhu et al. 2019, "Deep Leakage from Gradients" (DLG), section 4 and the authors' published settings: sigmoid,
weights and biases from U(-0.5, 0.5). 15,826 parameters at 3x32x32 with 10 classes.
"""

from __future__ import annotations

from collections import OrderedDict
from math import ceil
from typing import Literal

from torch import nn

from rayfed.models.activation import Activation, activation
from rayfed.models.norm import Norm, norm
from rayfed.registry import component


@component
class LeNet:
    """LeNet: three 5x5 convolutions of 12 channels (strides 2, 2, 1) and a linear layer; any image size."""

    activation: Activation = "relu"
    """Activation after each convolution. `sigmoid` is twice differentiable, as second-order attacks need; `relu` trains
    well."""
    norm: Norm = "none"
    """Norm after the convolutions."""
    normed: Literal["all", "first"] = "all"
    """Convolutions that have a norm: all, or only the first, as in FedKL's published LeNet."""
    init: Literal["default", "uniform"] = "default"
    """Initial weights. `default`: PyTorch's. `uniform`: weights and biases from U(-0.5, 0.5), as in DLG."""

    def build(self, image_shape: tuple[int, int, int], classes: int) -> nn.Module:
        """Return the network for images (N, C, H, W), with logits (N, classes)."""
        channels, height, width = image_shape
        features = 12 * ceil(height / 4) * ceil(width / 4)
        later = self.norm if self.normed == "all" else "none"
        layers: OrderedDict[str, nn.Module] = OrderedDict(
            conv1=nn.Conv2d(channels, 12, 5, stride=2, padding=2),
            norm1=norm(self.norm, 12),
            act1=activation(self.activation),
            conv2=nn.Conv2d(12, 12, 5, stride=2, padding=2),
            norm2=norm(later, 12),
            act2=activation(self.activation),
            conv3=nn.Conv2d(12, 12, 5, stride=1, padding=2),
            norm3=norm(later, 12),
            act3=activation(self.activation),
            flatten=nn.Flatten(),
            fc=nn.Linear(features, classes),
        )
        model = nn.Sequential(layers)
        if self.init == "uniform":
            for parameter in model.parameters():
                nn.init.uniform_(parameter, -0.5, 0.5)
        return model
