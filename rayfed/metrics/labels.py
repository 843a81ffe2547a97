"""Label inference as a result of its own."""

from __future__ import annotations

import torch
from torch import Tensor


def label_accuracy(true: Tensor, found: Tensor) -> float:
    """The share of a batch's labels that were found, as a multiset: (N,) int64 twice to a number in [0, 1].

    Order does not count, multiplicity does: of [1, 1, 2], the guess [2, 1, 0] finds two thirds.
    """
    classes = int(torch.cat([true, found]).max()) + 1
    shared = torch.minimum(true.bincount(minlength=classes), found.bincount(minlength=classes))
    return int(shared.sum()) / len(true)
