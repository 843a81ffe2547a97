"""Grant of the victim's lock, private parameters that it trains."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from rayfed.registry import component
from rayfed.threat_model.grants.base import Grant

if TYPE_CHECKING:
    from rayfed.scenario import AttackSpec
    from rayfed.simulation.client.arm import Arm


@component
class Lock(Grant):
    """Private parameters that the victim trains; the attacker sees these parameters and their gradient."""

    describe: ClassVar[str] = "the victim's lock"
    of_private: ClassVar[bool] = True

    def needs_private(self, attack: AttackSpec) -> bool:
        """Return True, because a lock is a private part of the model."""
        return True

    def sends(self, arm: Arm) -> frozenset[str]:
        """Return the names of the arm's private tensors except the keys."""
        return arm.private - arm.keys
