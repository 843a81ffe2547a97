"""Gradient compression: set the smallest values of an update to zero (Zhu 2019, section 5.2; Lin 2018)."""

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

    Empirical. Sources: Zhu 2019, section 5.2, after Lin 2018, 'Deep gradient compression', layer by layer; Refiner (Fan
    2024), table 1, for ranking by abs(weight) and abs(weight * gradient).
    """

    ratio: Annotated[float, Field(ge=0, lt=1)]
    """Share of the values that are set to zero."""
    by: Importance = "magnitude"
    """Score that ranks a value: `magnitude`, the magnitude of the global `weight`, or that of the product of both
    (`weight_gradient`)."""
    scope: Literal["layer", "global"] = "layer"
    """Scope of the ranking: each tensor, or the whole update. With `global`, small layers may lose all of their values
    or none."""

    def compress(self, task: Task, update: Update) -> Update:
        """Return the update with the smallest values of each tensor, or of all tensors, set to zero."""
        tensors, scores = update.tensors, importance(self.by, task, update.tensors)
        if self.scope == "global":
            return replace(update, tensors=pruned_together(tensors, scores, int(self.ratio * size(tensors))))
        kept = {name: pruned(t, scores[name], int(self.ratio * t.numel())) for name, t in tensors.items()}
        return replace(update, tensors=kept)

    def exposed(self, update: Update) -> Named:
        """Return a mask of the update's nonzero values, which pruning left unchanged."""
        return {name: t != 0 for name, t in update.tensors.items()}
