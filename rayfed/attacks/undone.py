"""Updates from which an attacker has taken what the defences put on everybody's (`rayfed.client.grants.code`)."""

from __future__ import annotations

from dataclasses import replace

from rayfed.attacks.base import Guess, Reconstruction
from rayfed.hidden import UNUSED
from rayfed.update import Observation


def undone(observation: Observation) -> Observation:
    """Return the observation with the update undone, where the attacker knows how; of a hidden one nothing changes.

    So of the earlier rounds that it looks back on.
    """
    observation = replace(observation, earlier=tuple(map(undone, observation.earlier)))
    found = observation.extra.get("undone")
    if found is None or callable(found) or isinstance(found, str):
        return observation
    return replace(observation, update={name: t.to(observation.update[name]) for name, t in found.items()})


def noted(guess: Guess, observation: Observation) -> Guess:
    """Return what was found with the reason in its message why nothing was undone, or not all that the code tells used.

    Samples that were found are those that were trained on: of what they were made is returned, where that is known.
    """
    made = observation.extra.get("as_trained")
    if made is not None and isinstance(guess, Reconstruction) and guess.status in ("ok", "diverged"):
        shown = tuple((iteration, made.back(images)) for iteration, images in guess.snapshots)
        guess = replace(guess, images=made.back(guess.images), snapshots=shown)
    return replace(guess, message="; ".join(filter(None, (guess.message, unused(observation)))))


def unused(observation: Observation) -> str:
    """Return why nothing was undone, or not all that the code tells used, in words; empty where all of it was."""
    reason, beyond = observation.extra.get("undone"), observation.extra.get("beyond")
    if isinstance(reason, str):
        return reason
    return f"{UNUSED}: {beyond}" if beyond else ""
