"""Define the small vision transformer of `vit.yaml`, with options that affect the leakage through its positions."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Vit(nn.Module):
    """A vision transformer with a class token or mean pooling, and with learned or fixed positions.

    The blocks are PyTorch's. Fixed positions are sines and cosines (Vaswani et al. 2017, section 3.5).
    Source: Dosovitskiy et al. 2020, "An Image is Worth 16x16 Words", section 3.1.
    """

    def __init__(
        self, image_shape: tuple[int, int, int], classes: int, patch: int = 4, width: int = 96, blocks: int = 3,
        token: bool = True, learned: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        channels, height, across = image_shape
        places = (height // patch) * (across // patch) + token
        self.embed = nn.Conv2d(channels, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width)) if token else None
        if learned:
            self.positions = nn.Parameter(0.02 * torch.randn(1, places, width))
        else:
            self.register_buffer("positions", _waves(places, width)[None])
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(blocks)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (N, classes) for images (N, C, H, W)."""
        vectors = self.embed(images).flatten(2).transpose(1, 2)
        if self.token is not None:
            vectors = torch.cat([self.token.expand(len(vectors), -1, -1), vectors], 1)
        vectors = vectors + self.positions
        for block in self.blocks:
            vectors = block(vectors)
        vectors = self.norm(vectors)
        return self.head(vectors[:, 0] if self.token is not None else vectors.mean(1))


def _waves(places: int, width: int) -> Tensor:
    angles = torch.arange(places)[:, None] * 10_000 ** (-torch.arange(0, width, 2) / width)
    return torch.stack([angles.sin(), angles.cos()], 2).flatten(1)
