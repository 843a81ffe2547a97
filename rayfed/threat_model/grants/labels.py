"""Grant of the labels of the attacked samples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from rayfed.registry import component
from rayfed.threat_model.grants.base import Grant

if TYPE_CHECKING:
    from rayfed.simulation.client.visit import ObservedClient, Truth
    from rayfed.update import Update


@component
class KnownLabels(Grant):
    """Sorted labels of the attacked samples, without their assignment to samples.

    Empty for language models, whose labels are the tokens to recover.
    """

    describe: ClassVar[str] = "the labels"
    fills: ClassVar[tuple[str, ...]] = ("labels",)

    def grant(self, observed: ObservedClient, truth: Truth, update: Update) -> dict[str, Any]:
        """Return the sorted labels of the attacked samples: (N,) int64, rows of numbers (N, k) or masks (N, ...)."""
        import torch

        from rayfed.core import losses

        if losses.get_loss(observed.arm.model).takes == "tokens":
            return {}
        if truth.labels.ndim == 1:
            return {"labels": truth.labels.sort().values}
        order = torch.unique(truth.labels, dim=0, return_inverse=True)[1].argsort(stable=True)
        return {"labels": truth.labels[order]}
