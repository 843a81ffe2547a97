"""Grant of parameters that a victim keeps private and trains."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from rayfed.client.grants.base import Grant
from rayfed.registry import component

if TYPE_CHECKING:
    from rayfed.client.arm import Arm
    from rayfed.scenario import AttackSpec


@component
class Lock(Grant):
    """Private parameters that the victim trains, sent with their gradient like any other."""

    describe: ClassVar[str] = "the victim's lock"
    of_private: ClassVar[bool] = True

    def needs_private(self, attack: AttackSpec) -> bool:
        """Return True: without a private part there is no lock."""
        return True

    def sends(self, arm: Arm) -> frozenset[str]:
        """Return the names of all that is private but the keys."""
        return arm.private - arm.keys
