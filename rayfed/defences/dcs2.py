"""DCS2: add to each sensitive sample a concealed one that looks different but has nearly the same gradient.

Source: Wu et al. 2024, "Concealing Sensitive Samples against Gradient Leakage in Federated Learning", equations 9 to 12
and algorithm 1. Iterations, optimiser and weights are those of its published settings.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import ceil
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.linalg import vector_norm
from torch.nn import functional as F

from rayfed.core import losses
from rayfed.core.vectorised import find_refusal, map_in_turn
from rayfed.defences.base import Batch, Defence, GradientMethod, Task
from rayfed.defences.sample_gradients import check_sample_gradients, needing_from_model
from rayfed.errors import UserError
from rayfed.gradients import sample_rows
from rayfed.models.build import uses_batch_statistics
from rayfed.registry import component
from rayfed.samples import Modality
from rayfed.update import Named

_NUMBERS_AT_ONCE = 16_000_000
"""Maximum number of values in the per-sample gradients of one vectorised call; a larger limit only uses more memory."""
_MILESTONES = (3 / 8, 5 / 8, 7 / 8)

Labels = dict[Literal["labels"], Annotated[list[int], Field(min_length=1)]]


@component
class Dcs2(Defence):
    """Hide chosen samples among concealed ones that are optimised for them, anew in every local step.

    The pixels of concealed samples are not limited to [0, 1]. The step stays within 90 degrees of the undefended one.
    As in the paper, its length is unbounded: equation 9 compares only directions. If the model already fits its own
    data, the gradients of concealed samples are many times longer. Every iteration needs the gradient of every
    concealed sample and its derivative, so a step takes about a thousand times as long as without the defence.
    Empirical.
    """

    needs_classes: ClassVar[bool] = True
    takes: ClassVar[tuple[Modality, ...]] = ("pixels", "records")

    sensitive: Literal["all"] | Annotated[float, Field(gt=0, le=1)] | Labels | list[int] = "all"
    """Samples of a client to conceal: `all`, a share (its first samples), all samples of some classes (`{labels: [3,
    5]}`), or a list of indices among the client's samples, counted from 0."""
    start: Literal["sample", "noise", "public"] = "sample"
    """Start of a concealed sample. `sample`: another sample of the client. `noise`: uniform noise with a random label.
    `public`: a public image (the scenario's `data.public`)."""
    mixup: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the sensitive image in the start. The paper's mixture has 0.3."""
    iterations: Annotated[int, Field(ge=1)] = 1000
    """Number of Adam steps. The step size is divided by ten at 3/8, 5/8 and 7/8 of them."""
    lr: Annotated[float, Field(gt=0)] = 0.1
    """Initial step size, in units of the range of a pixel."""
    lambda_x: Annotated[float, Field(ge=0)] = 0.01
    """Decay rate, with the Euclidean distance, of the penalty on similar images."""
    lambda_z: Annotated[float, Field(ge=0)] = 0.01
    """Weight of the relative distance of the model's outputs."""
    epsilon: Annotated[float, Field(ge=0)] = 0.01
    """Value subtracted from the relative distance. It shifts the objective but not its gradient."""
    lambda_g: Annotated[float, Field(ge=0, le=1)] = 0.7
    """Share of the concealed sample's own label in its loss; the rest is the sensitive sample's label."""
    stop_distance: Annotated[float, Field(gt=0)] | None = None
    """Euclidean distance from its sensitive sample, in units of the pixel range, at which a concealed sample is no
    longer moved. The authors' code stops at 300 to 500 in normalised pixels, which are 92 to 154 for MNIST. Null: all
    iterations."""
    margin: Annotated[float, Field(ge=0)] = 0.0
    """Minimum multiple of the undefended step that the projection adds if a step is opposed to it. The paper's closed
    form has 0, the authors' code 0.5."""
    ridge: Annotated[float, Field(ge=0)] = 0.0
    """Number added to the squared norm by which the projection divides. The paper's closed form has 0, the authors'
    code 0.001, which leaves a part of the opposed component if gradients are small."""

    @property
    def least_public(self) -> int:
        """Return the minimum number of public samples: 1 if concealed samples start from public ones, else 0."""
        return int(self.start == "public")

    def check(self, model: nn.Module) -> None:
        """Raise `UserError` if the model has batch norm in training mode, which mixes the samples of a batch."""
        if uses_batch_statistics(model):
            raise UserError(
                "dcs2 imitates per-sample gradients, but batch norm mixes the samples of a batch: use group norm "
                "(`norm: group` of convnet and the resnets, `nn.GroupNorm` in your own module), or fix the statistics "
                "with `model.batch_norm: eval`, which changes the model of all arms, including the undefended one"
            )

    def check_gradient(self, task: Task) -> None:
        """Raise `UserError` if the model's per-sample gradients cannot be computed and then differentiated."""
        check_sample_gradients("dcs2", task)
        images = task.data.inputs.clone().requires_grad_()
        with needing_from_model(
            "dcs2", "gradients that can be differentiated", "use operations that PyTorch differentiates twice"
        ):
            gradients, logits = _sample_gradients(task, task.weights, images, task.data.labels)
            torch.autograd.grad(gradients.sum() + logits.sum(), images)

    @property
    def has_latents(self) -> bool:
        """Return True, because concealed samples start from random ones of the client, the public or noise."""
        return True

    def transform(self, task: Task, tensors: Named) -> Named:
        """Return the gradient unchanged, because that of concealed samples has nearly the same direction."""
        return tensors

    def wrap_gradient(self, next: GradientMethod) -> GradientMethod:
        """Add concealed samples to each batch, and remove the result's component opposed to the batch's gradient."""

        def gradient(task: Task, weights: Named, batch: Batch) -> tuple[Named, Tensor]:
            own, loss = next(task, weights, batch)
            chosen = batch.rows(self._sensitive(task, batch).nonzero().flatten())
            if not len(chosen.labels):
                return own, loss
            start = self._start(task, chosen)
            images = torch.cat([self._concealed(task, weights, *part) for part in _parts(chosen, start, weights)])
            labels = torch.lerp(_one_hot(task, chosen.labels), _one_hot(task, start.labels), self.lambda_g)
            joined = Batch(torch.cat([batch.inputs, images]), torch.cat([_one_hot(task, batch.labels), labels]))
            mean, _ = next(task, weights, joined)
            # As in equation 10, a concealed sample has the same weight as a sample of the batch.
            growth = len(joined.labels) / len(batch.labels)
            return projected({name: growth * g for name, g in mean.items()}, own, self.margin, self.ridge), loss

        return gradient

    def _sensitive(self, task: Task, batch: Batch) -> Tensor:
        """Return which samples of a batch are sensitive, (N,) bool."""
        if batch.places is None:
            raise UserError(
                "dcs2 conceals a client's own samples, but a defence before it replaces them: remove one of the two"
            )
        match self.sensitive:
            case "all":
                return torch.ones_like(batch.labels, dtype=torch.bool)
            case float(share):
                return batch.places < ceil(share * _samples(task))
            case {"labels": labels}:
                return torch.isin(batch.labels, torch.tensor(labels).to(batch.labels))
            case places:
                return torch.isin(batch.places, torch.tensor(places).to(batch.places))

    def _start(self, task: Task, chosen: Batch) -> Batch:
        """Return the initial images of the concealed samples."""
        count, device = len(chosen.labels), chosen.inputs.device
        match self.start:
            case "noise":
                images = torch.rand(chosen.inputs.shape, generator=task.generator).to(chosen.inputs)
                labels = torch.randint(task.classes, (count,), generator=task.generator).to(device)
                found = Batch(images, labels)
            case "public":
                public = task.public_for("dcs2 with `start: public`")
                found = public.rows(torch.randint(len(public.labels), (count,), generator=task.generator))
            case "sample":
                found = _others(task, chosen)
        return found._replace(inputs=found.inputs.lerp(chosen.inputs, self.mixup))

    def _concealed(self, task: Task, weights: Named, chosen: Batch, start: Batch) -> Tensor:
        """Return the images that minimise equation 9, (N, C, H, W), each independently.

        An image whose distance exceeds `stop_distance` makes one more step, as in the authors' code.
        """
        gradients = _sample_gradients(task, weights, chosen.inputs, chosen.labels)
        slopes, logits = (part.detach() for part in gradients)
        images = start.inputs.clone().requires_grad_()
        ends, moving = images.detach().clone(), torch.ones(len(images), dtype=torch.bool, device=images.device)
        optimiser = torch.optim.Adam([images], lr=self.lr)
        milestones = [ceil(share * self.iterations) for share in _MILESTONES]
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimiser, milestones)
        for _ in range(self.iterations):
            found, answers = _sample_gradients(task, weights, images, start.labels)
            apart = vector_norm(images - chosen.inputs, dim=(1, 2, 3))
            output = vector_norm(answers - logits, dim=1) / vector_norm(logits, dim=1)
            objective = 1 - F.cosine_similarity(found, slopes) + torch.exp(-self.lambda_x * apart)
            objective = objective + self.lambda_z * (output - self.epsilon)
            (images.grad,) = torch.autograd.grad(objective.sum(), images)
            optimiser.step()
            schedule.step()
            if self.stop_distance is not None:
                ends[moving] = images.detach()[moving]
                moving &= apart.detach() <= self.stop_distance
                if not moving.any():
                    break
        return images.detach() if self.stop_distance is None else ends


def projected(step: Named, own: Named, margin: float = 0.0, ridge: float = 0.0) -> Named:
    """Return `step` without its component opposed to the gradient `own`, if it has one (equation 12).

    This is the solution v of the quadratic program of equation 11, with v >= `margin` and `ridge` added to the square.
    """
    inner, square = (sum(torch.sum(other[name] * g) for name, g in own.items()) for other in (step, own))
    assert isinstance(inner, Tensor)
    if inner >= 0:
        return step
    multiple = (-inner / (square + ridge)).clamp(min=margin)
    return {name: g + multiple * own[name] for name, g in step.items()}


def _sample_gradients(task: Task, weights: Named, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return every sample's gradient as a row, (N, P), and its logits (N, K), in one forward pass or in a loop.

    Both are differentiable with respect to the images.
    """
    if _vmap_refused(task, weights, images, labels):
        gradients, logits = map_in_turn(partial(_by_autograd, task, weights))(images, labels)
    else:
        gradients, logits = _together(task, weights, images, labels)
    return sample_rows(gradients), logits


def _vmap_refused(task: Task, weights: Named, images: Tensor, labels: Tensor) -> bool:
    """Return whether vmap cannot compute differentiable per-sample gradients; tested once per model."""

    def trial() -> None:
        own = task.replace(buffers={name: b.clone() for name, b in task.buffers.items()})
        blank = torch.zeros_like(images[:1]).expand(2, *images.shape[1:]).clone().requires_grad_()
        gradients, logits = _together(own, weights, blank, torch.zeros_like(labels[:1]).expand(2, *labels.shape[1:]))
        torch.autograd.grad(sample_rows(gradients).sum() + logits.sum(), blank)

    return bool(find_refusal(task.model, "dcs2", trial))


def _together(task: Task, weights: Named, images: Tensor, labels: Tensor) -> tuple[Named, Tensor]:
    """Return every sample's gradient (N, ...) by name, and its logits (N, K), in one vmap call."""

    def loss(w: Named, image: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        logits = functional_call(task.model, {**w, **task.buffers}, (image[None],))
        return losses.get_loss(task.model)(logits, label[None]), logits[0]

    each = vmap(grad(loss, has_aux=True), in_dims=(None, 0, 0), randomness="different")
    found: tuple[Named, Tensor] = each(weights, images, labels)
    return found


def _by_autograd(task: Task, weights: Named, image: Tensor, label: Tensor) -> tuple[Named, Tensor]:
    """Return one sample's gradient by name and its logits (K,), both differentiable with respect to the image."""
    leaves = {name: w.detach().requires_grad_() for name, w in weights.items()}
    logits = functional_call(task.model, {**leaves, **task.buffers}, (image[None],))
    loss = losses.get_loss(task.model)(logits, label[None])
    slopes = torch.autograd.grad(loss, list(leaves.values()), create_graph=True, materialize_grads=True)
    return dict(zip(leaves, slopes, strict=True)), logits[0]


def _parts(chosen: Batch, start: Batch, weights: Named) -> Iterator[tuple[Batch, Batch]]:
    """Yield samples with their initial images, as many as fit into one vectorised call."""
    size = max(1, _NUMBERS_AT_ONCE // sum(w.numel() for w in weights.values()))
    for index in torch.arange(len(chosen.labels)).split(size):
        yield chosen.rows(index), start.rows(index)


def _one_hot(task: Task, labels: Tensor) -> Tensor:
    return F.one_hot(labels, task.classes).float()


def _samples(task: Task) -> int:
    """Return the number of the client's samples."""
    return len(task.data.labels) + (0 if task.others is None else len(task.others.labels))


def _others(task: Task, chosen: Batch) -> Batch:
    """Sample another of the client's samples for each chosen one."""
    count = _samples(task)
    if count < 2:
        raise UserError(
            f"dcs2 starts from another sample of the client, but client {task.client} has only one: add samples, "
            f"or set `start: noise`"
        )
    assert chosen.places is not None
    drawn = torch.randint(count - 1, chosen.labels.shape, generator=task.generator).to(chosen.places)
    drawn += drawn >= chosen.places
    return task.everything.rows(drawn)
