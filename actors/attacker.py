"""AttackerActor: an attacker in a process of its own. Neither data nor the scenario's seed is ever sent here."""

from __future__ import annotations

from actors.process import Renewable, ResourceShare, set_up
from rayfed.engine.attacker import Attacker
from rayfed.samples import SampleSpec


class AttackerActor(Renewable, Attacker):
    """Does the calls of `Attacker` on its share of a node."""

    def __init__(self, share: ResourceShare, sample: SampleSpec, classes: int) -> None:
        super().__init__(sample, classes, set_up(share))
