"""CryptoNet: only additions, multiplications and squares, which can be evaluated under encryption.

Source: Gilad-Bachrach et al. 2016, "CryptoNets: Applying Neural Networks to Encrypted Data with High Throughput and
Accuracy", section 4 (squares for activations). It has one convolution, whose stride is wide enough for an image to fit
into one ciphertext, and two linear layers.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn

from rayfed.errors import UserError
from rayfed.registry import component


class Square(nn.Module):
    """Activation function x * x."""

    def forward(self, values: Tensor) -> Tensor:
        """Return the square of each value."""
        return values * values


@component
class CryptoNet:
    """CryptoNet: a convolution (four 7x7 kernels, stride 3), a square, 64 linear units, a square, a linear layer."""

    def build(self, image_shape: tuple[int, int, int], classes: int) -> nn.Module:
        """Return the network for grey images (N, 1, H, W), with logits (N, classes).

        Raises `UserError` for images with several channels, or smaller than 7x7.
        """
        channels, height, width = image_shape
        if channels != 1 or min(height, width) < 7:
            raise UserError(
                f"model cryptonet needs grey images of at least 7x7 pixels, not {channels}x{height}x{width}: choose "
                "other data or lenet"
            )
        windows = ((height - 7) // 3 + 1) * ((width - 7) // 3 + 1)
        return nn.Sequential(
            OrderedDict(
                conv1=nn.Conv2d(1, 4, 7, stride=3),
                square1=Square(),
                flatten=nn.Flatten(),
                fc1=nn.Linear(4 * windows, 64),
                square2=Square(),
                fc2=nn.Linear(64, classes),
            )
        )
