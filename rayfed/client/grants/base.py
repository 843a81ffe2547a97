"""The contract of a grant: one thing that a threat model gives an attacker beyond the protocol's messages.

A grant is a component without fields, named in an attack's `knowledge`. What an attacker gets is the union of what its
grants give, in whatever order they are named. Files of grants import PyTorch and what needs it in their functions, so
that reports and the scenario's schema read names and words without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from rayfed.client.arm import Arm
    from rayfed.client.runtime import ClientRuntime
    from rayfed.client.visit import ObservedClient, Truth
    from rayfed.scenario import AttackSpec, Scenario
    from rayfed.update import Named, Update


class Grant:
    """Base of every grant; its hooks give nothing."""

    describe: ClassVar[str]
    """Name of what is given, in words that follow `the update and`."""
    fills: ClassVar[tuple[str, ...]] = ()
    """Names that the grant adds to the observation: `labels`, or keys of its `extra`. Any others are refused."""
    of_private: ClassVar[bool] = False
    """Whether it has a say in private parts (`sends`, `knows`, `supposes`); one that does not declare it is refused."""
    averages: ClassVar[bool] = False
    """Whether an attacker with the grant may have the victim answer several times and take the mean (`averages`)."""
    involves_others: ClassVar[bool] = False
    """Whether the grant takes the work of other clients (`involves`)."""

    def overrides(self, *hooks: str) -> bool:
        """Return whether the grant overrides one of these hooks, given by the methods' names."""
        return any(getattr(type(self), hook) is not getattr(Grant, hook) for hook in hooks)

    def check(self, scenario: Scenario, attack: AttackSpec) -> Iterator[str]:
        """Yield the reasons why the grant is meaningless for this attack in this scenario."""
        yield from ()

    def needs_private(self, attack: AttackSpec) -> bool:
        """Return whether the grant is meaningless unless an arm keeps a part of its model private."""
        return False

    def involves(self, scenario: Scenario, round: int, victim: int) -> list[int]:
        """Return other clients whose work must be repeated; raises `ScenarioError` if there is no such client."""
        return []

    def sends(self, arm: Arm) -> frozenset[str]:
        """Return the names of private parameters that the victim sends like any other under this grant."""
        return frozenset()

    def knows(self, arm: Arm) -> frozenset[str]:
        """Return the names of the victim's private tensors that the attacker knows."""
        return frozenset()

    def supposes(self, observed: ObservedClient) -> Named:
        """Return private tensors that the attacker assumes in place of the victim's, by name."""
        return {}

    def known_before(self, runtime: ClientRuntime) -> dict[str, Any]:
        """Return the part of the grant that is the same for all clients.

        A server that tampers with the model has it before clients answer.
        """
        return {}

    def grant(self, observed: ObservedClient, truth: Truth, update: Update) -> dict[str, Any]:
        """Return the part of the grant that depends on the client, by the names in `fills`.

        `update` is what the attacker sees as one, without any values where these are hidden; `truth` what lies behind
        it. What a hidden update's values tell is given as a function of the `Update`: it is called once an attack has
        opened that.
        """
        return {}

    def hides(self, observed: ObservedClient, truth: Truth) -> Truth:
        """Return the truth with what scoring needs under this grant and the attacker must not have."""
        return truth
