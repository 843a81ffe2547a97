"""Grant of keys that a victim keeps private and never trains."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from rayfed.client.grants.base import Grant
from rayfed.registry import component

if TYPE_CHECKING:
    from rayfed.client.arm import Arm
    from rayfed.scenario import AttackSpec


@component
class Key(Grant):
    """Private tensors that the victim drew and never trains: keys, passports."""

    describe: ClassVar[str] = "the victim's key"
    of_private: ClassVar[bool] = True

    def needs_private(self, attack: AttackSpec) -> bool:
        """Return True: without a private part there is no key."""
        return True

    def knows(self, arm: Arm) -> frozenset[str]:
        """Return the names of private buffers other than batch-norm statistics."""
        return arm.keys
