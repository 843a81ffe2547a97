"""Gradient compression: the smallest values of an update are not sent (Zhu 2019, section 5.2; Lin 2018)."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field

from rayfed.defences.base import Task
from rayfed.defences.error_feedback import Compression
from rayfed.defences.sparse import Importance, importance, pruned, pruned_together, size
from rayfed.registry import component
from rayfed.update import Named, Update


@component
class Prune(Compression):
    """Set the smallest floor(ratio * size) values of each tensor, or of the whole update, to zero.

    Empirical. Source: Zhu 2019, section 5.2, after Lin 2018, 'Deep gradient compression', layer by layer; ranked by
    abs(weight * gradient): Refiner (Fan 2024), table 1.
    """

    ratio: Annotated[float, Field(ge=0, lt=1)]
    """Share of the values that is set to zero."""
    by: Importance = "magnitude"
    """Rank of a value: its magnitude, or its product with the weight that the client was sent."""
    scope: Literal["layer", "global"] = "layer"
    """Scope of the ranking: each tensor, or the whole update, where small layers may lose all or nothing."""

    def compress(self, task: Task, update: Update) -> Update:
        """Return the pruned update."""
        tensors, scores = update.tensors, importance(self.by, task, update.tensors)
        if self.scope == "global":
            return replace(update, tensors=pruned_together(tensors, scores, int(self.ratio * size(tensors))))
        kept = {name: pruned(t, scores[name], int(self.ratio * t.numel())) for name, t in tensors.items()}
        return replace(update, tensors=kept)

    def exposed(self, update: Update) -> Named:
        """Return a mask of the nonzero values."""
        return {name: t != 0 for name, t in update.tensors.items()}
