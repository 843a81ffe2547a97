"""Recurrent text classifier.

Source: Cho et al. 2014, "Learning Phrase Representations using RNN Encoder-Decoder for Statistical Machine
Translation", section 2.3 (the gated recurrent unit). It is implemented step by step, because PyTorch's own layer does
not support `torch.func.vmap` and second derivatives.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from rayfed.models.text import VOCABULARY, Mean, text_length, token_table
from rayfed.registry import component
from rayfed.samples import MOST_TOKENS, Modality


class GatedRecurrent(nn.Module):
    """Gated recurrent unit (GRU) over sequences (N, L, width), which outputs all states (N, L, hidden)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.given, self.kept = nn.Linear(width, 3 * hidden), nn.Linear(hidden, 3 * hidden)

    def forward(self, sequence: Tensor) -> Tensor:
        """Return the GRU's states (N, L, hidden) from the first position to the last."""
        state = sequence.new_zeros(len(sequence), self.hidden)
        states = []
        for given in self.given(sequence).unbind(1):
            (r, z, new), (old_r, old_z, old) = (part.chunk(3, dim=1) for part in (given, self.kept(state)))
            reset, update = (r + old_r).sigmoid(), (z + old_z).sigmoid()
            state = update * state + (1 - update) * (new + reset * old).tanh()
            states.append(state)
        return torch.stack(states, dim=1)


@component
class TextRnn:
    """Recurrent network for texts: token embedding, gated recurrent unit, mean of the states, linear layer."""

    takes: ClassVar[tuple[Modality, ...]] = ("tokens",)

    vocabulary: Annotated[int, Field(ge=2, le=MOST_TOKENS)] = VOCABULARY
    """Number of tokens of the model's texts, at least `length` of the data."""
    width: Annotated[int, Field(ge=1)] = 64
    """Size of a token's embedding vector."""
    hidden: Annotated[int, Field(ge=1)] = 64
    """Size of the recurrent state."""

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """Return the network for texts (N, L) int64, with logits (N, classes); raise `UserError` for other shapes."""
        text_length("text_rnn", shape)
        return nn.Sequential(
            OrderedDict(
                embed=token_table(self.vocabulary, self.width),
                gru=GatedRecurrent(self.width, self.hidden),
                mean=Mean(),
                fc=nn.Linear(self.hidden, classes),
            )
        )
