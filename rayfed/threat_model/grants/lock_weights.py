"""Grant of the values of the victim's lock, without the lock's gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from rayfed.registry import component
from rayfed.threat_model.grants.base import Grant

if TYPE_CHECKING:
    from rayfed.scenario import AttackSpec
    from rayfed.simulation.client.arm import Arm


@component
class LockWeights(Grant):
    """Values of the private parameters that the victim trains, without their gradient, as in FedKL's published code.

    With the gradient (`lock`), an attacker can compute the key in closed form.
    """

    describe: ClassVar[str] = "the values of the victim's lock"
    of_private: ClassVar[bool] = True

    def needs_private(self, attack: AttackSpec) -> bool:
        """Return True, because a lock is a private part of the model."""
        return True

    def knows(self, arm: Arm) -> frozenset[str]:
        """Return the names of the arm's private tensors except the keys."""
        return arm.private - arm.keys
