"""GradDefense: noise on each layer's gradient by its sensitivity, followed by a removal of noise-only directions.

Source: Wang et al. 2022, 'Protect privacy from gradient leakage attack in federated learning'; Refiner (Fan 2024) calls
it the improved Soteria. Three steps, and what was chosen where our account of the paper leaves it open:

1. Sensitivity: how strongly a layer's gradient answers to the input, on a public root set of five samples a class. A
   layer is one parameter tensor; its sensitivity is the root mean square over the samples of the Frobenius norm of that
   Jacobian, estimated by one random direction a sample (the paper: the mean norm). Once for the weights of a round.
2. Perturbation: the flattened gradient is laid out row by row as a matrix, and its columns are the slices: each has
   every w-th value, so all layers in proportion, and an attacker finds no layer to leave out. Gaussian noise, in
   proportion to the sensitivity of a value's layer, falls on every value.
3. Compensation: eigenvalues of the columns' covariance inside the Marchenko-Pastur band of noise are projected out. The
   band holds for equal noise, so values are measured in units of their own layer's sensitivity meanwhile.

The paper perturbs the local gradient, and so does this: every local step's.
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

from rayfed import seeds
from rayfed.defences.base import Batch, Defence, GradientMethod, Task
from rayfed.defences.sample_gradients import needing_from_model
from rayfed.gradients import batch_loss, flatten, loss_of, unflatten, within
from rayfed.models.copying import copy_model
from rayfed.number_types import check_types
from rayfed.registry import component
from rayfed.samples import Modality
from rayfed.update import Named
from rayfed.vectorised import in_turn, refusal

_ROOT = 5
"""Number of samples a class of the root set."""
_SLOPES_AT_ONCE = 16_000_000
"""Number of values in the gradients of one vectorised call."""


@component
class GradDefense(Defence):
    """Add Gaussian noise to each layer's gradient by its sensitivity, then project out noise-only directions.

    Needs public data (`data.public`). Empirical: it carries no (epsilon, delta), for nothing is clipped. Source: Wang
    2022.
    """

    needs_classes: ClassVar[bool] = True
    takes: ClassVar[tuple[Modality, ...]] = ("pixels", "records")

    scale: Annotated[float, Field(ge=0)]
    """Root mean square of the noise's deviations, in the units of the gradient; a layer's own is in proportion to its
    sensitivity."""
    q: Annotated[float, Field(ge=1)] = 10.0
    """Mixing ratio: rows over columns of the matrix, the values of a slice over the number of slices."""

    @property
    def least_public(self) -> int:
        """Fewest public samples: one, for the sensitivities."""
        return 1

    def check_gradient(self, task: Task) -> None:
        """Raise `UserError` if the model's loss cannot be differentiated in a sample and then in the weights."""
        if task.public is not None:
            with needing_from_model(
                "grad_defense", "second derivatives of the loss", "use operations that PyTorch differentiates twice"
            ):
                root_sensitivity(task)

    def wrap_gradient(self, next: GradientMethod) -> GradientMethod:
        """Perturb and compensate every batch's gradient."""
        sensitivity_of = _once_a_round(root_sensitivity)

        def gradient(task: Task, weights: Named, batch: Batch) -> tuple[Named, Tensor]:
            exact, loss = next(task, weights, batch)
            return self._defended(exact, sensitivity_of(task), task.generator), loss

        return gradient

    def _defended(self, exact: Named, sensitivity: Named, generator: torch.Generator) -> Named:
        check_types(exact, "grad_defense")
        unit = flatten({name: sensitivity[name].expand(t.shape) for name, t in exact.items()})
        unit = unit / unit.square().mean().sqrt()
        values = flatten(exact)
        # Of a layer that never answers to the input nothing can be told: it is sent as it is, and has no unit.
        silent = unit == 0
        relative = torch.where(silent, 0.0, values / unit)
        noise = self.scale * torch.randn(values.shape, generator=generator).to(values)
        return unflatten(torch.where(silent, values, unit * compensated(relative + noise, self.scale, self.q)), exact)


def compensated(vector: Tensor, scale: float, q: float) -> Tensor:
    """Return a noisy vector (n,), noise deviation `scale`, without the directions that contain only noise.

    As a matrix of about q times as many rows as columns: the eigenvectors of its columns' covariance whose eigenvalues
    lie inside scale^2 (1 -+ sqrt(columns / rows))^2 are projected out (Marchenko-Pastur 1967).
    """
    columns = max(1, round((len(vector) / q) ** 0.5))
    rows = -(-len(vector) // columns)
    matrix = F.pad(vector, (0, rows * columns - len(vector))).view(rows, columns)
    eigenvalues, directions = torch.linalg.eigh(matrix.T @ matrix / rows)
    spread = (columns / rows) ** 0.5
    noise = (eigenvalues >= (scale * (1 - spread)) ** 2) & (eigenvalues <= (scale * (1 + spread)) ** 2)
    lost = directions[:, noise]
    kept: Tensor = (matrix - matrix @ lost @ lost.T).flatten()[: len(vector)]
    return kept


def root_sensitivity(task: Task) -> Named:
    """Return each parameter tensor's sensitivity, a scalar, at the weights that the client was sent.

    The same for all clients of a round: it depends on weights and public data alone, its random directions included.
    The network is in evaluation mode. Raises `UserError` where there are no public data.
    """
    generator = seeds.torch_generator("grad_defense", task.round)
    return sensitivity(task.model, task.weights, task.buffers, root_set(task.public_for("grad_defense")), generator)


def root_set(public: Batch) -> Batch:
    """Return the first public samples of each class."""
    rows = torch.cat([(public.labels == label).nonzero().flatten()[:_ROOT] for label in public.labels.unique()])
    return Batch(public.inputs[rows], public.labels[rows])


def sensitivity(model: nn.Module, weights: Named, buffers: Named, root: Batch, generator: torch.Generator) -> Named:
    """Return the root mean square over samples of the Frobenius norm of d(gradient)/d(image), a scalar a tensor.

    E[|J v|^2] is that norm's square for v of random signs; one v a sample serves all tensors. J v is the gradient, in
    the weights, of the loss's slope along v.
    """
    signs = 2.0 * torch.randint(0, 2, root.inputs.shape, generator=generator).to(root.inputs) - 1
    own, chunk = copy_model(model).eval(), max(1, _SLOPES_AT_ONCE // sum(w.numel() for w in weights.values()))
    together = vmap(partial(_squares, own, weights, buffers), chunk_size=chunk)
    blank = tuple(torch.zeros_like(t[:1]).expand(2, *t.shape[1:]) for t in (root.inputs, root.labels, signs))
    if refusal(model, "sensitivity", lambda: together(*blank)):
        found = in_turn(partial(_squares_by_autograd, own, weights, buffers))(root.inputs, root.labels, signs)
    else:
        found = together(root.inputs, root.labels, signs)
    return {name: square.mean().sqrt() for name, square in found.items()}


def _squares(
    model: nn.Module, weights: Named, buffers: Named, image: Tensor, label: Tensor, direction: Tensor
) -> Named:
    """Return the square of J v for one image and direction, a scalar a tensor, by a derivative forward in the image."""

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
    """Cache `compute` until clients are sent other weights."""
    weights: Named | None = None
    result: Named = {}

    def remembered(task: Task) -> Named:
        nonlocal weights, result
        if task.weights is not weights:
            weights, result = task.weights, compute(task)
        return result

    return remembered
