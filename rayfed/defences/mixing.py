"""Shared functions of the defences that train on mixtures of images."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from rayfed.core import seeds
from rayfed.core.subsets import subsets
from rayfed.defences.base import Batch, DataMethod, Task


def pool(next: DataMethod, task: Task) -> tuple[int, Tensor, Tensor]:
    """Return the number of the task's samples, and all images (M, C, H, W) and labels (M, K) of the client."""
    own = next(task)
    parts = [own] if task.others is None else [own, next(task.replace(data=task.others, others=None))]
    labels = [part.labels if part.labels.ndim == 2 else F.one_hot(part.labels, task.classes).float() for part in parts]
    return len(own.labels), torch.cat([part.inputs for part in parts]), torch.cat(labels)


def partners(samples: int, choices: int, others: int, draw: np.random.Generator) -> np.ndarray:
    """Sample the row indices of `samples` mixtures, (N, 1 + others): first the sample itself, then any rows."""
    return np.column_stack([np.arange(samples), draw.integers(choices, size=(samples, others))])


def distinct_partners(samples: int, choices: int, others: int, draw: np.random.Generator) -> np.ndarray:
    """Sample the row indices of mixtures as `partners` does, but without repetition within a mixture."""
    own = np.arange(samples)[:, None]
    drawn = subsets(draw, samples, choices - 1, others)
    return np.column_stack([own, drawn + (drawn >= own)])  # skip the sample itself


def blend(tensors: Tensor, rows: np.ndarray, coefficients: np.ndarray) -> Tensor:
    """Return weighted sums (N, ...) of rows (N, k) of `tensors` (M, ...), with weights `coefficients` (N, k)."""
    index = torch.from_numpy(rows).to(tensors.device)
    weights = torch.from_numpy(coefficients).to(tensors)
    parts = [tensors[r] * w.view(-1, *[1] * (tensors.ndim - 1)) for r, w in zip(index.T, weights.T, strict=True)]
    return torch.stack(parts).sum(0)


def numpy_draws(task: Task) -> np.random.Generator:
    """Return a NumPy generator that is seeded from the task's generator."""
    return seeds.numpy_generator(seeds.sample_key(task.generator))


def mixtures(images: Tensor, labels: Tensor) -> Batch:
    """Return mixed images and labels as a batch, with pixels clamped to [0, 1] because of rounding."""
    return Batch(images.clamp(0, 1), labels)
