"""Grant of the labels behind the update."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from rayfed.client.grants.base import Grant
from rayfed.registry import component

if TYPE_CHECKING:
    from rayfed.client.visit import ObservedClient, Truth
    from rayfed.update import Update


@component
class Labels(Grant):
    """Sorted labels behind the update, without their assignment to images."""

    describe: ClassVar[str] = "the labels"
    fills: ClassVar[tuple[str, ...]] = ("labels",)

    def grant(self, observed: ObservedClient, truth: Truth, update: Update) -> dict[str, Any]:
        """Return the labels, sorted, (N,) int64, or numbers (N, k) row by row."""
        import torch

        if truth.labels.ndim == 1:
            return {"labels": truth.labels.sort().values}
        order = torch.unique(truth.labels, dim=0, return_inverse=True)[1].argsort(stable=True)
        return {"labels": truth.labels[order]}
