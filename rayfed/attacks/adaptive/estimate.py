"""Maximum-likelihood gradient under noise with a structure, for attacks that read values of a gradient.

Values on which the noise has no effect, such as sums in which it cancels, are kept. Other values become 0 by a weak
normal prior. Searches use the density of the noise itself (`rayfed.attacks.adaptive.passage`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from rayfed.attacks.adaptive.passage import Passage, find_noise_passage
from rayfed.gradients import flatten, unflatten
from rayfed.update import Named, Observation

_PRIOR, _START = 1e-3, 1e-6
"""Standard deviation of the prior, and size of the start, relative to the root mean square of a tensor."""
_STEPS = 100
"""Maximum number of steps of L-BFGS."""
_DRAWS = 4
"""Number of simulated updates for the test of the estimate."""
_UNLIKELY = 1.0
"""Nats per value by which the update may be less likely than simulated ones."""


def estimate_gradient(observation: Observation, model: nn.Module) -> Observation:
    """Return an observation with the most likely gradient as update, if the declared noise has a structure.

    The observation is returned unchanged if the update is much less likely than updates simulated for the estimate.
    """
    passage = find_noise_passage(observation, model)
    if passage is None:
        return observation
    try:
        found = _maximise(passage)
        if not bool(flatten(found).isfinite().all()) or not _is_likely(passage, found):
            return observation
    except Exception:  # code of users may raise anything
        return observation
    update = {name: (observation.scale * tensor).to(observation.update[name]) for name, tensor in found.items()}
    return replace(observation, update=update, extra={**observation.extra, "as_sent": observation})


def as_sent(observation: Observation) -> Observation:
    """Return the observation before `estimate_gradient`."""
    sent: Observation = observation.extra.get("as_sent", observation)
    return sent


def _maximise(passage: Passage) -> Named:
    """Return the gradient with the largest density, starting near 0."""
    gradient = {name: tensor.double() for name, tensor in passage.observation.gradient.items()}
    sizes = {}
    for name, tensor in gradient.items():
        size = tensor.square().mean().sqrt()
        sizes[name] = torch.where(size > 0, size, torch.ones_like(size))
    # Positive, because the sign of a value may be unknown.
    point = _START * flatten({name: tensor.abs() / sizes[name] for name, tensor in gradient.items()})

    def scale(point: Tensor) -> Named:
        return {name: sizes[name] * tensor for name, tensor in unflatten(point, gradient).items()}

    def objective(point: Tensor) -> Tensor:
        prior = point.square().sum() / (2 * _PRIOR**2)
        return passage.nats(passage.send(scale(point))) + prior / passage.silence

    point = _minimise(objective, point)
    return {name: tensor.detach() for name, tensor in scale(point).items()}


def _minimise(objective: Callable[[Tensor], Tensor], start: Tensor) -> Tensor:
    """Return the end of a search from `start` by L-BFGS."""
    point = start.clone().requires_grad_()
    optimiser = torch.optim.LBFGS(
        [point],
        max_iter=_STEPS,
        tolerance_grad=0.0,
        tolerance_change=0.0,
        history_size=_STEPS,
        line_search_fn="strong_wolfe",
    )

    def step() -> Tensor:
        optimiser.zero_grad()
        value = objective(point)
        value.backward()
        return value

    with torch.enable_grad():
        optimiser.step(step)
    return point.detach()


def _is_likely(passage: Passage, gradient: Named) -> bool:
    """Return whether the update is nearly as likely as updates that the defence's code sends for the gradient."""
    sent = passage.send(gradient)
    expected = {name: passage.observation.scale * tensor for name, tensor in sent.items()}
    simulated = []
    for seed in range(_DRAWS):
        update = passage.declared.send_noisy(passage.task, expected, seed)
        own = replace(passage, observation=replace(passage.observation, update=update))
        simulated.append(float(own.nats(sent)) * passage.silence)
    count = sum(tensor.numel() for tensor in sent.values())
    return float(passage.nats(sent)) * passage.silence <= max(simulated) + _UNLIKELY * count
