"""Inverting gradients: the cosine of the gradients and total variation, Adam on the sign of the slope.

Source: Geiping et al. 2020, "Inverting Gradients - How easy is it to break privacy in federated learning?", equation 4
and section 5; its supplement for the schedule of the step size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from rayfed.attacks.base import Reconstruction, not_applicable
from rayfed.attacks.labels import NO_HEAD, with_labels
from rayfed.attacks.matching import Matching, in_groups, one_minus_cosine
from rayfed.catalogue import component
from rayfed.update import Observation

_DECAYS = (3 / 8, 5 / 8, 7 / 8)
_BETAS = (0.9, 0.999)
_TRACED = 50


@component
class InvertingGradients:
    """Fits images in [0, 1] to the direction of the observed gradient, with labels given or inferred."""

    iterations: Annotated[int, Field(ge=1)] = 4800
    """Adam steps; the step size falls by ten at 3/8, 5/8 and 7/8 of them."""
    restarts: Annotated[int, Field(ge=1)] = 1
    """Random starts; the one with the smallest objective counts."""
    lr: Annotated[float, Field(gt=0)] = 0.1
    """The first step size, in units of the range of a pixel."""
    tv: Annotated[float, Field(ge=0)] = 1e-3
    """Weight of the total variation."""
    layers: list[str] | None = None
    """Names or patterns (`conv*`) of the parameters that are matched; all by default."""

    def reconstruct(
        self, observations: Sequence[Observation], model: nn.Module, generators: Sequence[torch.Generator]
    ) -> list[Reconstruction]:
        """One reconstruction for each observation (see `Attack`). Raises `UserError` for an unknown layer."""
        labelled = with_labels(observations, model, generators)
        if labelled is None:
            return [not_applicable(observation, NO_HEAD) for observation in observations]
        return in_groups(lambda o, g: self._group(o, model, g), labelled, generators)

    def _group(
        self, observations: Sequence[Observation], model: nn.Module, generators: Sequence[torch.Generator]
    ) -> list[Reconstruction]:
        problem = Matching.of(observations, model, self.layers, one_minus_cosine, self.tv)
        start = torch.cat([torch.rand(self.restarts, problem.dimension, generator=g) for g in generators])
        victims = torch.arange(len(observations), device=problem.device).repeat_interleave(self.restarts)
        descent = signed_adam(
            lambda points: problem.value_and_gradient(points, victims),
            start.to(problem.device),
            self.iterations,
            self.lr,
        )
        ranked = descent.best_values.reshape(-1, self.restarts).argmin(1)
        rows = ranked + torch.arange(len(observations), device=ranked.device) * self.restarts
        images = problem.images(descent.best[rows]).cpu()
        labels = problem.hard_labels(descent.best[rows], victims[rows]).cpu()
        return [
            _reconstruction(images[v], labels[v], descent, row, self.iterations) for v, row in enumerate(rows.tolist())
        ]


@dataclass(frozen=True)
class Descent:
    """How P problems went."""

    best: Tensor
    """(P, D) each problem's point with the smallest finite value, its start if there was none."""
    best_values: Tensor
    """(P,) the values there, inf if none was finite."""
    last_values: Tensor
    """(P,) the values at the end."""
    trace: list[tuple[int, Tensor]]
    """(iteration, values (P,))"""


def signed_adam(
    objective: Callable[[Tensor], tuple[Tensor, Tensor]], start: Tensor, iterations: int, lr: float
) -> Descent:
    """Adam on the sign of the gradient inside the box [0, 1], for P independent problems (P, D).

    The schedule is scaled to the budget. A problem whose gradient is not finite gets no further push.
    """
    x, best = start.clone(), start.clone()
    best_values = torch.full_like(start[:, 0], torch.inf)
    mean, square = torch.zeros_like(x), torch.zeros_like(x)
    trace = []
    for i in range(iterations + 1):
        values, slopes = objective(x)
        better = values < best_values
        best = torch.where(better[:, None], x, best)
        best_values = torch.where(better, values, best_values)
        if i % max(1, iterations // _TRACED) == 0:
            trace.append((i, values))
        if i == iterations:
            break
        sign = slopes.sign().nan_to_num(0)
        mean.lerp_(sign, 1 - _BETAS[0])
        square.lerp_(sign.square(), 1 - _BETAS[1])
        rate = lr * 0.1 ** sum(i >= share * iterations for share in _DECAYS)
        step = mean / (1 - _BETAS[0] ** (i + 1))
        x = (x - rate * step / ((square / (1 - _BETAS[1] ** (i + 1))).sqrt() + 1e-8)).clamp(0, 1)
    return Descent(best, best_values, values, trace)


def _reconstruction(images: Tensor, labels: Tensor, descent: Descent, row: int, iterations: int) -> Reconstruction:
    finite = isfinite(descent.last_values[row].item())
    return Reconstruction(
        images=images,
        labels=labels,
        loss=descent.best_values[row].item(),
        trace=[(i, values[row].item()) for i, values in descent.trace],
        iterations=iterations,
        status="ok" if finite else "diverged",
        message="" if finite else "the objective stopped being finite; the images are the best before that",
    )
