"""Grant of the private layers of a colluding client."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from rayfed.errors import ScenarioError
from rayfed.registry import component
from rayfed.threat_model.grants.base import Grant

if TYPE_CHECKING:
    from rayfed.scenario import AttackSpec, Scenario
    from rayfed.simulation.client.visit import ObservedClient, Truth
    from rayfed.update import Named, Update


@component
class Colluder(Grant):
    """Private layers of a colluding client, the next sampled client after the victim, as trained in this round.

    The attacker uses them instead of the victim's. An attack with a `cut` gets the colluder's layers up to the cut.
    """

    describe: ClassVar[str] = "a colluder's private part"
    fills: ClassVar[tuple[str, ...]] = ("colluder",)
    of_private: ClassVar[bool] = True
    involves_others: ClassVar[bool] = True

    def needs_private(self, attack: AttackSpec) -> bool:
        """Return whether an arm must have private layers; with a `cut`, the attack defines the private part."""
        return "cut" not in attack.parameters

    def involves(self, scenario: Scenario, round: int, victim: int) -> list[int]:
        """Return the client that colludes against the victim, in a list."""
        return [colluder(scenario, round, victim)]

    def supposes(self, observed: ObservedClient) -> Named:
        """Return all private tensors of the colluder after local training, by name."""
        return observed.trained(colluder(observed.runtime.scenario, observed.round, observed.client))

    def grant(self, observed: ObservedClient, truth: Truth, update: Update) -> dict[str, Any]:
        """Return the colluder's parameters and buffers up to the attack's `cut`, by name; nothing without a `cut`."""
        if "cut" not in observed.attack.parameters:
            return {}
        state = self.supposes(observed)
        names = observed.front().names(observed.runtime.data.sample)
        return {"colluder": {name: state[name] for name in names}}


def colluder(scenario: Scenario, round: int, victim: int) -> int:
    """Return the client that colludes against a victim: the next sampled client of the round.

    Raises `ScenarioError` if no other client is sampled.
    """
    from rayfed.simulation.client.plan import drawn_clients

    others = [client for client in drawn_clients(scenario, round) if client != victim]
    if not others:
        raise ScenarioError(
            f"`knowledge: [colluder]` needs a client other than the victim {victim} in round {round}, but none is "
            f"sampled; set federation.clients_per_round to at least 2"
        )
    return next((client for client in others if client > victim), others[0])
