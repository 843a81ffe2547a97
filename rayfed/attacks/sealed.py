"""Run attacks on encrypted, masked or mixed updates, which reveal nothing until decrypted or unmixed."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from math import nan
from time import perf_counter

import torch
from torch import nn

from rayfed.attacks.adaptive.estimate import estimate_gradient
from rayfed.attacks.adaptive.invert import invert_data, invert_defences
from rayfed.attacks.adaptive.reasoned import with_reason
from rayfed.attacks.base import Attack, Guess, Inference, InferenceAttack, check_form, not_applicable
from rayfed.attacks.fit import with_fit
from rayfed.attacks.mixed import unmixed
from rayfed.update import Encrypted, Observation, Update

_UNBROKEN = ", and factoring cannot break the key in any reasonable time"
_NO_CLASSES = "the attack needs one class per sample, but labels are numbers, or each token or pixel has a label"
_ONE_LABEL = "the attack needs one label per sample, but each token or pixel has a label"
_NOT_GIVEN = (
    "the attack needs the labels, but each token or pixel has a label. Such labels are not inferred from an update and "
    "were not granted. The labels of a language model are its tokens, which are never granted"
)
_NOT_SHOWN = "the aggregation of this arm does not show clients the updates of other clients"


def attempt(
    method: Attack | InferenceAttack,
    observations: Sequence[Observation],
    model: nn.Module,
    generators: Sequence[torch.Generator],
    factor: bool,
) -> Sequence[Guess]:
    """Run an attack and return the results; encrypted and hidden updates give the status "not applicable".

    The attack runs on encrypted or hidden updates if the attack does not read the update, or on encrypted updates if
    the key can be broken first (`factor`).
    """
    observations = [unmixed(observation) for observation in observations]
    sealed = observations[0].sealed
    first = observations[0]
    if (first.has_numbers or first.has_places) and getattr(method, "needs_classes", False):
        return [_nothing(method, observation, _NO_CLASSES) for observation in observations]
    if first.has_places and (obstacle := _of_places(method, first)) is not None:
        return [_nothing(method, observation, obstacle) for observation in observations]
    if observations[0].update or not getattr(method, "reads_update", True):
        return _played(method, observations, model, generators)
    if sealed is None:
        return [_nothing(method, observation, _NOT_SHOWN) for observation in observations]
    began = perf_counter()
    encrypted = sealed if factor and isinstance(sealed, Encrypted) else None
    pair = encrypted.parameters.scheme.crack(encrypted.public) if encrypted else None
    if pair is None:
        message = sealed.unreadable + (_UNBROKEN if encrypted else "")
        reason = getattr(sealed, "reason", None)  # channels of users have none
        return [replace(_nothing(method, o, message), reason=reason) for o in observations]
    opened = [_opened(o, o.sealed, pair) for o in observations if isinstance(o.sealed, Encrypted)]
    spent = (perf_counter() - began) / len(opened)
    return [replace(g, seconds=g.seconds + spent) for g in _played(method, opened, model, generators)]


def _of_places(method: Attack | InferenceAttack, observation: Observation) -> str | None:
    """Return the reason why an attack does not apply to labels of tokens or pixels, or None if it does."""
    needs = getattr(method, "place_labels", None)
    if needs is None:
        return _ONE_LABEL
    return _NOT_GIVEN if needs == "given" and observation.labels is None else None


def _played(
    method: Attack | InferenceAttack,
    observations: Sequence[Observation],
    model: nn.Module,
    generators: Sequence[torch.Generator],
) -> list[Guess]:
    """Return the results of an attack on the gradients before the defences, as far as their map can be inverted."""
    declared = [observation.extra.get("observation_model") for observation in observations]
    if any(one is not None and one.reveals_randomness for one in declared) and len(observations) > 1:
        each = zip(observations, generators, strict=True)  # each victim has a model with its own random numbers
        return [_played(method, [observation], model, [generator])[0] for observation, generator in each]
    if len(observations) == 1 and declared[0] is not None:
        revealed, model = declared[0].reveal(observations[0], model)
        observations = [revealed]
    seen = _copies(observations)  # an attack may modify its observations
    inverted = [estimate_gradient(invert_defences(observation, model), model) for observation in observations]
    if isinstance(method, InferenceAttack):
        guesses: Sequence[Guess] = method.infer(inverted, model, generators)
    else:
        found = method.reconstruct(inverted, model, generators)
        check_form(found, observations)
        before = [invert_data(guess, one, model) for guess, one in zip(found, seen, strict=True)]
        guesses = with_fit(before, seen, model)
    return [with_reason(guess, observation) for guess, observation in zip(guesses, seen, strict=True)]


def _copies(observations: Sequence[Observation]) -> list[Observation]:
    """Return observations with copied weights, buffers and updates. Tensors shared before are shared in the copies."""
    parts = deepcopy([(one.weights, one.buffers, one.update) for one in observations])
    return [
        replace(one, weights=weights, buffers=buffers, update=update)
        for one, (weights, buffers, update) in zip(observations, parts, strict=True)
    ]


def _opened(observation: Observation, sealed: Encrypted, pair: bytes) -> Observation:
    """Return the observation with the decrypted update and buffers, and with grants computed from them."""
    update, buffers = sealed.parameters.broken(pair, sealed)
    # the ciphertexts do not contain the training loss
    whole = Update(observation.victim, observation.round, update, buffers, observation.batch_size, loss=nan)
    extra = {name: given(whole) if callable(given) else given for name, given in observation.extra.items()}
    opened = replace(observation, sealed=None, update=update, returned_buffers=buffers, extra=extra)
    return opened.to(next(iter(observation.weights.values())).device)


def _nothing(method: Attack | InferenceAttack, observation: Observation, message: str) -> Guess:
    if isinstance(method, InferenceAttack):
        return Inference(metric=method.metric, status="not applicable", message=message)
    return not_applicable(observation, message)
