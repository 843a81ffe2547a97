"""Inversion of a map that the defences apply to gradients or samples: element-wise maps by bisection, affine by LSQR.

The map is only evaluated, so that it may also be code of a user without a derivative.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from rayfed.attacks.base import Reconstruction
from rayfed.attacks.closed_form.equations import is_affine, solve
from rayfed.attacks.closed_form.probe import NotRounded
from rayfed.gradients import flatten, unflatten
from rayfed.update import Named, Observation

Map = Callable[[Tensor], Tensor]
"""Function from a vector (D,) to a vector (D,)."""

_SAME = 1e-3
"""Largest norm of the difference of equal vectors, relative to their norm, as after rounding to 16 bits."""
_SMALLEST_GAIN = 1e-3
"""Smallest relative gain of a map; directions with a lower gain are lost."""
_HALVINGS = 100
"""Number of steps of a bisection."""


def invert_defences(observation: Observation, model: nn.Module) -> Observation:
    """Return an observation with the gradient that entered the defences, if their map of gradients is invertible.

    Otherwise, the observation is returned unchanged. Earlier rounds are inverted as well.
    """
    earlier = tuple(invert_defences(one, model) for one in observation.earlier)
    observation = replace(observation, earlier=earlier)
    declared = observation.extra.get("observation_model")
    if declared is None or not declared.stages or declared.noise is not None or not observation.update:
        return observation
    if declared.samplewise or declared.inverted or (observation.local.steps > 1 and declared.changes_gradients):
        return observation
    task = declared.blank_task(observation, model)

    def sent(gradient: Tensor) -> Tensor:
        with torch.enable_grad(), NotRounded():  # a defence may take gradients itself
            tensors = unflatten(gradient, observation.update)
            made: Tensor = flatten(declared.through(task, tensors, observation))
            return made

    try:
        found = _invert_gradient(sent, observation)
    except Exception:  # code of users may raise anything
        return observation
    if found is None:
        return observation
    update = {name: observation.scale * tensor for name, tensor in found.items()}
    extra = {**observation.extra, "observation_model": replace(declared, inverted=True)}
    return replace(observation, update=update, extra=extra)


def invert_data(guess: Reconstruction, observation: Observation, model: nn.Module) -> Reconstruction:
    """Return a reconstruction of the samples before the defences changed them, if the map of samples is invertible."""
    declared = observation.extra.get("observation_model")
    if declared is None or guess.status not in ("ok", "diverged"):
        return guess
    if not declared.changes_data or not guess.images.is_floating_point():
        return guess

    def before(images: Tensor) -> Tensor:
        task = declared.task(observation, model, images, guess.labels[: len(images)])

        def trained(values: Tensor) -> Tensor:
            own = task.data._replace(inputs=values.view_as(images))
            made: Tensor = declared.train_on(declared.fresh(task.replace(data=own))).inputs.flatten()
            return made

        with torch.enable_grad():
            found = preimage(trained, images.flatten(), torch.rand)
        return images if found is None else found.detach().view_as(images).clamp(0, 1)

    shown = tuple((iteration, before(images)) for iteration, images in guess.snapshots)
    return replace(guess, images=before(guess.images), snapshots=shown)


def preimage(function: Map, target: Tensor, draw: Callable[..., Tensor]) -> Tensor | None:
    """Return the values (D,) that an element-wise or affine map sends to the target.

    None for other maps and the identity. `draw` samples values of the map's domain.
    """
    generator = torch.Generator().manual_seed(0)
    one, other = draw(2, len(target), generator=generator).to(target)
    offset = function(torch.zeros_like(target))
    if _alike(function(one) - offset, one):
        return target - offset if offset.any() else None  # exact, also for values that were 0
    half = torch.rand(len(target), generator=generator).to(target) < 0.5
    together = function(torch.where(half, one, other))
    apart = torch.where(half, function(one), function(other))
    if _alike(together, apart):
        found = _bisect(function, target) if len(together.unique()) > len(together) / 2 else None
    else:
        found = _solve_affine(function, target)
    return None if found is None or _alike(found, target) else found


def _invert_gradient(sent: Map, observation: Observation) -> Named | None:
    """Return the gradient that a map sends to the observed one; None for the identity and maps without inverse."""
    target = flatten(observation.gradient)
    found = preimage(sent, target, torch.randn)
    if found is None:
        return None
    # The inverse must also hold for permuted values of each tensor, except values that are never sent.
    generator = torch.Generator().manual_seed(0)
    parts = found.split([tensor.numel() for tensor in observation.update.values()])
    other = torch.cat([part[torch.randperm(len(part), generator=generator)] for part in parts])
    made = sent(other)
    back = preimage(sent, made, torch.randn)
    if back is None:
        return None
    away = (back - other).where(back != 0, 0.0)  # only rounding errors, or directions with a very small gain
    seen = (sent(other + away) - made).norm()
    lost = away.norm() > _SAME * other.norm() and seen * other.norm() <= _SMALLEST_GAIN * away.norm() * made.norm()
    return None if lost else unflatten(found, observation.update)


def _bisect(function: Map, target: Tensor) -> Tensor | None:
    """Return the values (D,) that a monotone element-wise map sends to the target; None if there are none."""
    size = 1e3 * target.abs().max().clamp(min=1).expand_as(target)
    rising, constant = function(size) > function(-size), function(size) == function(-size)
    low, high = -size, size
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        below = (function(middle) < target) == rising
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    found = ((low + high) / 2).masked_fill(constant, 0)
    return found if _alike(function(found), target) else None


def _solve_affine(function: Map, target: Tensor) -> Tensor | None:
    """Return the values (D,) that an affine map sends to the target, with 0 for lost ones; None for other maps."""
    if not is_affine(function, torch.rand(len(target), generator=torch.Generator().manual_seed(1)).to(target)):
        return None
    # values that the map does not determine remain 0.5
    found, residual = solve(lambda raised: function(raised - 0.5), target, target.shape, affine=True)
    return found - 0.5 if residual <= _SAME else None


def _alike(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).norm() <= _SAME * other.norm())
