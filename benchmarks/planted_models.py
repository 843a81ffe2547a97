"""Models whose gradient holds the sample in closed form, as users' own modules: by architecture, norm, front and head.

Each has the parts that `benchmarks.planted_keys` reads: `front`, what lies before the first layer with a bias; `first`,
that layer, whose row of the weight's gradient over its entry of the bias's is what entered it.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor, nn

from rayfed.models.text_transformer import Block

WIDTH = 48
"""Units of hidden layers."""


class Affine(nn.Module):
    """A fixed affine map of flat inputs: x times a matrix, and a shift."""

    def __init__(self, matrix: Tensor, shift: float = 0.0) -> None:
        super().__init__()
        self.register_buffer("matrix", matrix)
        self.shift = shift

    def forward(self, flat: Tensor) -> Tensor:
        """Map (N, D) to (N, D')."""
        mapped: Tensor = flat @ self.matrix.T + self.shift
        return mapped


class Rounded(nn.Module):
    """Steps of 4 bits."""

    def forward(self, flat: Tensor) -> Tensor:
        """Round (N, D)."""
        return (15 * flat).round() / 15


class Statistics(nn.Module):
    """A batch norm that sees every pixel twice, so that the mean it returns is the image, half a step brighter."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(size, affine=False)

    def forward(self, flat: Tensor) -> Tensor:
        """Count the statistics of (N, D) and hand it on."""
        self.norm(torch.stack([flat, flat + 1], 2))
        return flat


class RunningMean(nn.Module):
    """Takes off a running mean of what it has seen."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))

    def forward(self, flat: Tensor) -> Tensor:
        """Centre (N, D)."""
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(0.1 * flat.mean(0))
        centred: Tensor = flat - self.mean
        return centred


class PerPixel(nn.Module):
    """A trained scale and shift of each pixel: the slope in the scale is the pixel times that in the shift."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))

    def forward(self, flat: Tensor) -> Tensor:
        """Map (N, D) to the same shape."""
        return flat * self.weight + self.bias


class Cosine(nn.Module):
    """A head that compares directions."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.prototypes = nn.Parameter(torch.randn(classes, width))

    def forward(self, features: Tensor) -> Tensor:
        """Map features (N, F) to logits (N, K)."""
        normal = nn.functional.normalize
        return 8 * normal(features, dim=1) @ normal(self.prototypes, dim=1).T


class Twice(nn.Module):
    """A head of two linear layers, whose answers are added."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(width, classes), nn.Linear(width, classes)

    def forward(self, features: Tensor) -> Tensor:
        """Map features (N, F) to logits (N, K)."""
        total: Tensor = self.one(features) + self.other(features.tanh())
        return total


def _front(kind: str, size: int) -> nn.Module:
    eye = torch.eye(size)
    fixed = {
        "none": nn.Identity,
        "normalise": lambda: Affine(4 * eye, -2.0),
        "permute": lambda: Affine(eye[torch.randperm(size)]),
        "rotate": lambda: Affine(torch.linalg.qr(torch.randn(size, size))[0]),
        "widen": lambda: Affine(torch.randn(2 * size, size) / size**0.5, 0.1),
        "round": Rounded,
        "the upper half": lambda: Affine(eye[: size // 2]),
        "the middle": lambda: Affine(eye[size // 4 : size - size // 4]),
        "statistics": lambda: Statistics(size),
        "running mean": lambda: RunningMean(size),
        "norm": lambda: nn.LayerNorm(size, elementwise_affine=False),
    }
    return fixed[kind]()


def _head(kind: str, classes: int) -> nn.Module:
    heads = {
        "linear": lambda: nn.Linear(WIDTH, classes),
        "nobias": lambda: nn.Linear(WIDTH, classes, bias=False),
        "cosine": lambda: Cosine(WIDTH, classes),
        "twice": lambda: Twice(WIDTH, classes),
        "deep": lambda: nn.Sequential(nn.Linear(WIDTH, 24), nn.Tanh(), nn.Linear(24, classes)),
        "conv": lambda: nn.Sequential(nn.Unflatten(1, (WIDTH, 1)), nn.Conv1d(WIDTH, classes, 1), nn.Flatten()),
    }
    return heads[kind]()


class Dense(nn.Module):
    """A front, a linear layer on all of it, and a head."""

    def __init__(
        self,
        image_shape: tuple[int, ...],
        classes: int,
        activation: str = "ReLU",
        front: str = "none",
        head: str = "linear",
        bias: bool = True,
    ) -> None:
        super().__init__()
        size = prod(image_shape)
        self.front = nn.Sequential(nn.Flatten(), _front(front, size))
        with torch.no_grad():
            width = self.front(torch.zeros(2, *image_shape)).shape[1]
        self.first = nn.Linear(width, WIDTH, bias=bias)
        self.rest = nn.Sequential(getattr(nn, activation)(), _head(head, classes))

    def forward(self, inputs: Tensor) -> Tensor:
        """Map inputs (N, *shape) to logits (N, K)."""
        logits: Tensor = self.rest(self.first(self.front(inputs)))
        return logits


class Scaled(Dense):
    """The same, behind a trained scale and shift of each pixel."""

    def __init__(self, image_shape: tuple[int, ...], classes: int) -> None:
        super().__init__(image_shape, classes, activation="Tanh")
        self.front = nn.Sequential(nn.Flatten(), PerPixel(prod(image_shape)))


class Regression(nn.Module):
    """One linear layer and nothing else."""

    def __init__(self, image_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.front, self.first = nn.Flatten(), nn.Linear(prod(image_shape), classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map inputs (N, *shape) to logits (N, K)."""
        logits: Tensor = self.first(self.front(inputs))
        return logits


class Traps(Dense):
    """Units that open one after the other as an image gets brighter, and count alike for what follows."""

    def __init__(self, image_shape: tuple[int, ...], classes: int, units: int = 400) -> None:
        super().__init__(image_shape, classes)
        size = prod(image_shape)
        self.first, self.rest = nn.Linear(size, units), nn.Sequential(nn.ReLU(), nn.Linear(units, classes))
        with torch.no_grad():
            self.first.weight.fill_(1 / size)
            self.first.bias.copy_(-torch.linspace(0.1, 0.6, units))
            self.rest[1].weight.copy_(torch.randn(classes, 1).expand(classes, units) / 50)


class Recurrent(nn.Module):
    """A recurrent layer that reads the whole image in one step."""

    def __init__(self, image_shape: tuple[int, ...], classes: int, kind: str = "RNN") -> None:
        super().__init__()
        self.front, self.layer = nn.Flatten(), getattr(nn, kind)(prod(image_shape), 32, batch_first=True)
        self.head = nn.Linear(32, classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map inputs (N, *shape) to logits (N, K)."""
        seen, _ = self.layer(self.front(inputs)[:, None])
        logits: Tensor = self.head(seen[:, 0])
        return logits


class Local(nn.Module):
    """Weights and a bias of their own for each patch of 2 x 2."""

    def __init__(self, image_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        channels, height, width = image_shape
        places = height * width // 4
        self.weight = nn.Parameter(torch.randn(places, 3, 4 * channels) / 2)
        self.bias = nn.Parameter(torch.randn(places, 3) / 5)
        self.head = nn.Linear(3 * places, classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map images (N, C, H, W) to logits (N, K)."""
        patches = nn.functional.unfold(inputs, 2, stride=2)
        seen = torch.einsum("pok,nkp->npo", self.weight, patches) + self.bias
        logits: Tensor = self.head(seen.tanh().flatten(1))
        return logits


class Thermometer(Dense):
    """A 1 for each of 16 thresholds that a pixel passes, and a linear layer."""

    def __init__(self, image_shape: tuple[int, ...], classes: int) -> None:
        super().__init__(image_shape, classes)
        self.first = nn.Linear(16 * prod(image_shape), WIDTH)
        self.register_buffer("steps", (torch.arange(16) + 0.5) / 16)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map inputs (N, *shape) to logits (N, K)."""
        passed = (inputs.flatten(1)[..., None] > self.steps).to(inputs.dtype)
        logits: Tensor = self.rest(self.first(passed.flatten(1)))
        return logits


class Levels(Dense):
    """A trained vector for each of 17 levels of each pixel, and a linear layer on all."""

    def __init__(self, image_shape: tuple[int, ...], classes: int) -> None:
        super().__init__(image_shape, classes)
        size = prod(image_shape)
        self.table, self.first = nn.Embedding(17 * size, 4), nn.Linear(4 * size, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map inputs (N, *shape) to logits (N, K)."""
        levels = (16 * inputs.flatten(1).clamp(0, 1)).round().long()
        rows = levels + 17 * torch.arange(levels.shape[1], device=inputs.device)
        logits: Tensor = self.rest(self.first(self.table(rows).flatten(1)))
        return logits


class Waves(Dense):
    """Sines and cosines of each pixel at six octaves, and a linear layer."""

    def __init__(self, image_shape: tuple[int, ...], classes: int) -> None:
        super().__init__(image_shape, classes)
        self.first = nn.Linear(12 * prod(image_shape), WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map inputs (N, *shape) to logits (N, K)."""
        flat = inputs.flatten(1)
        seen = [wave(2.0**octave * 3.1 * flat) for octave in range(6) for wave in (torch.sin, torch.cos)]
        logits: Tensor = self.rest(self.first(torch.cat(seen, 1)))
        return logits


class LowRank(nn.Module):
    """A linear layer whose matrix is the product of two thin ones."""

    def __init__(self, image_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(prod(image_shape), 6, bias=False), nn.Linear(6, WIDTH)
        self.head = nn.Linear(WIDTH, classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map inputs (N, *shape) to logits (N, K)."""
        logits: Tensor = self.head(self.up(self.down(inputs.flatten(1))).tanh())
        return logits


class Sparse(nn.Module):
    """A linear layer of which a fixed half of the weights counts."""

    def __init__(self, image_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(prod(image_shape), WIDTH), nn.Linear(WIDTH, classes)
        self.register_buffer("mask", (torch.rand(self.first.weight.shape) < 0.5).float())

    def forward(self, inputs: Tensor) -> Tensor:
        """Map inputs (N, *shape) to logits (N, K)."""
        seen = nn.functional.linear(inputs.flatten(1), self.first.weight * self.mask, self.first.bias)
        logits: Tensor = self.head(seen.tanh())
        return logits


class Normed(nn.Module):
    """A linear layer whose rows are a length times a direction."""

    def __init__(self, image_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.weight_norm(nn.Linear(prod(image_shape), WIDTH))
        self.head = nn.Linear(WIDTH, classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map inputs (N, *shape) to logits (N, K)."""
        logits: Tensor = self.head(self.first(inputs.flatten(1)).tanh())
        return logits


class Squares(nn.Module):
    """A bilinear layer of the image with itself."""

    def __init__(self, image_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        size = prod(image_shape)
        self.first, self.head = nn.Bilinear(size, size, 16), nn.Linear(16, classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map inputs (N, *shape) to logits (N, K)."""
        flat = inputs.flatten(1)
        logits: Tensor = self.head(self.first(flat, flat).tanh())
        return logits


class Gated(nn.Module):
    """A trained gate of each pixel, and a shift behind it."""

    def __init__(self, image_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        size = prod(image_shape)
        self.gate, self.shift = nn.Parameter(torch.randn(size)), nn.Parameter(torch.zeros(size))
        self.rest = nn.Sequential(nn.Tanh(), nn.Linear(size, WIDTH, bias=False), nn.Tanh(), nn.Linear(WIDTH, classes))

    def forward(self, inputs: Tensor) -> Tensor:
        """Map inputs (N, *shape) to logits (N, K)."""
        logits: Tensor = self.rest(inputs.flatten(1) * self.gate.sigmoid() + self.shift)
        return logits


class Unit(nn.Module):
    """A gated linear unit: two first layers, whose products a head sees."""

    def __init__(self, image_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.one, self.other = (nn.Linear(prod(image_shape), WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map inputs (N, *shape) to logits (N, K)."""
        flat = inputs.flatten(1)
        logits: Tensor = self.head(self.one(flat) * self.other(flat).sigmoid())
        return logits


class Lines(nn.Module):
    """A sequence of the image's rows with learnt places, and attention."""

    def __init__(self, image_shape: tuple[int, ...], classes: int, frozen: bool = False) -> None:
        super().__init__()
        channels, height, width = image_shape
        self.embed = nn.Linear(channels * width, 32, bias=False).requires_grad_(not frozen)
        self.places = nn.Parameter(torch.randn(height, 32) / 5)
        self.block, self.head = Block(32, 4, 64), nn.Linear(32, classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map images (N, C, H, W) to logits (N, K)."""
        sequence = self.embed(inputs.transpose(1, 2).flatten(2)) + self.places
        logits: Tensor = self.head(self.block(sequence).mean(1))
        return logits


class Shared(nn.Module):
    """One linear layer, used twice."""

    def __init__(self, image_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        size = prod(image_shape)
        self.first, self.head = nn.Linear(size, size), nn.Linear(size, classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map inputs (N, *shape) to logits (N, K)."""
        logits: Tensor = self.head(self.first(self.first(inputs.flatten(1)).tanh()).tanh())
        return logits


NORMS = {
    "none": nn.Identity,
    "batch": nn.BatchNorm2d,
    "group": lambda channels: nn.GroupNorm(2, channels),
    "layer": lambda channels: nn.GroupNorm(1, channels),
}


class Convolutional(nn.Module):
    """A convolution, a norm and an activation before a linear layer that sees all of the features."""

    def __init__(
        self,
        image_shape: tuple[int, ...],
        classes: int,
        activation: str = "LeakyReLU",
        norm: str = "none",
        channels: int = 4,
        stride: int = 1,
        separable: bool = False,
    ) -> None:
        super().__init__()
        self.conv: nn.Module = nn.Conv2d(image_shape[0], channels, 3, stride, padding=1)
        if separable:
            self.conv = nn.Sequential(self.conv, nn.Conv2d(channels, channels, 3, padding=1, groups=channels))
        self.norm, self.act = NORMS[norm](channels), getattr(nn, activation)()
        with torch.no_grad():
            features = self.conv(torch.zeros(1, *image_shape)).numel()
        self.first = nn.Linear(features, WIDTH)
        self.rest = nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, classes))

    def front(self, inputs: Tensor) -> Tensor:
        """Return the features (N, F) of inputs (N, C, H, W)."""
        features: Tensor = self.act(self.norm(self.conv(inputs))).flatten(1)
        return features

    def forward(self, inputs: Tensor) -> Tensor:
        """Map inputs (N, C, H, W) to logits (N, K)."""
        logits: Tensor = self.rest(self.first(self.front(inputs)))
        return logits


class Pooled(Convolutional):
    """The same, with the mean of every two by two features, and without an activation before it."""

    def __init__(self, image_shape: tuple[int, ...], classes: int) -> None:
        super().__init__(image_shape, classes, activation="Identity", channels=16)
        self.act = nn.AvgPool2d(2)
        self.first = nn.Linear(self.first.in_features // 4, WIDTH)


class Residual(nn.Module):
    """Two residual blocks that move the image less than it is large, so that they can be undone step by step."""

    def __init__(self, image_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        channels = image_shape[0]
        self.blocks = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.first = nn.Linear(prod(image_shape), WIDTH)
        self.rest = nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, classes))

    def forward(self, inputs: Tensor) -> Tensor:
        """Map inputs (N, C, H, W) to logits (N, K)."""
        for block in self.blocks:
            inputs = inputs + 0.2 * block(inputs).tanh()
        logits: Tensor = self.rest(self.first(inputs.flatten(1)))
        return logits


class Patches(nn.Module):
    """A ViT with learnt places: patches of 2 x 2, one block, a class token or the mean of all."""

    def __init__(
        self, image_shape: tuple[int, ...], classes: int, token: bool = False, fused: bool = False, bias: bool = True
    ) -> None:
        super().__init__()
        channels, height, width = image_shape
        self.patch = nn.Conv2d(channels, 32, 2, 2, bias=bias)
        self.token = nn.Parameter(torch.randn(1, 1, 32)) if token else None
        self.places = nn.Parameter(torch.randn(1, height * width // 4 + token, 32) / 5)
        self.block: nn.Module = Block(32, 4, 64)
        if fused:
            self.block = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(32, classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map images (N, C, H, W) to logits (N, K)."""
        sequence = self.patch(inputs).flatten(2).transpose(1, 2)
        if self.token is not None:
            sequence = torch.cat([self.token.expand(len(sequence), -1, -1), sequence], 1)
        seen = self.block(sequence + self.places)
        logits: Tensor = self.head(seen.mean(1) if self.token is None else seen[:, 0])
        return logits


class Placed(nn.Module):
    """Texts: a table of tokens, learnt places, and PyTorch's own transformer layer."""

    def __init__(self, image_shape: tuple[int, ...], classes: int, vocabulary: int = 300) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(vocabulary, 32), nn.Embedding(image_shape[0], 32)
        self.block = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(32, classes)

    def forward(self, texts: Tensor) -> Tensor:
        """Map texts (N, L) to logits (N, K)."""
        sequence = self.table(texts) + self.places(torch.arange(texts.shape[1], device=texts.device))
        logits: Tensor = self.head(self.block(sequence).mean(1))
        return logits


class Tables(nn.Module):
    """Texts: a table of tokens for each place."""

    def __init__(self, image_shape: tuple[int, ...], classes: int, vocabulary: int = 300) -> None:
        super().__init__()
        self.vocabulary, self.table = vocabulary, nn.Embedding(image_shape[0] * vocabulary, 16)
        self.head = nn.Linear(image_shape[0] * 16, classes)

    def forward(self, texts: Tensor) -> Tensor:
        """Map texts (N, L) to logits (N, K)."""
        rows = texts + self.vocabulary * torch.arange(texts.shape[1], device=texts.device)
        logits: Tensor = self.head(self.table(rows).flatten(1).tanh())
        return logits


class Dummies(nn.Module):
    """Texts: a 1 for each token at its place, and a linear layer."""

    def __init__(self, image_shape: tuple[int, ...], classes: int, vocabulary: int = 300) -> None:
        super().__init__()
        self.vocabulary, self.first = vocabulary, nn.Linear(image_shape[0] * vocabulary, 32)
        self.head = nn.Linear(32, classes)

    def forward(self, texts: Tensor) -> Tensor:
        """Map texts (N, L) to logits (N, K)."""
        hot = nn.functional.one_hot(texts, self.vocabulary).float().flatten(1)
        logits: Tensor = self.head(self.first(hot).tanh())
        return logits


class Joined(nn.Module):
    """Texts: the vectors of all places beside each other, and a linear layer."""

    def __init__(self, image_shape: tuple[int, ...], classes: int, vocabulary: int = 300) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, 16)
        self.first, self.head = nn.Linear(16 * image_shape[0], 32), nn.Linear(32, classes)

    def forward(self, texts: Tensor) -> Tensor:
        """Map texts (N, L) to logits (N, K)."""
        logits: Tensor = self.head(self.first(self.table(texts).flatten(1)).tanh())
        return logits


class Added(nn.Module):
    """Texts: a table of tokens for each place, and the sum of what is read."""

    def __init__(self, image_shape: tuple[int, ...], classes: int, vocabulary: int = 300) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(image_shape[0], vocabulary, 16))
        self.head = nn.Linear(16, classes)

    def forward(self, texts: Tensor) -> Tensor:
        """Map texts (N, L) to logits (N, K)."""
        places = torch.arange(texts.shape[1], device=texts.device)
        logits: Tensor = self.head(self.table[places, texts].sum(1).tanh())
        return logits


class Numbers(nn.Module):
    """Texts: each token's number as it is, and a linear layer."""

    def __init__(self, image_shape: tuple[int, ...], classes: int, vocabulary: int = 300) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.first, self.head = nn.Linear(image_shape[0], 32), nn.Linear(32, classes)

    def forward(self, texts: Tensor) -> Tensor:
        """Map texts (N, L) to logits (N, K)."""
        logits: Tensor = self.head(self.first(texts.to(self.first.weight.dtype) / self.vocabulary).tanh())
        return logits


class NormAlone(nn.Module):
    """A frozen layer and a frozen head; trained are the scale and shift of the norm between them, alone."""

    def __init__(self, image_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.frozen = nn.Linear(prod(image_shape), 2 * prod(image_shape)).requires_grad_(False)
        self.norm = nn.LayerNorm(self.frozen.out_features)
        self.head = nn.Linear(self.frozen.out_features, classes).requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (N, C, H, W) to logits (N, K)."""
        logits: Tensor = self.head(self.norm(self.frozen(images.flatten(1))).tanh())
        return logits


class SlopesAlone(nn.Module):
    """A frozen layer and a frozen head; trained are biases between them, and slopes of what is below 0."""

    def __init__(self, image_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.frozen = nn.Linear(prod(image_shape), 4 * prod(image_shape)).requires_grad_(False)
        self.bias = nn.Parameter(torch.zeros(self.frozen.out_features))
        self.rectified = nn.PReLU(self.frozen.out_features)
        self.head = nn.Linear(self.frozen.out_features, classes).requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (N, C, H, W) to logits (N, K)."""
        logits: Tensor = self.head(self.rectified(self.frozen(images.flatten(1)) + self.bias))
        return logits


class Read(nn.Module):
    """Texts: a table of tokens, and a recurrent layer that reads one after the other."""

    def __init__(self, image_shape: tuple[int, ...], classes: int, vocabulary: int = 300, kind: str = "LSTM") -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, 24)
        self.layer, self.head = getattr(nn, kind)(24, 32, batch_first=True), nn.Linear(32, classes)

    def forward(self, texts: Tensor) -> Tensor:
        """Map texts (N, L) to logits (N, K)."""
        seen, _ = self.layer(self.table(texts))
        logits: Tensor = self.head(seen[:, -1])
        return logits
