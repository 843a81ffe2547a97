"""Modules that the text models share."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn

from rayfed.errors import UserError

VOCABULARY = 1024
"""Default number of tokens, equal to the default of the data set `text`."""


def token_table(vocabulary: int, width: int) -> nn.Module:
    """Return a token embedding with the parameter `table.weight`, from texts (N, L) to vectors (N, L, width)."""
    return nn.Sequential(OrderedDict(table=nn.Embedding(vocabulary, width)))


class Places(nn.Module):
    """Position embedding, added to a sequence (N, L, width)."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(length, width))

    def forward(self, sequence: Tensor) -> Tensor:
        """Add the position vectors to a sequence (N, L, width)."""
        return sequence + self.weight


class Mean(nn.Module):
    """Mean over the positions of a sequence, from (N, L, width) to (N, width)."""

    def forward(self, sequence: Tensor) -> Tensor:
        """Return the mean vector of each text, (N, width)."""
        return sequence.mean(1)


def text_length(name: str, shape: tuple[int, ...]) -> int:
    """Return the length L of texts of shape (L,).

    Raises `UserError` with the model's name for other shapes.
    """
    if len(shape) != 1:
        raise UserError(
            f"model {name} needs texts, but the samples are {'x'.join(map(str, shape))}: use a data set of texts "
            "(data: text)"
        )
    return shape[0]
