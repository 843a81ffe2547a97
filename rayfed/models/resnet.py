"""Residual networks for small images: a 3x3 stem without max-pool, and stages of basic blocks.

Source: He et al. 2016, "Deep Residual Learning for Image Recognition". ResNet-18 and 34 have the four stages of table 1
with the stem of section 4.2 (CIFAR-10): 11,173,962 parameters in ResNet-18 at 3 channels and 10 classes. ResNet-20 and
32 are the networks of section 4.2 (three narrow stages, 0.27 million parameters in ResNet-20), but with 1x1
convolutions if a shortcut changes shape.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from rayfed.models.activation import Activation, activation
from rayfed.models.norm import Norm, norm
from rayfed.registry import component


class BasicBlock(nn.Module):
    """Residual block of two 3x3 convolutions: (N, C, H, W) to (N, width, H/stride, W/stride).

    Both convolutions have batch norm.
    """

    def __init__(self, channels: int, width: int, stride: int, activation_name: Activation, norm_name: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride=stride, padding=1, bias=False)
        self.bn1 = norm(norm_name, width)
        self.act1 = activation(activation_name)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = norm(norm_name, width)
        self.act2 = activation(activation_name)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, width, 1, stride=stride, bias=False), norm(norm_name, width)
            )

    def forward(self, images: Tensor) -> Tensor:
        """Return the activated sum of the convolutions' output and the shortcut."""
        inner = self.bn2(self.conv2(self.act1(self.bn1(self.conv1(images)))))
        outer: Tensor = self.act2(inner + self.shortcut(images))
        return outer


class ResNet(nn.Module):
    """Residual network: stem, stages that halve the resolution from the second on, average pooling, linear layer."""

    def __init__(
        self,
        channels: int,
        classes: int,
        widths: tuple[int, ...],
        blocks: tuple[int, ...],
        activation_name: Activation,
        norm_name: Norm,
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, widths[0], 3, padding=1, bias=False)
        self.bn1 = norm(norm_name, widths[0])
        self.act1 = activation(activation_name)
        stages = []
        channels = widths[0]
        for stage, (width, count) in enumerate(zip(widths, blocks, strict=True)):
            strides = [1 if stage == 0 else 2] + [1] * (count - 1)
            layers = []
            for stride in strides:
                layers.append(BasicBlock(channels, width, stride, activation_name, norm_name))
                channels = width
            stages.append(nn.Sequential(*layers))
        self.stages = nn.Sequential(*stages)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.fc = nn.Linear(channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits (N, classes) of images (N, C, H, W)."""
        features = self.stages(self.act1(self.bn1(self.conv1(images))))
        logits: Tensor = self.fc(self.flatten(self.pool(features)))
        return logits


@component
class ResNet10:
    """ResNet-10 for small images (one block per stage); any image size."""

    widths: ClassVar[tuple[int, ...]] = (64, 128, 256, 512)
    blocks: ClassVar[tuple[int, ...]] = (1, 1, 1, 1)

    activation: Activation = "relu"
    """Activation after each convolution. `sigmoid` is twice differentiable, as in the GRNN experiments."""
    norm: Norm = "batch"
    """Norm after each convolution. `group` normalises each sample separately."""

    def build(self, image_shape: tuple[int, int, int], classes: int) -> nn.Module:
        """Return the network for images (N, C, H, W), with logits (N, classes)."""
        return ResNet(image_shape[0], classes, self.widths, self.blocks, self.activation, self.norm)


@component
class ResNet18(ResNet10):
    """ResNet-18 for small images (two blocks per stage); any image size."""

    blocks: ClassVar[tuple[int, ...]] = (2, 2, 2, 2)


@component
class ResNet34(ResNet10):
    """ResNet-34 for small images (3, 4, 6 and 3 blocks per stage); any image size."""

    blocks: ClassVar[tuple[int, ...]] = (3, 4, 6, 3)


@component
class ResNet20(ResNet10):
    """Narrow ResNet-20 of the CIFAR experiments (three stages of three blocks); any image size."""

    widths: ClassVar[tuple[int, ...]] = (16, 32, 64)
    blocks: ClassVar[tuple[int, ...]] = (3, 3, 3)


@component
class ResNet32(ResNet20):
    """Narrow ResNet-32 of the CIFAR experiments (three stages of five blocks); any image size."""

    blocks: ClassVar[tuple[int, ...]] = (5, 5, 5)
