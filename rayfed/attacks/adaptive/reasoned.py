"""Reason why the result of an adaptive attack says nothing about the true samples."""

from __future__ import annotations

from dataclasses import replace

from rayfed.attacks.base import Guess
from rayfed.update import Observation


def with_reason(guess: Guess, observation: Observation) -> Guess:
    """Return an attack's result with the reason of the observation model, if the attacker has one."""
    declared = observation.extra.get("observation_model")
    if declared is None or declared.reason is None:
        return guess
    if guess.reason is not None:
        return guess
    return replace(guess, message=declared.detail, reason=declared.reason)
