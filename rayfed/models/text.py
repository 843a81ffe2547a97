"""Common parts of models that read texts: from the bytes of a text to its tokens' vectors."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rayfed.data.forms import MOST_TOKENS, token_numbers
from rayfed.errors import UserError

VOCABULARY = 1024
"""Default number of tokens: that of the data set `text`."""


class TokenEmbedding(nn.Module):
    """A vector for each token: texts (N, 1, 2, L) to (N, L, width).

    Numbers beyond the vocabulary wrap round, so that images of noise are texts as well; data that have more tokens are
    refused before a run.
    """

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, width)

    def forward(self, images: Tensor) -> Tensor:
        """Return the vectors of the tokens at all places."""
        vectors: Tensor = self.table(token_numbers(images) % self.table.num_embeddings)
        return vectors


class Places(nn.Module):
    """Adds a learnt vector to each place of a sequence (N, L, width)."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(length, width))

    def forward(self, sequence: Tensor) -> Tensor:
        """Return the sequence with the vectors of its places added."""
        return sequence + self.weight


class Mean(nn.Module):
    """The mean over the places of a sequence (N, L, width), (N, width)."""

    def forward(self, sequence: Tensor) -> Tensor:
        """Return the mean vector of each text."""
        return sequence.mean(1)


def text_length(name: str, image_shape: tuple[int, int, int]) -> int:
    """Return the tokens of texts of a shape; raises `UserError`, naming the model, for what is no text's shape."""
    channels, height, length = image_shape
    if (channels, height) != (1, 2):
        raise UserError(f"{name} reads texts, and the data's samples are {channels}x{height}x{length}: set data: text")
    return length


def check_vocabulary(model: nn.Module, tokens: int) -> None:
    """Raise `UserError` where a model's table of tokens is smaller than the vocabulary of its data."""
    for module in model.modules():
        if isinstance(module, TokenEmbedding) and module.table.num_embeddings < tokens:
            raise UserError(
                f"model.vocabulary is {module.table.num_embeddings}, and the data have {tokens} tokens: "
                f"set it to {tokens} (at most {MOST_TOKENS})"
            )
