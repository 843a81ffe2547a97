"""GradDefense: noise on half of the slices of a gradient, which all have the same total sensitivity to the input.

Source: Wang et al. 2022, 'Protect privacy from gradient leakage attack in federated learning', with the code published
by its authors; Refiner (Fan 2024) calls it the improved Soteria. The steps are those of the code:

1. Sensitivity: how strongly a layer's gradient depends on the input, measured on a public root set of five samples per
   class. A layer is one parameter tensor. Its sensitivity is the mean norm, over the samples, of the derivative of the
   sum of the layer's gradient with respect to the input. It is computed once per round, at the global weights.
2. Slices: the flattened gradient is cut into contiguous slices. A layer's sensitivity is spread evenly over its values,
   and each slice has the same total. The code cuts between blocks of values, and its slices overlap by one value.
3. Perturbation: some slices are sampled at random, and each of their values gets Gaussian noise.

The gradient of every local step is perturbed. The code's compensation at the server, which projects noise out of the
mean of the updates, is left out: it changes no update that an attacker sees.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, ClassVar, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from rayfed.core.number_types import check_types
from rayfed.defences.base import Batch, Defence, GradientMethod, Task
from rayfed.defences.sample_gradients import needing_from_model
from rayfed.gradients import flatten, loss_of, unflatten, within
from rayfed.models.copying import copy_model
from rayfed.registry import component
from rayfed.samples import Modality
from rayfed.update import Named, Update

_ROOT = 5
"""Number of samples per class in the root set."""
_AT_ONCE = 50
"""Number of samples of the root set per pass: the root set of ten classes."""
_RUN, _QUIET = 64, 0.25
"""Number of neighbouring values, and their mean square in units of the noise's variance below which they have no noise:
the probability under noise is 2e-9."""


@component
class GradDefense(Defence):
    """Add Gaussian noise of one scale to a random half of ten contiguous slices of the gradient.

    All slices have the same total sensitivity to the input. The other half is sent exactly, and an attacker can often
    see which it is (`exposed`). Needs public data (`data.public`). Empirical: nothing is clipped, so there is no
    (epsilon, delta). Source: Wang 2022.
    """

    needs_classes: ClassVar[bool] = True
    takes: ClassVar[tuple[Modality, ...]] = ("pixels", "records")

    scale: Annotated[float, Field(ge=0)]
    """Standard deviation of the noise, in the units of the gradient. The authors' examples have 0.0005."""
    slices: Annotated[int, Field(ge=1)] = 10
    """Number of slices."""
    perturbed: Annotated[int, Field(ge=0)] = 5
    """Number of slices that get noise, at most `slices`. They are sampled anew for every gradient."""

    @model_validator(mode="after")
    def _no_more_than_all(self) -> Self:
        if self.perturbed > self.slices:
            raise ValueError(f"perturbed: found {self.perturbed}; give at most the number of slices, {self.slices}")
        return self

    @property
    def least_public(self) -> int:
        """Return the minimum number of public samples: 1, because sensitivities are computed from public samples."""
        return 1

    def check_gradient(self, task: Task) -> None:
        """Raise `UserError` if the loss cannot be differentiated with respect to the weights and then to a sample."""
        if task.public is not None:
            with needing_from_model(
                "grad_defense", "second derivatives of the loss", "use operations that PyTorch differentiates twice"
            ):
                root_sensitivity(task)

    @property
    def has_latents(self) -> bool:
        """Return True: the attacker does not know which slices have noise."""
        return True

    def transform(self, task: Task, tensors: Named) -> Named:
        """Return the gradient unchanged, which is the mean of the sent values."""
        return tensors

    def wrap_gradient(self, next: GradientMethod) -> GradientMethod:
        """Add noise to some slices of each batch's gradient."""
        slices_of = _once_a_round(self._slices)

        def gradient(task: Task, weights: Named, batch: Batch) -> tuple[Named, Tensor]:
            exact, loss = next(task, weights, batch)
            check_types(exact, "grad_defense")
            chosen = torch.randperm(self.slices, generator=task.generator)[: self.perturbed]
            values, slices = flatten(exact), slices_of(task)
            noise = self.scale * torch.randn(values.shape, generator=task.generator).to(values)
            noisy = torch.isin(slices, chosen.to(slices))
            return unflatten(torch.where(noisy, values + noise, values), exact), loss

        return gradient

    def exposed(self, update: Update) -> Named | None:
        """Return a mask of the values that are too small for the noise; None if too few of them are.

        64 neighbouring values have no noise if their mean square is below a quarter of its variance. Runs next to
        larger values are left out, because they may have noise in part.
        """
        values = flatten(update.tensors)
        padded = F.pad(values, (0, -len(values) % _RUN)).view(-1, _RUN)
        quiet = padded.square().mean(1) < _QUIET * self.scale**2
        sides = F.pad(quiet, (1, 1), value=True)
        mask = (sides[:-2] & quiet & sides[2:]).repeat_interleave(_RUN)[: len(values)]
        # Otherwise the noise is small beside the gradient, and the noisy values say more than the rest.
        unperturbed = 1 - self.perturbed / self.slices
        return unflatten(mask, update.tensors) if mask.float().mean() >= unperturbed / 2 else None

    def _slices(self, task: Task) -> Tensor:
        """Return the slice of each value of the flattened gradient, (n,)."""
        sizes = {name: weight.numel() for name, weight in task.weights.items()}
        return slices_of_equal_sensitivity(sizes, root_sensitivity(task), self.slices)


def slices_of_equal_sensitivity(sizes: dict[str, int], sensitivity: Named, slices: int) -> Tensor:
    """Return the slice of each value, (n,) int64, such that contiguous slices have the same total sensitivity.

    Values have the same share of the sensitivity of their tensor. If no tensor depends on the input, slices have the
    same number of values.
    """
    density = torch.cat([(sensitivity[name].double() / size).expand(size) for name, size in sizes.items()])
    if not density.any():
        density = torch.ones_like(density)
    totals = density.cumsum(0)
    middle = (totals - density / 2) / totals[-1]
    return (slices * middle).long().clamp(max=slices - 1)


def root_sensitivity(task: Task) -> Named:
    """Return each parameter tensor's sensitivity (a scalar) to the root set, at the global weights.

    The result is the same for all clients of a round. Raises `UserError` if there are no public data.
    """
    return sensitivity(task.model, task.weights, task.buffers, root_set(task.public_for("grad_defense")))


def root_set(public: Batch) -> Batch:
    """Return the root set: the first public samples of each class."""
    rows = torch.cat([(public.labels == label).nonzero().flatten()[:_ROOT] for label in public.labels.unique()])
    return Batch(public.inputs[rows], public.labels[rows])


def sensitivity(model: nn.Module, weights: Named, buffers: Named, root: Batch) -> Named:
    """Return the mean norm over samples of the derivative of each tensor's summed gradient, one scalar per tensor."""
    own = copy_model(model).eval()
    norms: dict[str, list[Tensor]] = {name: [] for name in weights}
    for rows in torch.arange(len(root.labels), device=root.labels.device).split(_AT_ONCE):
        for name, derivative in _derivatives(own, weights, buffers, root.rows(rows)).items():
            norms[name].append(derivative.flatten(1).norm(dim=1))
    return {name: torch.cat(parts).mean() for name, parts in norms.items()}


def _derivatives(model: nn.Module, weights: Named, buffers: Named, batch: Batch) -> Named:
    """Return the derivatives of each tensor's summed gradient with respect to each sample, (N, *sample) by name."""
    leaves = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
    inputs = batch.inputs.detach().clone().requires_grad_()

    def derivatives(module: nn.Module) -> Named:
        loss = len(inputs) * loss_of(module, inputs, batch.labels)
        slopes = torch.autograd.grad(loss, list(leaves.values()), create_graph=True, materialize_grads=True)
        found = {}
        for name, slope in zip(leaves, slopes, strict=True):
            # A slope that does not depend on the samples, such as that of an unused weight, has no graph.
            total = slope.sum() + 0 * inputs.sum()
            (found[name],) = torch.autograd.grad(total, inputs, retain_graph=True)
        return found

    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):  # fused attention has first derivatives only
        return within(model, {**leaves, **buffers}, derivatives)


def _once_a_round(compute: Callable[[Task], Tensor]) -> Callable[[Task], Tensor]:
    """Cache the result of `compute` until the global weights change."""
    weights: Named | None = None
    result = torch.empty(0)

    def remembered(task: Task) -> Tensor:
        nonlocal weights, result
        if task.weights is not weights:
            weights, result = task.weights, compute(task)
        return result

    return remembered
