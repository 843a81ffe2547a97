"""Base class of grants. A grant gives an attacker knowledge in addition to the messages of the protocol.

A grant is a component without fields, listed in an attack's `knowledge`. The order of the list does not matter. Grants
import PyTorch only in functions, so that reports and the scenario's schema do not need it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from rayfed.scenario import AttackSpec, Scenario
    from rayfed.simulation.client.arm import Arm
    from rayfed.simulation.client.runtime import ClientRuntime
    from rayfed.simulation.client.visit import ObservedClient, Truth
    from rayfed.update import Named, Update


class Grant:
    """Base class of grants, which give an attacker extra knowledge; the hooks return nothing."""

    describe: ClassVar[str]
    """Name of the knowledge, to follow `the update and`."""
    fills: ClassVar[tuple[str, ...]] = ()
    """Names that the grant adds to the observation: `labels`, or keys of `extra`. Other names raise an error."""
    of_private: ClassVar[bool] = False
    """Whether the grant uses private layers (`sends`, `knows` or `supposes`), which must be declared."""
    averages: ClassVar[bool] = False
    """Whether the grant allows `averages`, the mean of several updates of the victim."""
    involves_others: ClassVar[bool] = False
    """Whether the grant needs the work of other clients (`involves`)."""

    def overrides(self, *hooks: str) -> bool:
        """Return whether the grant overrides one of these methods."""
        return any(getattr(type(self), hook) is not getattr(Grant, hook) for hook in hooks)

    def check(self, scenario: Scenario, attack: AttackSpec) -> Iterator[str]:
        """Yield error messages if the grant is meaningless for the attack in the scenario."""
        yield from ()

    def needs_private(self, attack: AttackSpec) -> bool:
        """Return whether the grant is meaningless without an arm that has private layers."""
        return False

    def involves(self, scenario: Scenario, round: int, victim: int) -> list[int]:
        """Return other clients whose training the grant repeats; raises `ScenarioError` if there is no such client."""
        return []

    def sends(self, arm: Arm) -> frozenset[str]:
        """Return the names of private parameters that the victim sends under this grant."""
        return frozenset()

    def knows(self, arm: Arm) -> frozenset[str]:
        """Return the names of the victim's private tensors that the attacker knows."""
        return frozenset()

    def supposes(self, observed: ObservedClient) -> Named:
        """Return private tensors that the attacker uses instead of the victim's private tensors, by name."""
        return {}

    def known_before(self, runtime: ClientRuntime) -> dict[str, Any]:
        """Return the granted knowledge that is equal for all clients, by the names in `fills`.

        A malicious server has this knowledge before the round.
        """
        return {}

    def grant(self, observed: ObservedClient, truth: Truth, update: Update) -> dict[str, Any]:
        """Return the granted knowledge that depends on the client, by the names in `fills`.

        `update` is the update that the attacker observes, without values if it is protected; `truth` contains its
        samples. For a protected update, knowledge that depends on its values is returned as a function of the decrypted
        `Update`.
        """
        return {}

    def hides(self, observed: ObservedClient, truth: Truth) -> Truth:
        """Return the truth, extended by values that scoring needs and the attacker must not know."""
        return truth
