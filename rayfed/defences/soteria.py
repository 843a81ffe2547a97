"""Soteria: set to zero the columns of one linear layer's gradient that reveal the input (Sun et al. 2021).

Source: 'Soteria: Provable defense against privacy leakage in federated learning from representation perspective',
section 4. Let r be the input features of the layer. Setting r_i to 0 moves the attacker's estimate of the input x by
about abs(r_i) / norm(dr_i/dx). The features with the largest such displacement, that is the smallest norm(dr_i/dx) /
abs(r_i), are pruned.

The formula is for one sample. The samples of a batch share the columns, so their displacements are added. The authors'
code instead divides by r_i with its sign, adds norm(dr_i/dx) / r_i over the batch and takes the absolute value of the
sum. There, features of opposite sign cancel, and one feature of zero hides that feature of all other samples.

The defence is broken: all other gradients are sent unchanged. An attacker that leaves the layer out of its objective
reconstructs the input as without the defence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.func import jvp, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from rayfed.core.vectorised import find_refusal
from rayfed.defences.base import Batch, Defence, GradientMethod, Task
from rayfed.defences.declarations import straight_through
from rayfed.defences.sample_gradients import needing_from_model
from rayfed.errors import UserError, nearest
from rayfed.models.build import uses_batch_statistics
from rayfed.models.copying import copy_model
from rayfed.models.front import Front
from rayfed.registry import component
from rayfed.samples import Modality
from rayfed.update import Named, Update

Features = Callable[[Tensor], Tensor]
"""Function from images (N, C, H, W) to features (N, F), each sample independently."""

_IMAGES_AT_ONCE = 256
"""Maximum number of images whose tangents or slopes are in memory at once; a larger limit is not faster."""


@component
class Soteria(Defence):
    """Set to zero the columns of a linear layer's weight gradient that reveal most about the input.

    Features are computed in evaluation mode, without dropout. Batch norm in training mode is an error, because a
    feature would depend on the batch's other samples. Empirical. Source: Sun 2021, section 4.
    """

    takes: ClassVar[tuple[Modality, ...]] = ("pixels", "records")

    ratio: Annotated[float, Field(ge=0, lt=1)]
    """Share of the features that is pruned: floor(ratio * features)."""
    layer: str | None = None
    """Name of the `nn.Linear` whose input features are pruned. Null: the model's last one."""
    jacobian: Literal["exact", "estimated"] = "exact"
    """`exact`: one row per feature, as in the paper. `estimated`: the rows' squared norms are estimated with random
    probes, at a cost that does not depend on the number of features."""
    probes: Annotated[int, Field(ge=1)] = 16
    """Number of random directions of `jacobian: estimated`. The relative error of the squared norms is sqrt(2 /
    probes)."""

    def check(self, model: nn.Module) -> None:
        """Raise `UserError` if the layer is not linear, or if the model has batch norm in training mode."""
        self._layer_of(model)
        if uses_batch_statistics(model):
            raise UserError(
                "soteria: scores are per sample, but batch norm in training mode mixes the samples of a batch: "
                "set `model.batch_norm: eval`"
            )

    def check_gradient(self, task: Task) -> None:
        """Raise `UserError` if the features cannot be differentiated with respect to the input."""
        with needing_from_model(
            "soteria", "derivatives of features with respect to the input", "use differentiable operations"
        ):
            self._kept_of(self._front(task.model), task, task.weights, task.data)

    @property
    def has_latents(self) -> bool:
        """Return whether the columns depend on random probes, which the attacker does not know."""
        return self.jacobian == "estimated"

    def transform(self, task: Task, tensors: Named) -> Named:
        """Return the gradient of the task's samples without the pruned columns, with the derivative of the identity."""
        front = self._front(task.model)
        name = f"{front.cut}.weight"
        samples = task.data._replace(inputs=task.data.inputs.detach())
        kept = self._kept_of(front, task, task.weights, samples)
        return tensors | {name: straight_through(tensors[name] * kept, tensors[name])}

    def wrap_gradient(self, next: GradientMethod) -> GradientMethod:
        """Set the most revealing columns of the layer's weight gradient to zero, in every batch's gradient."""
        front_of = cache(self._front)

        def gradient(task: Task, weights: Named, batch: Batch) -> tuple[Named, Tensor]:
            sent, loss = next(task, weights, batch)
            front = front_of(task.model)
            name = f"{front.cut}.weight"
            return sent | {name: sent[name] * self._kept_of(front, task, weights, batch)}, loss

        return gradient

    def exposed(self, update: Update) -> Named:
        """Return a mask of the layer's columns that at least one local step left unpruned."""
        # By default the last matrix, which is that of the last linear layer unless an embedding follows it.
        name = f"{self.layer}.weight" if self.layer else [n for n, t in update.tensors.items() if t.dim() == 2][-1]
        weight = update.tensors[name]
        return {name: (weight != 0).any(dim=0).expand_as(weight)}

    def _kept_of(self, front: Front, task: Task, weights: Named, batch: Batch) -> Tensor:
        """Return which of the layer's columns a batch keeps, (F,) bool, in a loop over features if vmap refuses."""
        state = {**weights, **task.buffers}

        def features(images: Tensor) -> Tensor:
            return front(state, images)

        blank = torch.zeros_like(batch.inputs[:1])
        trial = partial(self._norms, features, blank, torch.Generator(), in_turn=False)
        in_turn = bool(find_refusal(task.model, f"soteria {self.jacobian}", trial))
        return self._kept(features, batch.inputs, task.generator, in_turn)

    def _kept(self, features: Features, images: Tensor, generator: torch.Generator, in_turn: bool) -> Tensor:
        """Return which of the layer's columns a batch keeps, (F,) bool."""
        with torch.no_grad():
            values = features(images)
        if values.dim() != 2:
            raise UserError(
                f"soteria: the layer's input has shape {tuple(values.shape)}, not one row per sample; choose another"
            )
        norms = self._norms(features, images, generator, in_turn)
        kept = torch.ones(values.shape[1], dtype=torch.bool, device=values.device)
        pruned = displacement(values, norms).topk(int(self.ratio * len(kept))).indices
        return kept.scatter(0, pruned, torch.zeros_like(pruned, dtype=torch.bool))  # vmap refuses it in place

    def _norms(self, features: Features, images: Tensor, generator: torch.Generator, in_turn: bool) -> Tensor:
        """Return norm(dr_i/dx) of every sample and feature, (N, F), exact or estimated as `jacobian` says."""
        if self.jacobian == "exact":
            return jacobian_norms(features, images, in_turn)
        return estimated_norms(features, images, self.probes, generator, in_turn)

    def _front(self, model: nn.Module) -> Front:
        return Front(copy_model(model).eval(), self._layer_of(model), before=True)

    def _layer_of(self, model: nn.Module) -> str:
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        linear = [name for name in layers if f"{name}.weight".lstrip(".") in trained]  # a weight norm trains no weight
        if not linear:
            raise UserError("soteria: the model has no trainable nn.Linear: choose another defence or model")
        if self.layer is not None and self.layer not in linear:
            raise UserError(f"soteria: '{self.layer}' is not a trainable nn.Linear; {nearest(self.layer, linear)}")
        return self.layer or linear[-1]


def displacement(features: Tensor, norms: Tensor) -> Tensor:
    """Return how far pruning each feature moves the attacker's estimates, summed over N samples, (F,).

    It is 0 if a feature is already zero, even if its slope is also zero (an inactive ReLU).
    """
    return torch.where(features == 0, 0.0, features.abs() / norms).sum(0)


def jacobian_norms(features: Features, images: Tensor, in_turn: bool = False) -> Tensor:
    """Return the norm of each feature's derivative with respect to the input, (N, F), from the full Jacobian.

    With `in_turn`, the rows are computed one by one, for models that vmap refuses.
    """
    if in_turn:
        values, inputs = _with_graph(features, images)
        sums = values.sum(0)
        slopes = [torch.autograd.grad(one, inputs, retain_graph=True, materialize_grads=True)[0] for one in sums]
        return torch.stack([slope.flatten(1).norm(dim=1) for slope in slopes], 1)
    values, pull = vjp(features, images)  # type: ignore[misc]

    def norm(row: Tensor) -> Tensor:
        norms: Tensor = pull(row.expand_as(values))[0].flatten(1).norm(dim=1)
        return norms

    rows = torch.eye(values.shape[1], dtype=values.dtype, device=values.device)
    return vmap(norm, out_dims=1, chunk_size=max(1, _IMAGES_AT_ONCE // len(images)))(rows)


@torch.no_grad()
def estimated_norms(
    features: Features, images: Tensor, probes: int, generator: torch.Generator, in_turn: bool = False
) -> Tensor:
    """Estimate the norm of each feature's derivative with respect to the input, (N, F), by random probes.

    The squares are unbiased: E[(J v)_i^2] = norm(dr_i/dx)^2 for v of random signs (Hutchinson's estimator of the
    diagonal of J J^T). One forward-mode probe gives all features for the cost of about one forward pass, for any F.
    With `in_turn`, J v is computed by two backward passes, for models without forward mode or vmap.
    """
    signs = 2.0 * torch.randint(0, 2, (probes, *images.shape), generator=generator).to(images) - 1
    if in_turn:
        return torch.stack(list(_squares_in_turn(features, images, signs))).mean(0).sqrt()

    def squares(direction: Tensor) -> Tensor:
        slopes: Tensor = jvp(features, (images,), (direction,))[1].square()
        return slopes

    return vmap(squares, chunk_size=max(1, _IMAGES_AT_ONCE // len(images)))(signs).mean(0).sqrt()


def _squares_in_turn(features: Features, images: Tensor, directions: Tensor) -> Iterator[Tensor]:
    """Yield the squares of J v, (N, F), for each direction v."""
    values, inputs = _with_graph(features, images)
    with torch.enable_grad():
        weights = torch.zeros_like(values).requires_grad_()
        (slope,) = torch.autograd.grad(values, inputs, weights, create_graph=True)
        for direction in directions:
            yield torch.autograd.grad(slope, weights, direction, retain_graph=True)[0].square()


def _with_graph(features: Features, images: Tensor) -> tuple[Tensor, Tensor]:
    """Return the features, and the images as leaves of their graph."""
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):  # fused attention has first derivatives only
        inputs = images.detach().requires_grad_()
        return features(inputs), inputs
