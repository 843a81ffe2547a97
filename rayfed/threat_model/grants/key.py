"""Grant of the victim's keys, which are private and never trained."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from rayfed.registry import component
from rayfed.threat_model.grants.base import Grant

if TYPE_CHECKING:
    from rayfed.scenario import AttackSpec
    from rayfed.simulation.client.arm import Arm


@component
class Key(Grant):
    """Private tensors of the victim that are sampled once and never trained: keys, passports."""

    describe: ClassVar[str] = "the victim's key"
    of_private: ClassVar[bool] = True

    def needs_private(self, attack: AttackSpec) -> bool:
        """Return True, because a key is a private part of the model."""
        return True

    def knows(self, arm: Arm) -> frozenset[str]:
        """Return the names of the arm's keys, private tensors that are sampled once and never trained."""
        return arm.keys
