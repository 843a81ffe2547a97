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
    """Sorted labels behind the update, without their assignment to samples.

    Of language models nothing: their labels are the tokens that an attack is to find.
    """

    describe: ClassVar[str] = "the labels"
    fills: ClassVar[tuple[str, ...]] = ("labels",)

    def grant(self, observed: ObservedClient, truth: Truth, update: Update) -> dict[str, Any]:
        """Return the labels, sorted, (N,) int64, or numbers (N, k) or classes of places (N, ...) row by row."""
        import torch

        from rayfed import losses

        if losses.of(observed.arm.model).takes == "tokens":
            return {}
        if truth.labels.ndim == 1:
            return {"labels": truth.labels.sort().values}
        order = torch.unique(truth.labels, dim=0, return_inverse=True)[1].argsort(stable=True)
        return {"labels": truth.labels[order]}
