"""Grant of the values of the victim's lock, without the lock's gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from rayfed.client.grants.base import Grant
from rayfed.registry import component

if TYPE_CHECKING:
    from rayfed.client.arm import Arm
    from rayfed.scenario import AttackSpec


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
