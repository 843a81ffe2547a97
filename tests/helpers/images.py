"""Images of the data set `digits`."""

from __future__ import annotations

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor

from rayfed.registry import build
from tests.helpers.attack_fixtures import digit, seeded


def digits(count: int, seed: int, classes: int = 10) -> tuple[Tensor, Tensor]:
    chosen = torch.randperm(1700, generator=seeded(seed)[0])[:count].tolist()
    return torch.cat([digit(i) for i in chosen]), torch.tensor([int(load_digits().target[i]) % classes for i in chosen])


def large_digits(count: int, seed: int) -> tuple[Tensor, Tensor]:
    data = build("datasets", "digits", {"size": 28}).load()
    rows = np.random.default_rng(seed).choice(len(data.train_labels), count, replace=False)
    return torch.from_numpy(data.train_images[rows]).float() / 255, torch.from_numpy(data.train_labels[rows])
