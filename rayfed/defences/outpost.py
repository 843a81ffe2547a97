"""Outpost: gradients of early local steps are pruned and perturbed by importance, with decreasing probability.

Source: Wang et al. 2023, "More than Enough is Too Much: Adaptive Defenses against Gradient Leakage in Production
Federated Learning". The defaults are those of the authors' framework. The Fisher information is computed on the batch,
as the square of its gradient.
"""

from __future__ import annotations

from math import ceil
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from rayfed.core.number_types import check_types
from rayfed.defences.base import Batch, Defence, GradientMethod, Task
from rayfed.defences.declarations import normal_log_likelihood, straight_through
from rayfed.gradients import flatten, unflatten
from rayfed.registry import component
from rayfed.update import Named, Update

_DEVIATIONS = 4.0
"""Number of standard errors around zero within which a value counts as pure noise; 1 noise value in 16,000 exceeds
it."""


@component
class Outpost(Defence):
    """Perturb local step t (from 0) with probability 1 / (1 + beta t): prune small values, add noise to large ones.

    The noise of a tensor grows with the variance of its weights, a measure of how much they leak. Empirical.
    """

    beta: Annotated[float, Field(ge=0)] = 0.125
    """Decay rate of the probability of perturbing a local step. With 0, every step is perturbed."""
    noise: Annotated[float, Field(ge=0)] = 0.8
    """Standard deviation of the noise, divided by the variance of the tensor's weights (at most 1)."""
    noised: Annotated[float, Field(gt=0, le=1)] = 0.4
    """Share of the gradient's values that get noise: the largest over all tensors."""
    pruned: Annotated[float, Field(ge=0, lt=1)] = 0.8
    """Share of each tensor's values that are set to zero before the noise: the smallest."""

    @property
    def adds_noise(self) -> bool:
        """Return whether the noise has a deviation above 0."""
        return self.noise > 0

    def transform(self, task: Task, tensors: Named) -> Named:
        """Return the pruned gradient of the first local step, with the derivative of the identity."""
        return {name: straight_through(self._pruned(tensor), tensor) for name, tensor in tensors.items()}

    def log_likelihood(self, task: Task, sent: Named, expected: Named) -> Named:
        """Return the log density of each sent value: normal for values with noise, and rounding for the others."""
        deviations = {name: self.noise * self._risk(task.weights[name]) for name in sent}
        noisy, exact = (normal_log_likelihood(sent, expected, width) for width in (deviations, 0.0))
        masks = self._noisy_values(sent, expected, deviations)
        return {name: torch.where(masks[name], torch.maximum(noisy[name], exact[name]), exact[name]) for name in sent}

    def _noisy_values(self, sent: Named, expected: Named, deviations: Named) -> Named:
        """Return which values may have noise: the largest ones of the gradient before pruning.

        A value that is 0 in `expected` has noise if it is not 0 in `sent`. The rest of the noise is on the largest
        values that are not pruned. Noise of deviation 0 does not show, so some values of the rest may have no noise.
        """
        sizes, values = flatten(expected).detach().abs(), flatten(sent)
        noisy = (sizes == 0) & (values != 0)
        shows = flatten({name: deviations[name].expand_as(tensor) for name, tensor in sent.items()}) > 0
        if noisy.any() and not ((values == 0) & shows).any():  # the gradient has too few values that are not 0
            return {name: torch.ones_like(tensor, dtype=torch.bool) for name, tensor in sent.items()}
        rest = ceil(self.noised * len(sizes)) - int(noisy.sum())
        largest = sizes.topk(min(max(rest, 0), int((sizes > 0).sum()))).indices
        noisy[largest] = True
        return unflatten(noisy, expected)

    def wrap_gradient(self, next: GradientMethod) -> GradientMethod:
        """Perturb a batch's gradient with the local step's probability; otherwise leave the gradient unchanged."""

        def gradient(task: Task, weights: Named, batch: Batch) -> tuple[Named, Tensor]:
            found, loss = next(task, weights, batch)
            if torch.rand((), generator=task.generator) >= 1 / (1 + self.beta * task.step):
                return found, loss
            check_types(found, "outpost")
            values = flatten(found).abs().sort(descending=True).values
            least = values[ceil(self.noised * len(values)) - 1]
            return {name: self._perturbed(g, weights[name], least, task.generator) for name, g in found.items()}, loss

        return gradient

    def _perturbed(self, gradient: Tensor, weight: Tensor, least: Tensor, generator: torch.Generator) -> Tensor:
        noise = torch.randn(gradient.shape, generator=generator).to(gradient) * self.noise * self._risk(weight)
        return self._pruned(gradient) + noise * (gradient.abs() >= least)

    def _pruned(self, gradient: Tensor) -> Tensor:
        """Return one tensor's gradient with its smallest values set to zero."""
        magnitudes = gradient.abs()
        smallest = magnitudes.flatten().sort().values[int(self.pruned * gradient.numel())]
        return gradient * (magnitudes >= smallest)

    def _risk(self, weight: Tensor) -> Tensor:
        """Return how much a tensor leaks, a scalar: the variance of its weights, at most 1."""
        return weight.var(correction=0).clamp(max=1)

    def exposed(self, update: Update) -> Named:
        """Return a mask of the update's nonzero values. The attacker cannot see which of the values have noise."""
        return {name: t != 0 for name, t in update.tensors.items()}

    def exposed_in_mean(self, mean: Update, error: Named) -> Named:
        """Return a mask of the mean's nonzero values, except values that are probably pure noise.

        The mean of a value that was pruned before it got noise is close to zero.
        """
        return {name: (t != 0) & (t.abs() > _DEVIATIONS * error[name]) for name, t in mean.tensors.items()}
