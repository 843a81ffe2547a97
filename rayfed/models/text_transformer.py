"""Small transformer text classifier.

Source: Vaswani et al. 2017, "Attention Is All You Need", section 3, as an encoder with learnt positions (Devlin et al.
2019, "BERT") and the norms before the layers (Xiong et al. 2020, "On Layer Normalization in the Transformer
Architecture", section 3). Attention is written in basic operations, which support `torch.func.vmap` and second
derivatives.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor, nn

from rayfed.errors import UserError
from rayfed.models.text import VOCABULARY, Mean, Places, text_length, token_table
from rayfed.registry import component
from rayfed.samples import MOST_TOKENS, Modality


class Attention(nn.Module):
    """Multi-head self-attention over a sequence (N, L, width)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, sequence: Tensor) -> Tensor:
        """Apply self-attention to a sequence (N, L, width), and return a sequence of the same shape."""
        query, key, value = (self._split(layer(sequence)) for layer in (self.query, self.key, self.value))
        shares = (query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5).softmax(-1)
        seen: Tensor = self.out((shares @ value).transpose(1, 2).flatten(2))
        return seen

    def _split(self, sequence: Tensor) -> Tensor:
        """Reshape (N, L, width) to (N, heads, L, width / heads)."""
        heads: Tensor = sequence.unflatten(2, (self.heads, -1)).transpose(1, 2)
        return heads


class Block(nn.Module):
    """Pre-norm transformer block: attention and a feed-forward layer with residual connections."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.fc1, self.act, self.fc2 = nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width)

    def forward(self, sequence: Tensor) -> Tensor:
        """Apply the transformer block to a sequence (N, L, width), and return a sequence of the same shape."""
        sequence = sequence + self.attention(self.norm1(sequence))
        changed: Tensor = sequence + self.fc2(self.act(self.fc1(self.norm2(sequence))))
        return changed


@component
class TextTransformer:
    """Transformer for texts: token and position embeddings, blocks, mean over the positions, linear layer."""

    takes: ClassVar[tuple[Modality, ...]] = ("tokens",)

    vocabulary: Annotated[int, Field(ge=2, le=MOST_TOKENS)] = VOCABULARY
    """Number of tokens of the model's texts, at least `length` of the data."""
    width: Annotated[int, Field(ge=1)] = 64
    """Size of a token's embedding vector."""
    layers: Annotated[int, Field(ge=1)] = 2
    """Number of blocks."""
    heads: Annotated[int, Field(ge=1)] = 4
    """Number of attention heads per block; a divisor of `width`."""
    hidden: Annotated[int, Field(ge=1)] = 128
    """Number of units of a block's feed-forward layer."""

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """Return the network for texts (N, L) int64, with logits (N, classes); raise `UserError` for other shapes."""
        length = text_length("text_transformer", shape)
        if self.width % self.heads:
            raise UserError(f"model.heads: {self.heads} must divide model.width ({self.width}) without remainder")
        layers: OrderedDict[str, nn.Module] = OrderedDict(
            embed=token_table(self.vocabulary, self.width), places=Places(length, self.width)
        )
        for index in range(1, self.layers + 1):
            layers[f"block{index}"] = Block(self.width, self.heads, self.hidden)
        layers |= {"norm": nn.LayerNorm(self.width), "mean": Mean(), "fc": nn.Linear(self.width, classes)}
        return nn.Sequential(layers)
