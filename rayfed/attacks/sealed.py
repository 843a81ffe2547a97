"""What attackers make of an encrypted or masked update: nothing, or what was in it where they break the key first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter

import torch
from torch import nn

from rayfed.attacks.base import Attack, Guess, Inference, InferenceAttack, not_applicable
from rayfed.update import Masked, Observation, Sealed


def attempt(
    method: Attack | InferenceAttack,
    observations: Sequence[Observation],
    model: nn.Module,
    generators: Sequence[torch.Generator],
    factor: bool,
) -> Sequence[Guess]:
    """What the attack finds: nothing in sealed updates, unless it reads none, or breaks the key first (`factor`)."""
    act = method.infer if isinstance(method, InferenceAttack) else method.reconstruct
    sealed = observations[0].sealed
    if sealed is None or not getattr(method, "reads_update", True):
        return act(observations, model, generators)
    began = perf_counter()
    pair = sealed.parameters.scheme.crack(sealed.public) if factor and isinstance(sealed, Sealed) else None
    if pair is None:
        return [_nothing(method, observation, factor) for observation in observations]
    opened = [_opened(o, o.sealed, pair) for o in observations if isinstance(o.sealed, Sealed)]
    spent = (perf_counter() - began) / len(opened)
    return [replace(guess, seconds=guess.seconds + spent) for guess in act(opened, model, generators)]


def _opened(observation: Observation, sealed: Sealed, pair: bytes) -> Observation:
    update, buffers = sealed.parameters.broken(pair, sealed)
    opened = replace(observation, sealed=None, update=update, returned_buffers=buffers)
    return opened.to(next(iter(observation.weights.values())).device)


def _nothing(method: Attack | InferenceAttack, observation: Observation, factor: bool) -> Guess:
    message = "the update is encrypted: there is a ciphertext and no gradient to look at"
    if isinstance(observation.sealed, Masked):
        message = "the update is masked: without the other clients' shares it is uniform noise, and no gradient"
    elif factor:
        message += ", and its key cannot be found by factoring in any reasonable time"
    if isinstance(method, InferenceAttack):
        return Inference(metric=method.metric, status="not applicable", message=message)
    return not_applicable(observation, message)
