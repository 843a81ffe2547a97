"""Ray actor for an attacker, whose process never receives the data or the scenario's seed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from actors import standings
from actors.process import Renewable, ResourceShare, set_up
from rayfed.attacks.base import Guess
from rayfed.attacks.progress import Standing, listening
from rayfed.core.memory import Peak, peak
from rayfed.samples import SampleSpec
from rayfed.scenario import AttackSpec, ResolvedArm
from rayfed.simulation.executors.attacker import AttackWorker
from rayfed.update import Observation


class AttackerActor(Renewable, AttackWorker):
    """Ray actor that runs the methods of `AttackWorker` on a share of a node."""

    def __init__(self, share: ResourceShare, sample: SampleSpec, classes: int) -> None:
        super().__init__(sample, classes, set_up(share))

    def attack(
        self, attack: AttackSpec, arm: ResolvedArm, observations: Sequence[Observation], keys: Sequence[bytes]
    ) -> tuple[list[Guess], list[Guess]]:
        """Run an attack, return the results of `AttackWorker.attack`, and publish the progress of searches."""
        with listening(standings.post):
            return super().attack(attack, arm, observations, keys)

    def begin_attack(
        self, attack: AttackSpec, arm: ResolvedArm, observations: Sequence[Observation], keys: Sequence[bytes]
    ) -> Peak | None:
        """Run the first iterations of an attack, and return the peak GPU memory of this process.

        Returns None if the attack fails on all victims, because it may have needed more memory than was measured.
        """
        with suppress(_Begun), listening(_end_soon, every=0):
            guesses, _ = super().attack(attack, arm, observations, keys)
            if all(guess.status == "failed" for guess in guesses):
                return None
        return peak()


_ITERATIONS = 10
"""Iterations after which a search needs no more memory; L-BFGS keeps the last ten steps."""


class _Begun(BaseException):
    """Signal that an attack has begun; not an `Exception`, which `AttackWorker.attack` catches."""


def _end_soon(standing: Standing) -> None:
    if standing.iteration >= _ITERATIONS:
        raise _Begun
