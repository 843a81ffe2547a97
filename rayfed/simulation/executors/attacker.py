"""Attacker: computes reconstructions from observations, without access to data or the scenario's seed."""

from __future__ import annotations

from bdb import BdbQuit
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter

import torch

from rayfed.attacks.base import Attack, Guess, InferenceAttack, Reconstruction, failed
from rayfed.attacks.remembered import Memory, remembering
from rayfed.attacks.sealed import attempt
from rayfed.core.memory import Fitting, more_memory, take_notes
from rayfed.core.seeds import torch_generator
from rayfed.errors import describe_error
from rayfed.models.build import CopiedModels
from rayfed.models.private import freeze
from rayfed.samples import SampleSpec
from rayfed.scenario import AttackSpec, ResolvedArm
from rayfed.simulation.client.arm import build_arm
from rayfed.update import Observation


class AttackWorker:
    """Attacker that runs attacks on observations of clients (updates, gradients), without access to data."""

    def __init__(self, sample: SampleSpec, classes: int, device: torch.device) -> None:
        self._sample, self._classes, self._device = sample, classes, device
        self._fitting: defaultdict[str, Fitting] = defaultdict(Fitting)
        """Number of victims that are attacked together, by the attack's title."""
        self._build_model = CopiedModels()
        self._memories: list[tuple[ResolvedArm, Memory]] = []
        """Results that depend only on the model, by arm without its name. Arms with equal models share them."""

    def attack(
        self,
        attack: AttackSpec,
        arm: ResolvedArm,
        observations: Sequence[Observation],
        keys: Sequence[bytes],
    ) -> tuple[list[Guess], list[Guess]]:
        """Return an attack's results twice: without images (for the driver), and complete (for scoring).

        `keys[i]` seeds the attacker's randomness for observation i. `arm` gives the architecture, which a defence may
        change; the model's initial weights are sampled anew. If the attack raises an exception, its unfinished
        observations have failed, with the error as their message. If memory runs out, fewer observations are attacked
        together, with the same results up to rounding.
        """
        method: Attack | InferenceAttack = attack.build()
        built = build_arm(arm, self._sample, self._classes, seed=0, build=self._build_model)
        seen = [observation.to(self._device) for observation in observations]
        freeze(built.model, built.private - seen[0].weights.keys())
        model, began = built.model.to(self._device), perf_counter()

        def some(part: slice) -> Sequence[Guess]:
            generators = [torch_generator(key) for key in keys[part]]
            with remembering(self._memory(arm)):
                return attempt(method, seen[part], model, generators, attack.factor)

        found, fitting = list[Guess](), self._fitting[attack.title]
        while len(found) < len(seen):
            behind = len(found)

            def rest(part: slice, behind: int = behind) -> Sequence[Guess]:
                return some(slice(behind + part.start, behind + part.stop))

            try:
                for part in fitting.in_parts(rest, len(seen) - behind, f"victims of {attack.title}"):
                    found += part
            except BdbQuit:
                raise  # the user quit a debugger
            except torch.OutOfMemoryError as error:  # for a single victim: others may be smaller
                found.append(failed(method, f"{describe_error(error)}; {more_memory('attackers')}"))
            except Exception as error:  # from the attack, its options, the model or the machine
                found += [failed(method, describe_error(error)) for _ in seen[len(found) :]]
        if not any(guess.seconds for guess in found):
            found = [replace(guess, seconds=(perf_counter() - began) / len(found)) for guess in found]
        found[0] = replace(found[0], notes=tuple(take_notes()))
        return [_without_images(guess) for guess in found], list(found)

    def _memory(self, arm: ResolvedArm) -> Memory:
        nameless = replace(arm, name="")
        for known, memory in self._memories:
            if known == nameless:
                return memory
        self._memories.append((nameless, Memory()))
        return self._memories[-1][1]


def _without_images(guess: Guess) -> Guess:
    bare = replace(guess, images=guess.images[:0])
    return replace(bare, snapshots=()) if isinstance(bare, Reconstruction) else bare
