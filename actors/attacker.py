"""AttackerActor: an attacker in a process of its own, which is never sent data or the scenario's seed."""

from __future__ import annotations

from actors.process import Renewable, ResourceShare, set_up
from rayfed.engine.attacker import Attacker
from rayfed.samples import SampleSpec


class AttackerActor(Renewable, Attacker):
    """Does the calls of `Attacker` on its share of a node."""

    def __init__(self, share: ResourceShare, sample: SampleSpec, classes: int) -> None:
        super().__init__(sample, classes, set_up(share))
