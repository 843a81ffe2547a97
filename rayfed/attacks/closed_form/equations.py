"""Solve equations f(x) = b for samples x: exactly if f is affine, otherwise by Gauss-Newton.

Sources: Paige and Saunders 1982, "LSQR: An Algorithm for Sparse Linear Equations and Sparse Least Squares"; Levenberg
1944 and Marquardt 1963, for the damping of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

Map = Callable[[Tensor], Tensor]
"""From samples (N, *shape) to any shape, differentiable."""

_LSQR_STEPS = 1000
_NEWTON_STEPS = 20
_SLOW = 0.9
"""Ratio of the distance after a step to that before from which on Gauss-Newton stops."""
_USUAL = 0.2
"""Standard deviation of pixels in a typical photograph."""
_AT_END, _MUCH = 0.01, 0.1
"""A value counts as extreme within this share of the range from its ends, and an image as high-contrast with more than
this share of extreme values."""
_MOST_NUMBERS, _MOST_SLOPES = 1024, 2**22
"""Maximum number of entries of a sample, and of slopes per sample, for which all slopes are computed at once."""
_APART = 1e-5
"""Step of the central differences."""
_DAMPING = (1e-10, 1e-7, 1e-5, 1e-3, 1e-2, 1e-1)
"""Damping factors to try, relative to the largest singular value of the slopes."""
_EXACT = 1e-6
"""Relative error up to which two values are equal in double precision."""


class Solution(NamedTuple):
    """Least-squares solution of f(x) = b."""

    samples: Tensor
    """(N, *shape), not clamped; entries that f does not determine stay grey, the start of the search."""
    residual: float
    """|f(x) - b| / |b - f(grey)|: 0 for a solution, 1 for a grey sample."""


def is_affine(function: Map, samples: Tensor) -> bool:
    """Return whether f is affine between samples x (N, *shape) and 1 - x, tested at three points."""
    with torch.no_grad():
        low, high = function(samples), function(1 - samples)
        between = function(0.25 * samples + 0.75 * (1 - samples))
    gap = (0.25 * low + 0.75 * high - between).norm()
    return bool(gap <= _tolerance(samples) * (high - low).norm()) and bool((high - low).norm() > 0)


def solve(function: Map, target: Tensor, shape: tuple[int, ...], affine: bool) -> Solution:
    """Return the least-squares solution of f(x) = target for samples x of a shape (N, *shape), starting from grey.

    An affine f takes one step, which is exact if f determines the samples. Any other f takes at most twenty steps. If f
    does not depend on a sample's brightness, as after a layer norm, the sample is shifted into [0, 1]. If f does not
    depend on contrast either, the sample is rescaled.
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
    """Rescale samples to typical brightness and contrast if f stays as close to the target.

    Rescaling per channel is tried before rescaling all channels together. Images with many extreme values, such as the
    black background of a digit, are stretched to [0, 1], with some tolerance for noise. Others get a typical standard
    deviation. If f depends on contrast, the sample is only shifted into [0, 1] with a mean near 0.5.
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
    """Yield least-squares steps d of J d = target - f(x), where J is the slope of f at x: full steps, then shorter."""
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
    """Return the least-squares solution of J d = target - f(x) by LSQR, without storing J."""
    from scipy.sparse.linalg import LinearOperator, lsqr  # a slow import, which most runs do not need

    inputs = samples.clone().requires_grad_()
    with torch.enable_grad():
        values = function(inputs)
    here = values.detach()
    if not values.requires_grad:  # f has no slope
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
    """Return the slopes (N, F, D) of f at samples (N, *shape) by central differences, in one call per sample.

    Return None if there are too many slopes, if precision is insufficient, or if f mixes samples.
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
