"""Face recogniser, which measures whether a reconstruction identifies a person.

Source: Ren 2023 (thesis), section 3.3.4, which trains ResNet-18 and DenseNet-121 on the 100 people of VGG-Face with the
most images. Here a person may have only four small images, so 93,000 parameters and a linear layer are enough.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

_SIDE = 32
"""Height and width in pixels to which all images are resized."""
_WIDTHS = (32, 64, 128)
_DROPOUT = 0.3
_FLAT = 0.05
"""Contrast on [0, 1] below which an image counts as flat, so that a grey area is not amplified to noise."""


class Recogniser(nn.Module):
    """Network that recognises people in face images: three 3x3 convolutions and a linear layer.

    Each convolution has batch norm, ReLU and 2x2 max pooling.
    """

    def __init__(self, people: int) -> None:
        """Build a network that distinguishes `people` people."""
        super().__init__()
        layers: list[nn.Module] = []
        for before, after in zip((1, *_WIDTHS), _WIDTHS, strict=False):
            layers += [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers, nn.Flatten(), nn.Dropout(_DROPOUT))
        self.linear = nn.Linear(_WIDTHS[-1] * (_SIDE // 2 ** len(_WIDTHS)) ** 2, people)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (N, people) of images (N, C, H, W) in [0, 1], after normalising colour and contrast."""
        small = F.interpolate(images.mean(1, keepdim=True), (_SIDE, _SIDE), mode="bilinear", antialias=True)
        centred = small - small.mean((1, 2, 3), keepdim=True)
        logits: Tensor = self.linear(self.features(centred / (small.std((1, 2, 3), keepdim=True) + _FLAT)))
        return logits
