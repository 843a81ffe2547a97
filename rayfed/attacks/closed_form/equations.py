"""Equations for samples: f(x) = b, solved exactly where f is affine and by Gauss-Newton elsewhere.

Sources: Paige and Saunders 1982, "LSQR: An Algorithm for Sparse Linear Equations and Sparse Least Squares"; Levenberg
1944 and Marquardt 1963, for the damping of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator, lsqr
from torch import Tensor

Map = Callable[[Tensor], Tensor]
"""From samples (N, *shape) to any shape, differentiable."""

_LSQR_STEPS = 1000
_NEWTON_STEPS = 20
_SLOW = 0.9
"""Part of the distance that a step of Gauss-Newton leaves at most: near a solution it leaves far less."""
_USUAL = 0.2
"""Standard deviation of the values of a usual photograph."""
_AT_END, _MUCH = 0.01, 0.1
"""How near to its least or largest value, beside their distance, a value counts as alike; and how many of them do."""
_MOST_NUMBERS, _MOST_SLOPES = 1024, 2**22
"""Numbers of a sample, and times those of f, up to which all slopes are taken at once."""
_APART = 1e-5
"""Half the way between two samples whose difference is a slope."""
_DAMPING = (1e-10, 1e-7, 1e-5, 1e-3, 1e-2, 1e-1)
"""Singular values of the slopes, beside the largest, below which a step is held back."""
_EXACT = 1e-6
"""Relative error up to which double precision takes two values for the same."""


class Solution(NamedTuple):
    """Samples that solve f(x) = b as far as it can be solved."""

    samples: Tensor
    """(N, *shape), not clamped; what f says nothing of is grey, as where the search began."""
    residual: float
    """|f(x) - b| / |b - f(grey)|: 0 for a solution, 1 for a grey sample."""


def is_affine(function: Map, samples: Tensor) -> bool:
    """Return whether f is affine between samples x (N, *shape) and 1 - x, by three of its values."""
    with torch.no_grad():
        low, high = function(samples), function(1 - samples)
        between = function(0.25 * samples + 0.75 * (1 - samples))
    gap = (0.25 * low + 0.75 * high - between).norm()
    return bool(gap <= _tolerance(samples) * (high - low).norm()) and bool((high - low).norm() > 0)


def solve(function: Map, target: Tensor, shape: tuple[int, ...], affine: bool) -> Solution:
    """Solve f(x) = target for samples of a shape (N, *shape) from grey on, in least squares.

    An affine f takes one step, which is exact where f determines the samples; another f at most twenty. Where such an f
    does not see a sample's brightness, as behind a layer norm, the sample is moved into [0, 1]; where it does not see
    its contrast either, the sample is given all of [0, 1].
    """
    samples = torch.full(shape, 0.5, device=target.device, dtype=target.dtype)
    first = best = float(_values(function, samples, target).norm())
    for _ in range(1 if affine else _NEWTON_STEPS):
        before = best
        for step in _steps(function, samples, target, affine):
            distance = float(_values(function, samples + step, target).norm())
            if distance < best:
                nearest, best = samples + step, distance
        if best < before:
            samples = nearest
        if best > _SLOW * before or best <= 1e-10 * first:
            break
    if not affine:
        samples = _in_range(function, samples, target, best, _tolerance(samples) * first)
    return Solution(samples, best / first if first > 0 else 0.0)


def _in_range(function: Map, samples: Tensor, target: Tensor, best: float, rounding: float) -> Tensor:
    """Rescale samples to the brightness and contrast of usual images, if f at them stays as near to the target.

    Each channel by itself comes before all alike. What has much that is alike at an end, as a digit's black, reaches
    from 0 to 1, also where noise speaks a little against it; what has not is given a usual deviation. Where f tells
    contrast, by the number that keeps a norm from dividing by zero, the sample is moved into [0, 1], its mean near 0.5.
    """
    for scaled in (True, False):
        for first in (min(2, samples.ndim - 1), 1):
            dimensions = tuple(range(first, samples.ndim))
            low, high = samples.amin(dimensions, keepdim=True), samples.amax(dimensions, keepdim=True)
            reach = (high - low).clamp(min=torch.finfo(samples.dtype).tiny)
            at_end = torch.minimum(samples - low, high - samples) < _AT_END * reach
            ends = float(at_end.double().mean()) > _MUCH
            spread = samples.std(dimensions, keepdim=True) / _USUAL
            size = reach.clamp(min=1) if not scaled else reach if ends else torch.maximum(reach, spread)
            lowest = (0.5 - (samples - low).mean(dimensions, keepdim=True) / size).clamp(min=0)
            moved = (samples - low) / size + lowest.minimum(1 - reach / size)
            free = 1 + (samples.numel() if ends else 1) / target.numel()
            if float(_values(function, moved, target).norm()) <= best * free + rounding:
                return moved
    return samples


def _values(function: Map, samples: Tensor, target: Tensor) -> Tensor:
    with torch.no_grad():
        return function(samples) - target


def _steps(function: Map, samples: Tensor, target: Tensor, affine: bool) -> Iterator[Tensor]:
    """Yield least-squares solutions of J d = target - f(x), J being the slope of f at x, whole and shorter ones."""
    if affine or (slopes := _slopes(function, samples)) is None:
        step = _iterated(function, samples, target, affine)
        yield from (size * step for size in (1.0, 0.5, 0.1, 0.01))
        return
    left, values, right = torch.linalg.svd(slopes, full_matrices=False)
    missing = left.mT @ -_values(function, samples, target).reshape(len(samples), -1, 1)
    for damping in _DAMPING:
        least = (damping * values.amax(1, keepdim=True)).clamp(min=torch.finfo(values.dtype).tiny)
        yield (right.mT @ (missing * (values / (values.square() + least.square()))[..., None])).view_as(samples)


def _iterated(function: Map, samples: Tensor, target: Tensor, affine: bool) -> Tensor:
    """Return the least-squares solution of J d = target - f(x) by LSQR, which never holds J."""
    inputs = samples.clone().requires_grad_()
    with torch.enable_grad():
        values = function(inputs)
    here = values.detach()
    if not values.requires_grad:  # nothing of f has a slope
        return torch.zeros_like(samples)
    small = 1.0 if affine else _EXACT

    def forward(vector: np.ndarray) -> np.ndarray:
        direction = torch.from_numpy(vector.reshape(samples.shape)).to(samples)
        size = small / max(float(direction.abs().max()), 1e-30)
        with torch.no_grad():
            return _array((function(samples + size * direction) - here) / size)

    def backward(vector: np.ndarray) -> np.ndarray:
        cotangent = torch.from_numpy(vector.reshape(values.shape)).to(samples)
        (slope,) = torch.autograd.grad(values, inputs, cotangent, retain_graph=True, materialize_grads=True)
        return _array(slope)

    operator = LinearOperator((here.numel(), samples.numel()), matvec=forward, rmatvec=backward, dtype=np.float64)
    tolerance = 1e-14 if affine else 1e-8
    steps = _LSQR_STEPS if affine else min(_LSQR_STEPS, 2 * samples.numel())
    found = lsqr(operator, _array(target - here), atol=tolerance, btol=tolerance, iter_lim=steps)[0]
    return torch.from_numpy(found.reshape(samples.shape)).to(samples)


@torch.no_grad()
def _slopes(function: Map, samples: Tensor) -> Tensor | None:
    """Return the slopes of f at samples (N, *shape) by differences, (N, F, D), of all their numbers in one call each.

    None where they are many, where differences are not exact enough, or where f is not one of each sample by itself.
    """
    numbers = samples[0].numel()
    if numbers > _MOST_NUMBERS or samples.dtype != torch.float64:
        return None
    here, alone = function(samples), function(samples[:1])
    if len(here) != len(samples) or len(alone) != 1 or here[0].numel() * numbers > _MOST_SLOPES:
        return None
    around = _APART * torch.eye(numbers).to(samples).view(numbers, *samples.shape[1:])
    found: list[Tensor] = []
    for sample in samples:
        moved = function(torch.cat([sample[None], sample + around, sample - around])).flatten(1)
        if len(found) == 0 and (moved[0] - alone.flatten()).norm() > _EXACT * alone.norm():
            return None
        found.append(((moved[1 : numbers + 1] - moved[numbers + 1 :]) / (2 * _APART)).T)
    return torch.stack(found)


def _array(tensor: Tensor) -> np.ndarray:
    array: np.ndarray = tensor.detach().reshape(-1).double().cpu().numpy()
    return array


def _tolerance(samples: Tensor) -> float:
    return _EXACT if samples.dtype == torch.float64 else 1e-3
