"""AttackerActor: gets observations, gives reconstructions. Neither data nor the scenario's seed is ever sent here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from actors.process import Renewable, Share, set_up
from rayfed.attacks.base import Attack, Guess, InferenceAttack, Reconstruction
from rayfed.attacks.sealed import attempt
from rayfed.client.arm import build_arm
from rayfed.models.private import freeze
from rayfed.scenario import AttackSpec, DefenceSpec, ModelSpec
from rayfed.seeds import torch_generator
from rayfed.update import Observation


class AttackerActor(Renewable):
    """Runs attacks on what a threat model lets them see."""

    def __init__(self, image_shape: tuple[int, int, int], classes: int, share: Share) -> None:
        self._device = set_up(share)
        self._image_shape, self._classes = image_shape, classes

    def attack(
        self,
        attack: AttackSpec,
        model: ModelSpec,
        stack: Sequence[DefenceSpec],
        observations: Sequence[Observation],
        keys: Sequence[bytes],
    ) -> tuple[list[Guess], list[Guess]]:
        """What is guessed of each observation: without its images for the driver, and whole for scoring.

        `keys[i]` seeds the attacker's randomness for observation i. The stack is there because a defence may change the
        architecture, which an attacker knows from the weights that are sent; the model's own are drawn anew.
        """
        method: Attack | InferenceAttack = attack.build()
        arm = build_arm(model, stack, self._image_shape, self._classes, seed=0)
        seen = [observation.to(self._device) for observation in observations]
        freeze(arm.model, arm.private - seen[0].weights.keys())
        generators = [torch_generator(key) for key in keys]
        found = attempt(method, seen, arm.model.to(self._device), generators, attack.factor)
        return [_without_images(guess) for guess in found], list(found)


def _without_images(guess: Guess) -> Guess:
    bare = replace(guess, images=guess.images[:0])
    return replace(bare, snapshots=()) if isinstance(bare, Reconstruction) else bare
