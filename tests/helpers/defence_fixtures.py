"""A client's task on images of the data set `digits`, as a defence gets it."""

from __future__ import annotations

import torch
from torch import nn

from rayfed.defences.base import Batch, Task
from rayfed.gradients import buffers_of, weights_of
from tests.helpers.attack_fixtures import digit


def digits(*indices: int) -> Batch:
    return Batch(torch.cat([digit(i) for i in indices]), torch.tensor(indices) % 10)


def task_of(model: nn.Module, public: Batch | None, seed: int = 0, data: Batch | None = None) -> Task:
    generator = torch.Generator().manual_seed(seed)
    weights, buffers = weights_of(model), buffers_of(model)
    return Task(0, 0, model, weights, buffers, data or digits(3), generator, order=0, public=public)
