"""Convolutional recurrent neural network (CRNN) for reading words.

Source: Shi, Bai and Yao 2017, "An End-to-End Trainable Neural Network for Image-based Sequence Recognition", table 1:
seven convolutions, of which the last three pools halve only the height, and two bidirectional LSTM layers over the
columns. 8.3 million parameters at 32x100 grey pixels with 36 letters and the paper's width.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor, nn

from rayfed.errors import UserError
from rayfed.models.norm import Norm, norm
from rayfed.registry import component


class Columns(nn.Module):
    """Module that reshapes features (N, C, 1, T) to a sequence (N, T, C)."""

    def forward(self, features: Tensor) -> Tensor:
        """Return the features' columns from left to right as a sequence (N, T, C)."""
        return features.squeeze(2).transpose(1, 2)


class Recurrent(nn.Module):
    """Bidirectional LSTM layer over sequences (N, T, C), with outputs (N, T, 2 * hidden)."""

    def __init__(self, channels: int, hidden: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(channels, hidden, batch_first=True, bidirectional=True)

    def forward(self, sequence: Tensor) -> Tensor:
        """Return the outputs of both directions of the LSTM at each position, (N, T, 2 * hidden)."""
        outputs: Tensor = self.lstm(sequence)[0]
        return outputs


@component
class CRNN:
    """CRNN for words: convolutions over the image, then two bidirectional LSTMs over the columns.

    The outputs are a class or blank per column.
    """

    width: Annotated[int, Field(ge=1)] = 64
    """Number of channels of the first convolution; later convolutions have two to eight times as many."""
    hidden: Annotated[int, Field(ge=1)] = 256
    """Size of the state in each direction of an LSTM."""
    norm: Norm = "batch"
    """Norm after some of the convolutions, see `normed`."""
    normed: Literal["paper", "all"] = "paper"
    """Convolutions with a norm. `paper`: the fifth and the sixth. `all`: all, which trains with only some thousand
    words."""

    def build(self, image_shape: tuple[int, int, int], classes: int) -> nn.Module:
        """Return the network for images (N, C, 32, W), with logits (N, W

        4 + 1, classes) if W is a multiple of 4. Raises `UserError` for images of another height, or narrower than 8
        pixels.
        """
        channels, height, across = image_shape
        if height != 32 or across < 8:
            raise UserError(
                f"model crnn needs images of height 32 and width 8 or more, not {height}x{across}: set data.height and "
                "data.width"
            )
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        for i, (factor, kernel, normed, pool) in enumerate(_CONVOLUTIONS, start=1):
            out = factor * self.width
            layers[f"conv{i}"] = nn.Conv2d(channels, out, kernel, padding=kernel // 2 if kernel == 3 else 0)
            if normed or self.normed == "all":
                layers[f"norm{i}"] = norm(self.norm, out)
            layers[f"relu{i}"] = nn.ReLU()
            if pool:
                layers[f"pool{i}"] = nn.MaxPool2d(2) if pool == "both" else nn.MaxPool2d(2, (2, 1), (0, 1))
            channels = out
        layers["columns"] = Columns()
        layers["lstm1"] = Recurrent(channels, self.hidden)
        layers["between"] = nn.Linear(2 * self.hidden, self.hidden)
        layers["lstm2"] = Recurrent(self.hidden, self.hidden)
        layers["fc"] = nn.Linear(2 * self.hidden, classes)
        return nn.Sequential(layers)


_CONVOLUTIONS = (
    (1, 3, False, "both"),
    (2, 3, False, "both"),
    (4, 3, False, None),
    (4, 3, False, "height"),
    (8, 3, True, None),
    (8, 3, True, "height"),
    (8, 2, False, None),
)
"""Channels relative to the first, side of the kernel, whether the paper has a norm, and the sides that the pool
halves."""
