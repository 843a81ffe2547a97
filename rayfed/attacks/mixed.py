"""Unmixing of FedBoosting's fused models by a curious client, into every update by itself.

All clients of a round are shown N mixtures of N updates in known shares, so the updates solve N linear equations for
each value. The shares of Ren's thesis (equation 4.5) are never singular: its own update dominates every mixture.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from rayfed.update import Named, Observation


def unmixed(observation: Observation) -> Observation:
    """Return the observation with the victim's own update and buffers, where all mixtures of the round were shown."""
    shown = observation.shown
    if shown is None:
        return observation
    factors = torch.linalg.inv(shown.shares)[list(shown.updates).index(observation.victim)]
    found = replace(
        observation,
        shown=None,
        update=_combined(list(shown.updates.values()), factors),
        returned_buffers=_combined(list(shown.buffers.values()), factors),
    )
    return found.to(next(iter(observation.weights.values())).device)


def _combined(mixtures: list[Named], factors: Tensor) -> Named:
    """Return the sum of mixtures times factors, in double precision, for factors have both signs."""
    return {
        name: torch.tensordot(factors, torch.stack([m[name].double() for m in mixtures]), dims=1).to(like)
        for name, like in mixtures[0].items()
    }
