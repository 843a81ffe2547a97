"""Models whose gradient determines the sample in closed form.

The keys (`tests.helpers.planted.keys`) read two parts of most models: `first`, a linear layer with a bias, and `front`,
the function from samples to the input of this layer.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor, nn

from rayfed.models.text_transformer import Block

WIDTH = 48
"""Number of units of hidden layers."""


class Rotate(nn.Module):
    """Multiply flat inputs (N, D) by a fixed orthogonal matrix."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("matrix", torch.linalg.qr(torch.randn(size, size))[0])

    def forward(self, flat: Tensor) -> Tensor:
        rotated: Tensor = flat @ self.matrix.T
        return rotated


class Round(nn.Module):
    """Round inputs to 16 levels."""

    def forward(self, flat: Tensor) -> Tensor:
        return (15 * flat).round() / 15


class Statistics(nn.Module):
    """Compute batch statistics of flat inputs (N, D), and return the inputs unchanged."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(size, affine=False)

    def forward(self, flat: Tensor) -> Tensor:
        self.norm(torch.stack([flat, flat + 1], 2))  # two values of each pixel, as batch norm refuses a single one
        return flat


class PerPixel(nn.Module):
    """Apply a trained scale and shift to each pixel."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))

    def forward(self, flat: Tensor) -> Tensor:
        return flat * self.weight + self.bias


class Cosine(nn.Module):
    """Classify features (N, F) by their cosine similarity with one vector per class."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.prototypes = nn.Parameter(torch.randn(classes, width))

    def forward(self, features: Tensor) -> Tensor:
        normal = nn.functional.normalize
        return 8 * normal(features, dim=1) @ normal(self.prototypes, dim=1).T


def build_front(kind: str, size: int) -> nn.Module:
    """Return the layer before the first linear layer."""
    if kind == "norm":
        return nn.LayerNorm(size, elementwise_affine=False)
    if kind == "none":
        return nn.Identity()
    if kind == "round":
        return Round()
    fronts = {"rotate": Rotate, "statistics": Statistics, "per pixel": PerPixel}
    return fronts[kind](size)


class Dense(nn.Module):
    """A front, a linear layer, an activation and a head."""

    def __init__(
        self,
        image_shape: tuple[int, ...],
        classes: int,
        activation: str = "ReLU",
        front: str = "none",
        cosine: bool = False,
        bias: bool = True,
    ) -> None:
        super().__init__()
        size = prod(image_shape)
        self.front = nn.Sequential(nn.Flatten(), build_front(front, size))
        self.first = nn.Linear(size, WIDTH, bias=bias)
        head = Cosine(WIDTH, classes) if cosine else nn.Linear(WIDTH, classes)
        self.rest = nn.Sequential(getattr(nn, activation)(), head)

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.rest(self.first(self.front(inputs)))
        return logits


class Traps(Dense):
    """Units with equal weights and different thresholds, so that few units differ between two samples."""

    def __init__(self, image_shape: tuple[int, ...], classes: int, units: int = 400) -> None:
        super().__init__(image_shape, classes)
        size = prod(image_shape)
        self.first, self.rest = nn.Linear(size, units), nn.Sequential(nn.ReLU(), nn.Linear(units, classes))
        with torch.no_grad():
            self.first.weight.fill_(1 / size)
            self.first.bias.copy_(-torch.linspace(0.1, 0.6, units))
            self.rest[1].weight.copy_(torch.randn(classes, 1).expand(classes, units) / 50)


class Levels(Dense):
    """A trained vector for each of 17 levels of each pixel, before a linear layer."""

    def __init__(self, image_shape: tuple[int, ...], classes: int) -> None:
        super().__init__(image_shape, classes)
        size = prod(image_shape)
        self.table, self.first = nn.Embedding(17 * size, 4), nn.Linear(4 * size, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        levels = (16 * inputs.flatten(1).clamp(0, 1)).round().long()
        rows = levels + 17 * torch.arange(levels.shape[1], device=inputs.device)
        logits: Tensor = self.rest(self.first(self.table(rows).flatten(1)))
        return logits


class LowRank(nn.Module):
    """A linear layer whose matrix is the product of two thin matrices."""

    def __init__(self, image_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(prod(image_shape), 6, bias=False), nn.Linear(6, WIDTH)
        self.head = nn.Linear(WIDTH, classes)

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.head(self.up(self.down(inputs.flatten(1))).tanh())
        return logits


class Squares(nn.Module):
    """A bilinear layer of the image with itself."""

    def __init__(self, image_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        size = prod(image_shape)
        self.first, self.head = nn.Bilinear(size, size, 16), nn.Linear(16, classes)

    def forward(self, inputs: Tensor) -> Tensor:
        flat = inputs.flatten(1)
        logits: Tensor = self.head(self.first(flat, flat).tanh())
        return logits


class GatedUnit(nn.Module):
    """A gated linear unit: the product of two linear layers with the same input."""

    def __init__(self, image_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(prod(image_shape), WIDTH), nn.Linear(prod(image_shape), WIDTH)
        self.head = nn.Linear(WIDTH, classes)

    def forward(self, inputs: Tensor) -> Tensor:
        flat = inputs.flatten(1)
        logits: Tensor = self.head(self.one(flat) * self.other(flat).sigmoid())
        return logits


class Convolutional(nn.Module):
    """A convolution, optional batch norm and an activation or pooling, before a linear layer on all features."""

    def __init__(
        self,
        image_shape: tuple[int, ...],
        classes: int,
        channels: int = 4,
        norm: bool = False,
        pooled: bool = False,
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(image_shape[0], channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels) if norm else nn.Identity()
        self.act: nn.Module = nn.AvgPool2d(2) if pooled else nn.LeakyReLU()
        features = channels * image_shape[1] * image_shape[2]
        self.first = nn.Linear(features // 4 if pooled else features, WIDTH)
        self.rest = nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, classes))

    def front(self, inputs: Tensor) -> Tensor:
        features: Tensor = self.act(self.norm(self.conv(inputs))).flatten(1)
        return features

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.rest(self.first(self.front(inputs)))
        return logits


class Patches(nn.Module):
    """A ViT with patches of 2 x 2, a class token and learnt positions."""

    def __init__(self, image_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        channels, height, width = image_shape
        self.patch = nn.Conv2d(channels, 32, 2, 2)
        self.token = nn.Parameter(torch.randn(1, 1, 32))
        self.places = nn.Parameter(torch.randn(1, height * width // 4 + 1, 32) / 5)
        self.block, self.head = Block(32, 4, 64), nn.Linear(32, classes)

    def forward(self, inputs: Tensor) -> Tensor:
        patches = self.patch(inputs).flatten(2).transpose(1, 2)
        sequence = torch.cat([self.token.expand(len(patches), -1, -1), patches], 1)
        logits: Tensor = self.head(self.block(sequence + self.places)[:, 0])
        return logits


class NormAlone(nn.Module):
    """A frozen layer and a frozen head. Only the scale and shift of the norm between them are trained."""

    def __init__(self, image_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.frozen = nn.Linear(prod(image_shape), 2 * prod(image_shape)).requires_grad_(False)
        self.norm = nn.LayerNorm(self.frozen.out_features)
        self.head = nn.Linear(self.frozen.out_features, classes).requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.frozen(images.flatten(1))).tanh())
        return logits


class Placed(nn.Module):
    """Texts: a table of tokens, learnt positions and a transformer layer of PyTorch."""

    def __init__(self, image_shape: tuple[int, ...], classes: int, vocabulary: int = 300) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(vocabulary, 32), nn.Embedding(image_shape[0], 32)
        self.block = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(32, classes)

    def forward(self, texts: Tensor) -> Tensor:
        sequence = self.table(texts) + self.places(torch.arange(texts.shape[1], device=texts.device))
        logits: Tensor = self.head(self.block(sequence).mean(1))
        return logits


class Tables(nn.Module):
    """Texts: a table of tokens for each position."""

    def __init__(self, image_shape: tuple[int, ...], classes: int, vocabulary: int = 300) -> None:
        super().__init__()
        self.vocabulary, self.table = vocabulary, nn.Embedding(image_shape[0] * vocabulary, 16)
        self.head = nn.Linear(image_shape[0] * 16, classes)

    def forward(self, texts: Tensor) -> Tensor:
        rows = texts + self.vocabulary * torch.arange(texts.shape[1], device=texts.device)
        logits: Tensor = self.head(self.table(rows).flatten(1).tanh())
        return logits


class Added(nn.Module):
    """Texts: a table of tokens for each position, and the sum over positions."""

    def __init__(self, image_shape: tuple[int, ...], classes: int, vocabulary: int = 300) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(image_shape[0], vocabulary, 16))
        self.head = nn.Linear(16, classes)

    def forward(self, texts: Tensor) -> Tensor:
        places = torch.arange(texts.shape[1], device=texts.device)
        logits: Tensor = self.head(self.table[places, texts].sum(1).tanh())
        return logits


class Flat(nn.Module):
    """Texts: a linear layer on the vectors of all positions together."""

    def __init__(self, image_shape: tuple[int, ...], classes: int, vocabulary: int = 300) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, 16)
        self.first, self.head = nn.Linear(16 * image_shape[0], 32), nn.Linear(32, classes)

    def forward(self, texts: Tensor) -> Tensor:
        logits: Tensor = self.head(self.first(self.table(texts).flatten(1)).tanh())
        return logits


class Numbers(nn.Module):
    """Texts: a linear layer on the numbers of the tokens."""

    def __init__(self, image_shape: tuple[int, ...], classes: int, vocabulary: int = 300) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.first, self.head = nn.Linear(image_shape[0], 32), nn.Linear(32, classes)

    def forward(self, texts: Tensor) -> Tensor:
        logits: Tensor = self.head(self.first(texts.to(self.first.weight.dtype) / self.vocabulary).tanh())
        return logits


class Read(nn.Module):
    """Texts: a table of tokens and a recurrent layer."""

    def __init__(self, image_shape: tuple[int, ...], classes: int, vocabulary: int = 300, kind: str = "LSTM") -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, 24)
        self.layer, self.head = getattr(nn, kind)(24, 32, batch_first=True), nn.Linear(32, classes)

    def forward(self, texts: Tensor) -> Tensor:
        features, _ = self.layer(self.table(texts))
        logits: Tensor = self.head(features[:, -1])
        return logits
