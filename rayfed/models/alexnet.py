"""AlexNet for small images, from the paper on private passports.

Source: Gu et al. 2021, "Federated Deep Learning with Bayesian Privacy", table 2; Krizhevsky et al. 2012. 2,492,234
parameters at 3x32x32 with 10 classes. The table lists no norms. Figure 5 shows a scale of 1.01 in layers without
passports, so the paper's networks may have had some.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from rayfed.errors import UserError
from rayfed.models.activation import Activation, activation
from rayfed.models.norm import Norm, norm
from rayfed.registry import component


@component
class AlexNet:
    """AlexNet for small images: two 5x5 and three 3x3 convolutions, three max-pools, and a linear layer.

    The convolutions have 64, 192, 384, 256 and 256 channels.
    """

    activation: Activation = "relu"
    """Activation after each convolution."""
    norm: Norm = "none"
    """Norm after each convolution, before its activation."""

    def build(self, image_shape: tuple[int, int, int], classes: int) -> nn.Module:
        """Return the network for images (N, C, H, W), with logits (N, classes).

        Raises `UserError` for images smaller than 8x8, for which three pools would leave no output.
        """
        channels, height, width = image_shape
        if min(height, width) < 8:
            raise UserError(
                f"model alexnet needs images of at least 8x8 pixels, not {height}x{width}: resize the images"
            )
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        for i, (out, kernel, pooled) in enumerate(_CONVOLUTIONS, start=1):
            layers[f"conv{i}"] = nn.Conv2d(channels, out, kernel, padding=kernel // 2)
            layers[f"norm{i}"] = norm(self.norm, out)
            layers[f"act{i}"] = activation(self.activation)
            if pooled:
                layers[f"pool{i}"] = nn.MaxPool2d(2)
            channels = out
        layers["flatten"] = nn.Flatten()
        layers["fc"] = nn.Linear(channels * (height // 8) * (width // 8), classes)
        return nn.Sequential(layers)


_CONVOLUTIONS = ((64, 5, True), (192, 5, True), (384, 3, False), (256, 3, False), (256, 3, True))
"""Number of channels, side of the kernel, whether a pool follows."""
