"""Helpers for tests of texts: parts of real texts, and small models."""

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
    """Return training texts (N, 16) and their labels."""
    data = authors()
    rows = torch.randperm(len(data.train_labels), generator=torch.Generator().manual_seed(seed))[:count].numpy()
    return torch.from_numpy(data.train_images[rows]), torch.from_numpy(data.train_labels[rows])


def reader(name: str = "text_transformer", epochs: int = 0, seed: int = 0, **parameters: int) -> nn.Module:
    """Return a model for sixteen tokens, trained on a part of the texts for this number of epochs."""
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
    """Return the share of tokens at their places, with texts in the best order."""
    from scipy.optimize import linear_sum_assignment

    wrong = (true[:, None] != guess[None]).sum(-1)
    return 1 - float(wrong[linear_sum_assignment(wrong)].sum()) / true.numel()
