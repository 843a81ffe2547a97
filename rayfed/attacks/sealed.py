"""Attacks on encrypted, masked or mixed updates, which find nothing unless they break the key or unmix."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from math import nan
from time import perf_counter

import torch
from torch import nn

from rayfed.attacks.base import Attack, Guess, Inference, InferenceAttack, check_form, not_applicable
from rayfed.attacks.fit import with_fit
from rayfed.attacks.mixed import unmixed
from rayfed.attacks.undone import noted, undone
from rayfed.update import Encrypted, Observation, Update

_UNBROKEN = ", and its key cannot be found by factoring in any reasonable time"
_NO_CLASSES = "it asks about classes, and labels are numbers, or of each place, under this loss"
_ONE_LABEL = "it knows one label for each sample, and labels are of each place, such as a token or a pixel, here"
_NOT_GIVEN = (
    "it needs labels, which are of each place here, such as a token or a pixel: they are not inferred from an update "
    "and were not given; those of a language model are the tokens themselves, and never given"
)
_NOT_SHOWN = "this arm's aggregation shows no client another's update"


def attempt(
    method: Attack | InferenceAttack,
    observations: Sequence[Observation],
    model: nn.Module,
    generators: Sequence[torch.Generator],
    factor: bool,
) -> Sequence[Guess]:
    """Run an attack, and return what it finds: nothing in encrypted updates and in those that were not shown.

    It does find something where it reads no update, or breaks the key first (`factor`).
    """
    observations = [undone(unmixed(observation)) for observation in observations]
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
        return [_nothing(method, observation, message) for observation in observations]
    opened = [undone(_opened(o, o.sealed, pair)) for o in observations if isinstance(o.sealed, Encrypted)]
    spent = (perf_counter() - began) / len(opened)
    return [replace(g, seconds=g.seconds + spent) for g in _played(method, opened, model, generators)]


def _of_places(method: Attack | InferenceAttack, observation: Observation) -> str | None:
    """Return why an attack does not apply to labels of each place; None if it does."""
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
    """Return what the attack finds, with what it had to do without."""
    if isinstance(method, InferenceAttack):
        guesses: Sequence[Guess] = method.infer(observations, model, generators)
    else:
        seen = _copies(observations)  # an attack may write on what it is given
        found = method.reconstruct(observations, model, generators)
        check_form(found, observations)
        guesses = with_fit(found, seen, model)
    return [noted(guess, observation) for guess, observation in zip(guesses, observations, strict=True)]


def _copies(observations: Sequence[Observation]) -> list[Observation]:
    """Return the observations with copies of weights, buffers and updates; what they share, the copies share."""
    parts = deepcopy([(one.weights, one.buffers, one.update) for one in observations])
    return [
        replace(one, weights=weights, buffers=buffers, update=update)
        for one, (weights, buffers, update) in zip(observations, parts, strict=True)
    ]


def _opened(observation: Observation, sealed: Encrypted, pair: bytes) -> Observation:
    """Return the observation with what was in the ciphertexts, and with what grants tell of that."""
    update, buffers = sealed.parameters.broken(pair, sealed)
    # the training loss is not in what is sent
    whole = Update(observation.victim, observation.round, update, buffers, observation.batch_size, loss=nan)
    extra = {name: given(whole) if callable(given) else given for name, given in observation.extra.items()}
    opened = replace(observation, sealed=None, update=update, returned_buffers=buffers, extra=extra)
    return opened.to(next(iter(observation.weights.values())).device)


def _nothing(method: Attack | InferenceAttack, observation: Observation, message: str) -> Guess:
    if isinstance(method, InferenceAttack):
        return Inference(metric=method.metric, status="not applicable", message=message)
    return not_applicable(observation, message)
