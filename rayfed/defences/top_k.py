"""Top-k sparsification: send only the k largest values of the update (Aji 2017; Stich 2018)."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from pydantic import Field
from torch import nn

from rayfed.defences.base import Task
from rayfed.defences.error_feedback import Compression
from rayfed.defences.sparse import Importance, importance, pruned_together, size
from rayfed.errors import UserError
from rayfed.gradients import weights_of
from rayfed.registry import component
from rayfed.update import Named, Update


@component
class TopK(Compression):
    """Keep exactly k values of the whole update and set the others to zero.

    Empirical. Sources: Aji 2017, 'Sparse communication for distributed gradient descent'; Stich 2018, 'Sparsified SGD
    with memory'. Both use error feedback.
    """

    k: Annotated[int, Field(ge=1, strict=True)] | Annotated[float, Field(gt=0, lt=1)]
    """Number of values to keep. Below 1, a share of the update: floor(k * size) values, at least one."""
    by: Importance = "magnitude"
    """Score that ranks a value: `magnitude`, the magnitude of the global `weight`, or that of the product of both
    (`weight_gradient`)."""

    def check(self, model: nn.Module) -> None:
        """Raise `UserError` if the model has fewer than k trainable parameters."""
        values = size(weights_of(model))
        if self.k > values:
            raise UserError(
                f"top_k: k is {self.k}, but the model has {values} trainable values: set a smaller k, or a share"
            )

    def compress(self, task: Task, update: Update) -> Update:
        """Return the update with all values except k set to zero."""
        values = size(update.tensors)
        keep = self.k if isinstance(self.k, int) else max(1, int(self.k * values))
        scores = importance(self.by, task, update.tensors)
        # A model split by another defence may send fewer than k values.
        return replace(update, tensors=pruned_together(update.tensors, scores, max(0, values - keep)))

    def exposed(self, update: Update) -> Named:
        """Return a mask of the update's nonzero values, which are sent unchanged."""
        return {name: t != 0 for name, t in update.tensors.items()}
