"""What the tests of texts share: real windows, small models of them, and what a server sees of one gradient."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor, nn

from rayfed.data.base import Dataset
from rayfed.models.build import build_model
from rayfed.registry import build


@lru_cache
def authors() -> Dataset:
    data: Dataset = build("datasets", "text", {}).load()
    return data


def windows(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Some training texts (N, 16) and their labels."""
    data = authors()
    rows = torch.randperm(len(data.train_labels), generator=torch.Generator().manual_seed(seed))[:count].numpy()
    return torch.from_numpy(data.train_images[rows]), torch.from_numpy(data.train_labels[rows])


def reader(name: str = "text_transformer", epochs: int = 0, seed: int = 0, **parameters: int) -> nn.Module:
    """A model of sixteen tokens, trained on a part of the texts for so many epochs."""
    model = build_model(name, parameters, authors().sample, 3, seed)
    images, labels = windows(1200)
    optimiser = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    for _ in range(epochs):
        for rows in torch.arange(len(labels)).split(32):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(images[rows]), labels[rows]).backward()
            optimiser.step()
    return model


def in_place(true: Tensor, guess: Tensor) -> float:
    """The share of tokens in their places, of texts in the order that suits best."""
    from scipy.optimize import linear_sum_assignment

    wrong = (true[:, None] != guess[None]).sum(-1)
    return 1 - float(wrong[linear_sum_assignment(wrong)].sum()) / true.numel()
