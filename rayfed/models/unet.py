"""U-Net for segmentation: a contracting path, an expanding path, and a shortcut between them at each resolution.

Source: Ronneberger et al. 2015, "U-Net: Convolutional Networks for Biomedical Image Segmentation", figure 1, and
section 3 for the initial weights, N(0, 2 / inputs). Differences from the paper: convolutions are padded, so that
outputs have the images' size; pools take the mean; a repetition followed by a 1x1 convolution replaces the transposed
convolution.
"""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from rayfed.errors import UserError
from rayfed.models.activation import Activation, activation
from rayfed.models.norm import Norm, norm
from rayfed.registry import component


class UNet(nn.Module):
    """U-Net with `levels` levels, each with twice the features: (N, C, H, W) to logits (N, classes, H, W)."""

    def __init__(
        self, channels: int, classes: int, width: int, levels: int, activation_name: Activation, norm_name: Norm
    ) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(levels)]

        def block(inputs: int, outputs: int) -> nn.Sequential:
            layers: list[nn.Module] = []
            for own in (inputs, outputs):
                layers += [nn.Conv2d(own, outputs, 3, padding=1), norm(norm_name, outputs), activation(activation_name)]
            return nn.Sequential(*layers)

        self.down = nn.ModuleList(block(*pair) for pair in zip([channels, *widths], widths, strict=False))
        pairs = list(zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.narrow = nn.ModuleList(nn.Conv2d(below, above, 1) for below, above in pairs)
        self.up = nn.ModuleList(block(2 * above, above) for _, above in pairs)
        self.head = nn.Conv2d(width, classes, 1)
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
                assert layer.bias is not None
                nn.init.zeros_(layer.bias)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits (N, classes, H, W) of images (N, C, H, W)."""
        seen: list[Tensor] = []
        features = images
        for level, block in enumerate(self.down):
            features = block(F.avg_pool2d(features, 2) if level else features)
            seen.append(features)
        for narrow, block, beside in zip(self.narrow, self.up, reversed(seen[:-1]), strict=True):
            wide = F.interpolate(features, beside.shape[-2:])
            features = block(torch.cat([beside, narrow(wide)], 1))
        logits: Tensor = self.head(features)
        return logits


@component
class Unet:
    """U-Net that scores every pixel, for segmentation: blocks of two 3x3 convolutions at each resolution."""

    width: Annotated[int, Field(ge=1)] = 16
    """Number of features at the images' own resolution; each level below has twice as many."""
    levels: Annotated[int, Field(ge=1, le=6)] = 3
    """Number of resolutions, each half of the previous one."""
    activation: Activation = "relu"
    """Activation after each convolution."""
    norm: Norm = "none"
    """Normalisation after each 3x3 convolution."""

    def build(self, image_shape: tuple[int, int, int], classes: int) -> nn.Module:
        """Return the network for images (N, C, H, W), with logits (N, classes, H, W)."""
        channels, height, width = image_shape
        if min(height, width) < 2 ** (self.levels - 1):
            raise UserError(
                f"model unet with {self.levels} levels needs images of at least {2 ** (self.levels - 1)} pixels per "
                f"side, not {height}x{width}: choose fewer levels or larger images"
            )
        return UNet(channels, classes, self.width, self.levels, self.activation, self.norm)
