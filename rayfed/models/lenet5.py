"""LeNet of the paper on private passports: LeNet-5 with pooling and a convolution as the third layer.

Source: Gu et al. 2021, "Federated Deep Learning with Bayesian Privacy", table 2; LeCun et al. 1998. 61,706 parameters
at 1x28x28 with 10 classes. The table's paddings of 2 in the second convolution and of 1 in the third contradict its
outputs of 10x10 and 1x1, so these have no padding here. The table lists no norms. The scale of 1.01 in figure 5 implies
norms in its AlexNet. With `padding: 0`, sigmoid and `init: uniform`, this is also the LeNet of GRNN's published code
(Ren 2022): 62,006 parameters at 3x32x32 with 10 classes.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Literal

from torch import nn

from rayfed.errors import UserError
from rayfed.models.activation import Activation, activation
from rayfed.models.norm import Norm, norm
from rayfed.registry import component


@component
class LeNet5:
    """LeNet-5: three 5x5 convolutions (6, 16, 120 channels), two max-pools, and two linear layers.

    Max pooling follows the first two convolutions.
    """

    activation: Activation = "relu"
    """Activation after each convolution and the first linear layer; `sigmoid` is smooth, as second-order attacks
    need."""
    padding: Literal[0, 2] = 2
    """Border of zeros around the image, in pixels. With 0, images need at least 32x32 pixels."""
    init: Literal["default", "uniform"] = "default"
    """Initial weights. `default`: PyTorch's. `uniform`: weights and biases from U(-0.5, 0.5), as in DLG."""
    norm: Norm = "none"
    """Norm after each convolution, before its activation."""

    def build(self, image_shape: tuple[int, int, int], classes: int) -> nn.Module:
        """Return the network for images (N, C, H, W), with logits (N, classes).

        Raises `UserError` for images that are too small, for which the third convolution would have no input.
        """
        channels, height, width = image_shape
        least = 32 - 2 * self.padding
        if min(height, width) < least:
            raise UserError(
                f"model lenet5 with padding {self.padding} needs images of at least {least}x{least} pixels, not "
                f"{height}x{width}: choose lenet or resize the images"
            )
        rows, columns = (((side + 2 * self.padding - 4) // 2 - 4) // 2 - 4 for side in (height, width))
        model = nn.Sequential(
            OrderedDict(
                conv1=nn.Conv2d(channels, 6, 5, padding=self.padding),
                norm1=norm(self.norm, 6),
                act1=activation(self.activation),
                pool1=nn.MaxPool2d(2),
                conv2=nn.Conv2d(6, 16, 5),
                norm2=norm(self.norm, 16),
                act2=activation(self.activation),
                pool2=nn.MaxPool2d(2),
                conv3=nn.Conv2d(16, 120, 5),
                norm3=norm(self.norm, 120),
                act3=activation(self.activation),
                flatten=nn.Flatten(),
                fc1=nn.Linear(120 * rows * columns, 84),
                act4=activation(self.activation),
                fc2=nn.Linear(84, classes),
            )
        )
        if self.init == "uniform":
            for parameter in model.parameters():
                nn.init.uniform_(parameter, -0.5, 0.5)
        return model
