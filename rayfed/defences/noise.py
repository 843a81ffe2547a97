"""What the noise defences share: clip an update to a norm, add noise to every value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from rayfed.defences.base import Task, UpdateMethod
from rayfed.privacy.accountant import Release
from rayfed.privacy.spending import Spending
from rayfed.update import Named, Update

Draw = Callable[[torch.Size, torch.Generator], Tensor]
"""Noise of a shape, drawn on the CPU so that it is the same on every device."""


def clipped(tensors: Named, bound: float, order: float) -> Named:
    """All tensors scaled together so that their joint norm of that order is at most `bound`."""
    norms = torch.stack([torch.linalg.vector_norm(t, ord=order) for t in tensors.values()])
    joint = torch.linalg.vector_norm(norms, ord=order)
    factor = torch.clamp(bound / joint.clamp(min=torch.finfo(joint.dtype).tiny), max=1.0)
    return {name: t * factor for name, t in tensors.items()}


def noisy(next: UpdateMethod, clip: float | None, order: float, draw: Draw) -> UpdateMethod:
    """The update method that clips and adds noise from the client's own generator."""

    def update(task: Task) -> Update:
        sent = next(task)
        tensors = sent.tensors if clip is None else clipped(sent.tensors, clip, order)
        noised = {name: t + draw(t.shape, task.generator).to(t) for name, t in tensors.items()}
        return replace(sent, tensors=noised, bits=32)

    return update


def local_spending(name: str, release: Release, delta: float) -> Spending:
    """What a client spends that hides all of its data in noise of its own; its updates need nobody's trust."""
    return Spending(
        (release,),
        delta,
        unit="client",
        adjacency="all samples of one client replaced",
        against="whoever sees the client's updates, the server among them",
        mechanism=f"{name.capitalize()} noise of {release.multiplier:.3g} times the sensitivity (twice the clip bound) "
        f"on each of up to {release.count} updates of a client",
    )
