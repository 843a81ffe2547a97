"""Grant of the activations that the private part of a split model sends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from rayfed.registry import component
from rayfed.threat_model.grants.base import Grant

if TYPE_CHECKING:
    from rayfed.scenario import AttackSpec, Scenario
    from rayfed.simulation.client.visit import ObservedClient, Truth
    from rayfed.update import Update


@component
class Activations(Grant):
    """Activations of the victim's private layers (up to the attack's `cut`) for the attacked images.

    They are computed after the victim's local training in the round.
    """

    describe: ClassVar[str] = "the activations of the victim's private part"
    fills: ClassVar[tuple[str, ...]] = ("activations",)

    def check(self, scenario: Scenario, attack: AttackSpec) -> Iterator[str]:
        """Yield an error message if the attack has no `cut`."""
        if "cut" not in attack.parameters:
            yield f"activations are only for attacks with a `cut`; set `cut` of {attack.name}, or remove `activations`"

    def grant(self, observed: ObservedClient, truth: Truth, update: Update) -> dict[str, Any]:
        """Return the activations (N, ...) of the victim's private layers, in the order of the true samples."""
        import torch

        from rayfed.core import seeds

        state = observed.trained(observed.client)
        order = observed.runtime.order(observed.visit.sent, observed.client)
        with torch.no_grad(), seeds.global_stream(order, "activations", cuda=True):
            return {"activations": observed.front()(state, truth.inputs)}
