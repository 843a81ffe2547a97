"""The work that every engine does here: one epoch on 64 images in batches of 32, plain SGD, by LeNet-5 or ResNet-18.

Both need PyTorch and numpy alone, so that the environments of other engines can import them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

SAMPLES = 64
"""Images of one client."""
BATCH = 32
LR = 0.05


class LeNet5(nn.Sequential):
    """LeCun et al. 1998, with ReLU and max pooling: 61,706 parameters for one channel and 10 classes."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 6, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(400, 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
            nn.Linear(84, 10),
        )


class _Block(nn.Module):
    """Two convolutions, and the way past them."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(before, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1, bias=False),
            nn.BatchNorm2d(width),
        )
        past = [nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm2d(width)]
        self.past = nn.Sequential(*(past if stride > 1 or before != width else []))

    def forward(self, inputs: Tensor) -> Tensor:
        return F.relu(self.layers(inputs) + self.past(inputs))


class ResNet18(nn.Sequential):
    """He et al. 2016 for images of 32 x 32, which are not made smaller before the blocks: 11,173,962 parameters."""

    def __init__(self) -> None:
        sizes = [(64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1)]
        sizes += [(128, 256, 2), (256, 256, 1), (256, 512, 2), (512, 512, 1)]
        super().__init__(
            nn.Conv2d(3, 64, 3, padding=1, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            *(_Block(*size) for size in sizes),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(512, 10),
        )


MODELS: dict[str, type[nn.Module]] = {"lenet5": LeNet5, "resnet18": ResNet18}


@dataclass(frozen=True)
class Work:
    """A federation: how many clients there are, how many of them train in a round, and what."""

    clients: int
    per_round: int
    model: str = "lenet5"
    """A name of `MODELS`."""

    def __str__(self) -> str:
        return f"{self.model}, {self.per_round} of {self.clients}"

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of an image."""
        return (1, 28, 28) if self.model == "lenet5" else (3, 32, 32)

    def build(self) -> nn.Module:
        """The model, with weights of its own."""
        return MODELS[self.model]()


@cache
def data(clients: int, shape: tuple[int, int, int] = (1, 28, 28)) -> tuple[np.ndarray, np.ndarray]:
    """Images (N, C, H, W) uint8 and labels (N,) int64; client i holds rows 64 i to 64 i + 63.

    Noise: what an epoch costs does not depend on what is in the images.
    """
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (clients * SAMPLES, *shape), dtype=np.uint8)
    return images, rng.integers(0, 10, len(images))


def rows_of(client: int) -> slice:
    """Where a client's samples lie in `data`."""
    return slice(client * SAMPLES, (client + 1) * SAMPLES)


def train(model: nn.Module, images: np.ndarray, labels: np.ndarray) -> None:
    """One client's epoch, as everyone writes it."""
    optimiser = torch.optim.SGD(model.parameters(), lr=LR)
    inputs, targets = torch.from_numpy(images).float().div_(255), torch.from_numpy(labels)
    for index in torch.randperm(len(targets)).split(BATCH):
        optimiser.zero_grad()
        F.cross_entropy(model(inputs[index]), targets[index]).backward()
        optimiser.step()


class PlainLoop:
    """Federated averaging without an engine: one process, one thread, client after client."""

    def __init__(self, work: Work) -> None:
        torch.set_num_threads(1)
        self._images, self._labels = data(work.clients, work.shape)
        self._model = work.build()
        self._weights = {name: w.clone() for name, w in self._model.state_dict().items()}
        self.round([0])  # the first optimiser of a process imports for seconds

    def round(self, clients: list[int]) -> None:
        """Train these clients from the global weights and make their mean the new ones."""
        total: dict[str, Tensor] = {}
        for client in clients:
            self._model.load_state_dict(self._weights)
            train(self._model, self._images[rows_of(client)], self._labels[rows_of(client)])
            for name, w in self._model.state_dict().items():
                total[name] = total[name] + w if name in total else w.clone()
        self._weights = {name: w / len(clients) for name, w in total.items()}
