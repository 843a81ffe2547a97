"""What the victim's defences have left of the update."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from rayfed.client.grants.base import Grant
from rayfed.registry import component

if TYPE_CHECKING:
    from rayfed.client.visit import ObservedClient, Truth
    from rayfed.update import Update


@component
class KnownDefence(Grant):
    """Which of the update's values the victim's defences left alone (what pruning kept, what Soteria did not touch).

    The rest is then not matched. With `averages: K` the victim also answers K times at the same weights with the same
    samples, and the attack sees the mean.
    """

    describe: ClassVar[str] = "which defence there is"
    fills: ClassVar[tuple[str, ...]] = ("defence",)
    averages: ClassVar[bool] = True

    def grant(self, observed: ObservedClient, truth: Truth, update: Update) -> dict[str, Any]:
        """A bool mask of every tensor of the update, by name: what no defence of the stack has spoilt."""
        import torch

        masks = {name: torch.ones_like(t, dtype=torch.bool) for name, t in update.tensors.items()}
        for defence in observed.arm.defences:
            for name, mask in (defence.exposed(update) or {}).items():
                masks[name] = masks[name] & mask
        return {"defence": masks}
