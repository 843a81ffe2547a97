"""Undo the defences whose code the attacker knows on an observed update (`rayfed.client.grants.code`)."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from rayfed.attacks.base import Guess, Reconstruction
from rayfed.reasons import Reason
from rayfed.update import Observation


def undone(observation: Observation) -> Observation:
    """Undo the defences that the attacker can undo, in an observation and in the observation's earlier rounds.

    Hidden updates stay unchanged.
    """
    observation = replace(observation, earlier=tuple(map(undone, observation.earlier)))
    found = observation.extra.get("undone")
    if found is None or callable(found) or isinstance(found, str):
        return observation
    return replace(observation, update={name: t.to(observation.update[name]) for name, t in found.items()})


def noted(guess: Guess, observation: Observation) -> Guess:
    """Return an attack's result with a note if no defence was undone, or if known code was not fully used.

    Reconstructions are of the samples that were trained on. If a defence transformed the samples invertibly, the
    original samples are returned.
    """
    made = observation.extra.get("as_trained")
    if made is not None and isinstance(guess, Reconstruction) and guess.status in ("ok", "diverged"):
        shown = tuple((iteration, made.back(images)) for iteration, images in guess.snapshots)
        guess = replace(guess, images=made.back(guess.images), snapshots=shown)
    found = unused(observation)
    if found is None:
        return guess
    message = "; ".join(filter(None, (guess.message, found.message)))
    return replace(guess, message=message, reason=guess.reason or found.reason)


class Unused(NamedTuple):
    """Why known code of the defences was not fully used."""

    reason: Reason
    message: str


def unused(observation: Observation) -> Unused | None:
    """Return the reason why no defence was undone or known code was not fully used; None if all code was used."""
    undone, beyond = observation.extra.get("undone"), observation.extra.get("beyond")
    if isinstance(undone, str):
        return Unused(Reason.CODE_NOT_RUN, undone)
    if beyond:
        return Unused(Reason.CODE_PARTLY_USED, f"these attacks use only a part of the defences' code: {beyond}")
    return None
