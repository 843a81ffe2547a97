"""Define the vision transformer with bottleneck adapters of `adapters.yaml`."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class AdaptedVit(nn.Module):
    """A vision transformer with a class token, and an adapter after each attention and each MLP.

    `model.train.layers` selects the adapters by name. Sources: Dosovitskiy et al. 2020, "An Image is Worth 16x16
    Words", section 3.1; Houlsby et al. 2019, "Parameter-Efficient Transfer Learning for NLP", section 2.1.
    """

    def __init__(
        self, image_shape: tuple[int, int, int], classes: int, patch: int = 8, width: int = 240, blocks: int = 6,
        bottleneck: int = 64,
    ) -> None:  # fmt: skip
        super().__init__()
        channels, height, across = image_shape
        self.embed = nn.Conv2d(channels, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, (height // patch) * (across // patch) + 1, width))
        self.blocks = nn.ModuleList(Block(width, bottleneck) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (N, classes) for images (N, C, H, W)."""
        vectors = self.embed(images).flatten(2).transpose(1, 2)
        vectors = torch.cat([self.token.expand(len(vectors), -1, -1), vectors], 1) + self.positions
        for block in self.blocks:
            vectors = block(vectors)
        return self.head(self.norm(vectors)[:, 0])


class Block(nn.Module):
    """Attention and MLP, each with a norm before it and an adapter after it."""

    def __init__(self, width: int, bottleneck: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), nn.MultiheadAttention(width, 4, batch_first=True)
        self.adapter1 = Adapter(width, bottleneck)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.adapter2 = Adapter(width, bottleneck)

    def forward(self, vectors: Tensor) -> Tensor:
        """Transform vectors (N, L, width)."""
        normed = self.norm1(vectors)
        vectors = vectors + self.adapter1(self.attention(normed, normed, normed, need_weights=False)[0])
        return vectors + self.adapter2(self.mlp(self.norm2(vectors)))


class Adapter(nn.Module):
    """A bottleneck of two linear layers with a ReLU and a residual connection."""

    def __init__(self, width: int, bottleneck: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(width, bottleneck), nn.Linear(bottleneck, width)
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)

    def forward(self, vectors: Tensor) -> Tensor:
        """Transform vectors (N, L, width)."""
        return vectors + self.up(self.down(vectors).relu())
