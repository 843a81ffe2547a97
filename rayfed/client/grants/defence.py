"""Values of the update that the victim's defences have left alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from rayfed.client.grants.base import Grant
from rayfed.registry import component

if TYPE_CHECKING:
    from rayfed.client.visit import ObservedClient, Truth
    from rayfed.update import Update


@component
class KnownDefence(Grant):
    """Mask of the values that the victim's defences left alone (what pruning kept, what Soteria did not touch).

    The rest is then not matched. With `averages: K` the victim also answers K times at the same weights with the same
    samples, and the attack sees the mean.
    """

    describe: ClassVar[str] = "which defence there is"
    fills: ClassVar[tuple[str, ...]] = ("defence",)
    averages: ClassVar[bool] = True

    def grant(self, observed: ObservedClient, truth: Truth, update: Update) -> dict[str, Any]:
        """Return a bool mask of every tensor, by name: the values that no defence of the pipeline has changed."""
        import torch

        masks = {name: torch.ones_like(t, dtype=torch.bool) for name, t in update.tensors.items()}
        for defence in observed.arm.defences:
            for name, mask in (defence.exposed(update) or {}).items():
                masks[name] = masks[name] & mask
        return {"defence": masks}
