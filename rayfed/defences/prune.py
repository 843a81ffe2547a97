"""Gradient compression: the smallest values of an update are not sent (Zhu 2019, section 5.2; Lin 2018)."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from rayfed.catalogue import component
from rayfed.defences.base import Defence, Task, UpdateMethod
from rayfed.update import Named, Update


@component
class Prune(Defence):
    """Set the share of each tensor that is smallest in magnitude to zero.

    Empirical. Source: Zhu 2019, section 5.2, after Lin 2018, 'Deep gradient compression', layer by layer, without
    its error feedback.
    """

    post_processes: ClassVar[bool] = True

    ratio: Annotated[float, Field(ge=0, lt=1)]
    """Share of each tensor's values that is set to zero."""

    def wrap_update(self, next: UpdateMethod) -> UpdateMethod:
        """Prune what is sent."""

        def update(task: Task) -> Update:
            sent = next(task)
            return replace(sent, tensors={name: self._pruned(t) for name, t in sent.tensors.items()})

        return update

    def _pruned(self, tensor: Tensor) -> Tensor:
        """Exactly floor(ratio * size) values go, ties by position, so constant tensors are not lost whole."""
        flat = tensor.flatten()
        drop = torch.sort(flat.abs(), stable=True).indices[: int(self.ratio * flat.numel())]
        return flat.index_fill(0, drop, 0.0).view_as(tensor)

    def exposed(self, update: Update) -> Named:
        """What was not set to zero."""
        return {name: t != 0 for name, t in update.tensors.items()}
