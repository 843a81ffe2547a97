"""Small convolutional network of VAE-based secure federated learning (Lin 2022, local training).

Three 3x3 convolutions (32, 64, 64), max-pools of 2 after the first two, a linear layer of 64 units and the head:
122,570 parameters at 3x32x32 with 10 classes. The paper does not state the padding (here none) and the pool size (here
2). Its head of "64 neurons" is implemented with one output per class.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from rayfed.errors import UserError
from rayfed.registry import component


@component
class SmallCnn:
    """Small CNN: three 3x3 convolutions (32, 64, 64 channels) with ReLU, and two linear layers.

    Pooling follows the first two convolutions.
    """

    def build(self, image_shape: tuple[int, int, int], classes: int) -> nn.Module:
        """Return the network for images (N, C, H, W), with logits (N, classes).

        Raises `UserError` for images smaller than 18x18, for which the third convolution would have no input.
        """
        channels, height, width = image_shape
        if min(height, width) < 18:
            raise UserError(
                f"model small_cnn needs images of at least 18x18 pixels, not {height}x{width}: choose lenet or resize "
                "the images"
            )
        rows, columns = (((side - 2) // 2 - 2) // 2 - 2 for side in (height, width))
        return nn.Sequential(
            OrderedDict(
                conv1=nn.Conv2d(channels, 32, 3),
                relu1=nn.ReLU(),
                pool1=nn.MaxPool2d(2),
                conv2=nn.Conv2d(32, 64, 3),
                relu2=nn.ReLU(),
                pool2=nn.MaxPool2d(2),
                conv3=nn.Conv2d(64, 64, 3),
                relu3=nn.ReLU(),
                flatten=nn.Flatten(),
                fc1=nn.Linear(64 * rows * columns, 64),
                relu4=nn.ReLU(),
                fc2=nn.Linear(64, classes),
            )
        )
