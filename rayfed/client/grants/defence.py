"""Values of the update that the victim's defences have left alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from rayfed.client.grants.base import Grant
from rayfed.registry import component

if TYPE_CHECKING:
    from rayfed.client.visit import ObservedClient, Truth
    from rayfed.defences.base import Defence
    from rayfed.update import Named, Update


@dataclass(frozen=True)
class LeftAlone:
    """Tells which values of an update no defence of a pipeline has changed."""

    defences: tuple[Defence, ...]

    def __call__(self, update: Update) -> Named:
        """Return a bool mask of every tensor, by name."""
        import torch

        masks = {name: torch.ones_like(t, dtype=torch.bool) for name, t in update.tensors.items()}
        for defence in self.defences:
            for name, mask in (defence.exposed(update) or {}).items():
                masks[name] = masks[name] & mask
        return masks


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
        """Return the masks of what the attacker sees; where that is no value, how masks follow from an opened update.

        A mask tells which values are zero, so none is made here of an update that the attacker does not see.
        """
        masks = LeftAlone(tuple(defence for defence in observed.arm.defences if defence.overrides("exposed")))
        return {"defence": masks(update) if update.tensors else masks}
