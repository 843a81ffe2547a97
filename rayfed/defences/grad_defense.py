"""GradDefense: noise on each layer's gradient in proportion to its sensitivity, then removal of pure-noise directions.

Source: Wang et al. 2022, 'Protect privacy from gradient leakage attack in federated learning'; Refiner (Fan 2024) calls
it the improved Soteria. The three steps, with our choices of details that are open:

1. Sensitivity: how strongly a layer's gradient depends on the input, measured on a public root set of five samples
   per class. A layer is one parameter tensor. Its sensitivity is the root mean square over the samples of the Frobenius
   norm of that Jacobian, estimated with one random direction per sample (the paper: the mean norm). It is computed once
   per round, at the global weights.
2. Perturbation: the flattened gradient is written row by row into a matrix whose columns are the slices. With w
   columns, a slice has every w-th value. So it covers all layers in proportion, and an attacker cannot exclude a layer.
   Every value gets Gaussian noise in proportion to the sensitivity of its layer.
3. Compensation: eigenvalues of the columns' covariance inside the Marchenko-Pastur band of noise are projected out. The
   band assumes equal noise, so values are divided by their layer's sensitivity for this step.

As in the paper, the gradient of every local step is perturbed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.func import grad, jvp, vmap
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from rayfed.core import seeds
from rayfed.core.number_types import check_types
from rayfed.core.vectorised import find_refusal, map_in_turn
from rayfed.defences.base import Batch, Defence, GradientMethod, Task
from rayfed.defences.declarations import straight_through
from rayfed.defences.sample_gradients import needing_from_model
from rayfed.gradients import batch_loss, flatten, loss_of, unflatten, within
from rayfed.models.copying import copy_model
from rayfed.registry import component
from rayfed.samples import Modality
from rayfed.update import Named

_ROOT = 5
"""Number of samples per class in the root set."""
_SLOPES_AT_ONCE = 16_000_000
"""Maximum number of values in the gradients of one vectorised call."""


@component
class GradDefense(Defence):
    """Add Gaussian noise to each layer's gradient by its sensitivity, then project out directions of pure noise.

    Needs public data (`data.public`). Empirical: nothing is clipped, so there is no (epsilon, delta). Source: Wang
    2022.
    """

    needs_classes: ClassVar[bool] = True
    takes: ClassVar[tuple[Modality, ...]] = ("pixels", "records")

    scale: Annotated[float, Field(ge=0)]
    """Root mean square of the noise's standard deviations, in the units of the gradient. Each layer's deviation is
    proportional to its sensitivity."""
    q: Annotated[float, Field(ge=1)] = 10.0
    """Mixing ratio: rows per column of the matrix, which is the number of values in a slice divided by the number of
    slices."""

    @property
    def least_public(self) -> int:
        """Return the minimum number of public samples: 1, because sensitivities are computed from public samples."""
        return 1

    def check_gradient(self, task: Task) -> None:
        """Raise `UserError` if the loss cannot be differentiated with respect to a sample and then to the weights."""
        if task.public is not None:
            with needing_from_model(
                "grad_defense", "second derivatives of the loss", "use operations that PyTorch differentiates twice"
            ):
                root_sensitivity(task)

    @property
    def has_latents(self) -> bool:
        """Return True: the noise decides which directions are removed, and the density of the rest is unknown.

        Removed directions have no noise, so the sent values have no density in their own space. A density of the other
        directions needs the probability that exactly these directions are removed.
        """
        return True

    def transform(self, task: Task, tensors: Named) -> Named:
        """Return the exact gradient without the directions that noise of average size hides."""
        unit = self._deviations(tensors, root_sensitivity(task))
        values = flatten(tensors).detach()
        kept = compensated(torch.where(unit == 0, 0.0, values / unit), self.scale, self.q, missing=True)
        sent = unflatten(torch.where(unit == 0, values, unit * kept), tensors)
        return {name: straight_through(sent[name], tensor) for name, tensor in tensors.items()}

    def wrap_gradient(self, next: GradientMethod) -> GradientMethod:
        """Add noise to each batch's gradient in proportion to sensitivity, then remove directions of pure noise."""
        sensitivity_of = _once_a_round(root_sensitivity)

        def gradient(task: Task, weights: Named, batch: Batch) -> tuple[Named, Tensor]:
            exact, loss = next(task, weights, batch)
            return self._defended(exact, sensitivity_of(task), task.generator), loss

        return gradient

    def _defended(self, exact: Named, sensitivity: Named, generator: torch.Generator) -> Named:
        check_types(exact, "grad_defense")
        unit = self._deviations(exact, sensitivity)
        values = flatten(exact)
        # A layer that does not depend on the input reveals nothing about it, and is sent without noise.
        silent = unit == 0
        relative = torch.where(silent, 0.0, values / unit)
        noise = self.scale * torch.randn(values.shape, generator=generator).to(values)
        return unflatten(torch.where(silent, values, unit * compensated(relative + noise, self.scale, self.q)), exact)

    def _deviations(self, tensors: Named, sensitivity: Named) -> Tensor:
        """Return the standard deviation of each value's noise, (n,), in units of `scale`."""
        unit = flatten({name: sensitivity[name].expand(t.shape) for name, t in tensors.items()})
        return unit / unit.square().mean().sqrt()


def compensated(vector: Tensor, scale: float, q: float, missing: bool = False) -> Tensor:
    """Return a noisy vector (n,), with noise of standard deviation `scale`, without directions of pure noise.

    With `missing`, the vector has no noise, and the mean of the noise's eigenvalues is added to the vector's.

    The vector is reshaped to a matrix with about q times as many rows as columns. Eigenvectors of its columns'
    covariance are projected out if their eigenvalues are inside scale^2 (1 -+ sqrt(columns / rows))^2 (Marchenko-Pastur
    1967).
    """
    columns = max(1, round((len(vector) / q) ** 0.5))
    rows = -(-len(vector) // columns)
    matrix = F.pad(vector, (0, rows * columns - len(vector))).view(rows, columns)
    eigenvalues, directions = torch.linalg.eigh(matrix.T @ matrix / rows)
    eigenvalues = eigenvalues + missing * scale**2
    spread = (columns / rows) ** 0.5
    noise = (eigenvalues >= (scale * (1 - spread)) ** 2) & (eigenvalues <= (scale * (1 + spread)) ** 2)
    lost = directions[:, noise]
    kept: Tensor = (matrix - matrix @ lost @ lost.T).flatten()[: len(vector)]
    return kept


def root_sensitivity(task: Task) -> Named:
    """Return each parameter tensor's sensitivity (a scalar) to the root set, at the global weights.

    The result is the same for all clients of a round, because it depends only on the weights, the public data and a
    seed that they share. Raises `UserError` if there are no public data.
    """
    generator = seeds.torch_generator("grad_defense", task.round)
    return sensitivity(task.model, task.weights, task.buffers, root_set(task.public_for("grad_defense")), generator)


def root_set(public: Batch) -> Batch:
    """Return the root set: the first public samples of each class."""
    rows = torch.cat([(public.labels == label).nonzero().flatten()[:_ROOT] for label in public.labels.unique()])
    return Batch(public.inputs[rows], public.labels[rows])


def sensitivity(model: nn.Module, weights: Named, buffers: Named, root: Batch, generator: torch.Generator) -> Named:
    """Return the root mean square over samples of the Frobenius norm of d(gradient)/d(image), one scalar per tensor.

    For v of random signs, E[|J v|^2] is the square of that norm. All tensors share one v per sample. J v is the
    gradient, with respect to the weights, of the loss's directional derivative along v.
    """
    signs = 2.0 * torch.randint(0, 2, root.inputs.shape, generator=generator).to(root.inputs) - 1
    own, chunk = copy_model(model).eval(), max(1, _SLOPES_AT_ONCE // sum(w.numel() for w in weights.values()))
    together = vmap(partial(_squares, own, weights, buffers), chunk_size=chunk)
    blank = tuple(torch.zeros_like(t[:1]).expand(2, *t.shape[1:]) for t in (root.inputs, root.labels, signs))
    if find_refusal(model, "sensitivity", lambda: together(*blank)):
        found = map_in_turn(partial(_squares_by_autograd, own, weights, buffers))(root.inputs, root.labels, signs)
    else:
        found = together(root.inputs, root.labels, signs)
    return {name: square.mean().sqrt() for name, square in found.items()}


def _squares(
    model: nn.Module, weights: Named, buffers: Named, image: Tensor, label: Tensor, direction: Tensor
) -> Named:
    """Return the square of J v for one image and direction, a scalar per tensor, with forward mode in the image."""

    def slope(w: Named) -> Tensor:
        def loss(x: Tensor) -> Tensor:
            return batch_loss(model, w, buffers, x[None], label[None])

        derivative: Tensor = jvp(loss, (image,), (direction,))[1]
        return derivative

    return {name: g.square().sum() for name, g in grad(slope)(weights).items()}


def _squares_by_autograd(
    model: nn.Module, weights: Named, buffers: Named, image: Tensor, label: Tensor, direction: Tensor
) -> Named:
    """Return the same as `_squares` by two backward passes, for models without forward derivatives or vmap."""
    leaves = {name: w.detach().requires_grad_() for name, w in weights.items()}
    inputs = image[None].detach().requires_grad_()

    def backward(module: nn.Module) -> Named:
        (slope,) = torch.autograd.grad(loss_of(module, inputs, label[None]), inputs, create_graph=True)
        along = (slope * direction).sum()
        slopes = torch.autograd.grad(along, list(leaves.values()), materialize_grads=True)
        return {name: g.square().sum() for name, g in zip(leaves, slopes, strict=True)}

    with sdpa_kernel(SDPBackend.MATH):  # fused attention has first derivatives only
        return within(model, {**leaves, **buffers}, backward)


def _once_a_round(compute: Callable[[Task], Named]) -> Callable[[Task], Named]:
    """Cache the result of `compute` until the global weights change."""
    weights: Named | None = None
    result: Named = {}

    def remembered(task: Task) -> Named:
        nonlocal weights, result
        if task.weights is not weights:
            weights, result = task.weights, compute(task)
        return result

    return remembered
