"""Modules that the text models share."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn

from rayfed.errors import UserError

VOCABULARY = 1024
"""Default number of tokens, which is that of the data set `text`."""


def token_table(vocabulary: int, width: int) -> nn.Module:
    """Return an embedding with the parameter `table.weight`, from texts (N, L) to (N, L, width)."""
    return nn.Sequential(OrderedDict(table=nn.Embedding(vocabulary, width)))


class Places(nn.Module):
    """Position embedding, added to a sequence (N, L, width)."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(length, width))

    def forward(self, sequence: Tensor) -> Tensor:
        """Return the sequence with position vectors added."""
        return sequence + self.weight


class Mean(nn.Module):
    """Mean over the positions of a sequence, from (N, L, width) to (N, width)."""

    def forward(self, sequence: Tensor) -> Tensor:
        """Return the mean vector of each text."""
        return sequence.mean(1)


def text_length(name: str, shape: tuple[int, ...]) -> int:
    """Return the length of texts of a shape; raise `UserError` with the model's name for other shapes."""
    if len(shape) != 1:
        raise UserError(f"{name} needs texts, but the data's samples are {'x'.join(map(str, shape))}: set data: text")
    return shape[0]
