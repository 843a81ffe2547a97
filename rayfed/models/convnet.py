"""ConvNet of the gradient-inversion papers: eight convolutions with batch norm and two max-pools.

Source: Geiping et al. 2020, "Inverting Gradients - How easy is it to break privacy in federated learning?", section 5
(ConvNet64 at the default width; 2,904,970 parameters at 3x32x32 with 10 classes).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Annotated

from pydantic import Field
from torch import nn

from rayfed.errors import UserError
from rayfed.models.norm import Norm, norm
from rayfed.registry import component

_WIDTHS = (1, 2, 2, 4, 4, 4, 4, 4)
_POOLED = (6, 8)


@component
class ConvNet:
    """ConvNet: eight 3x3 convolutions with batch norm and ReLU, two 3x3 max-pools, and a linear layer."""

    width: Annotated[int, Field(ge=1)] = 64
    """Number of channels of the first convolution; later convolutions have two and four times as many."""
    norm: Norm = "batch"
    """Norm after each convolution. `group` normalises each sample separately."""

    def build(self, image_shape: tuple[int, int, int], classes: int) -> nn.Module:
        """Return the network for images (N, C, H, W), with logits (N, classes).

        Raises `UserError` for images smaller than 9x9, for which the two max-pools would leave no output.
        """
        channels, height, width = image_shape
        if min(height, width) < 9:
            raise UserError(
                f"model convnet needs images of at least 9x9 pixels, not {height}x{width}: choose lenet or resize the "
                "images"
            )
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        for index, factor in enumerate(_WIDTHS, start=1):
            layers[f"conv{index}"] = nn.Conv2d(channels, factor * self.width, 3, padding=1)
            layers[f"bn{index}"] = norm(self.norm, factor * self.width)
            layers[f"relu{index}"] = nn.ReLU()
            if index in _POOLED:
                layers[f"pool{index}"] = nn.MaxPool2d(3)
            channels = factor * self.width
        layers["flatten"] = nn.Flatten()
        layers["fc"] = nn.Linear(channels * (height // 9) * (width // 9), classes)
        return nn.Sequential(layers)
