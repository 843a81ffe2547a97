"""Metrics of inference attacks, which do not reconstruct samples."""

from __future__ import annotations

import torch
from torch import Tensor

_NEIGHBOURS = 5


def correct(probability: Tensor, holds: bool) -> float:
    """Return 1 if the attack's probability of yes (1,) predicts the truth of a yes-or-no question, else 0."""
    return float((probability.item() > 0.5) == holds)


def class_share(images: Tensor, label: int, known: Tensor, known_labels: Tensor) -> float:
    """Return the share of images (G, C, H, W) that an independent classifier assigns to a class.

    The classifier is a vote of the five nearest known images (M, C, H, W), with labels (M,).
    """
    neighbours = min(_NEIGHBOURS, len(known))
    nearest = torch.cdist(images.flatten(1), known.flatten(1)).topk(neighbours, largest=False).indices
    votes = known_labels[nearest].mode(dim=1).values
    return float((votes == label).float().mean())


def nearest(images: Tensor, among: Tensor) -> Tensor:
    """Return for each image (G, C, H, W) the nearest image in `among` (M, C, H, W), by Euclidean distance."""
    return among[torch.cdist(images.flatten(1), among.flatten(1)).argmin(1)]
