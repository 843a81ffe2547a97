"""Recover each client's update from the fused models of FedBoosting, as a curious client can.

Every client of a round receives N mixtures of N updates with known weights. Each value therefore satisfies N linear
equations in N unknowns. The weight matrix of Ren's thesis (equation 4.5) is never singular, because a client's update
dominates its mixture.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from rayfed.update import Named, Observation


def unmixed(observation: Observation) -> Observation:
    """Recover the victim's update and buffers from the mixtures of the round; return the observation with both.

    An observation without mixtures stays unchanged.
    """
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
    """Return the sum of mixtures times factors, in double precision because factors have both signs."""
    return {
        name: torch.tensordot(factors, torch.stack([m[name].double() for m in mixtures]), dims=1).to(like)
        for name, like in mixtures[0].items()
    }
