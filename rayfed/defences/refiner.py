"""Refiner: clients send the gradient of refined images that look like noise but train like their own.

Source: Fan et al. 2024, "Refiner: Data Refining against Gradient Leakage Attacks in Federated Learning", equations 2 to
4 and section 3.4; section 4.1 for the radius.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from rayfed import gradients
from rayfed.defences.base import Batch, Defence, GradientMethod, Task
from rayfed.defences.sample_gradients import needing_from_model
from rayfed.models.pretrained import load_evaluator
from rayfed.registry import component
from rayfed.samples import Modality
from rayfed.update import Named


@component
class Refiner(Defence):
    """Replace each batch by robust data, which an evaluation network rates as noise, before computing its gradient.

    Empirical. Choices that the paper leaves open: equation 4 sums the squared differences of all layers. A layer is a
    module with parameters, counted from 1. The gradients of the images are multiplied by the number of images, so that
    `lr` does not depend on the batch size. Pixels are clamped to [0, 1]. The projection is Euclidean (the paper's
    appendix C is missing).
    """

    takes: ClassVar[tuple[Modality, ...]] = ("pixels",)

    alpha: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Share of uniform noise in the initial images."""
    beta: Annotated[float, Field(ge=0)] = 1.0
    """Weight of the privacy metric relative to the utility metric."""
    iterations: Annotated[int, Field(ge=0)] = 10
    """Number of gradient descent steps on the images."""
    utility: Literal["printed", "relative"] = "printed"
    """Utility metric. `printed`: equation 4, whose slope is a million times smaller than the privacy metric's in most
    models, so that it has no effect. `relative`: the squared distance of the gradients, weighted by `tau`, divided by
    the squared norm of the true gradient."""
    tau: Annotated[float, Field(gt=0, le=1)] = 0.95
    """Decay of the utility metric's weights from one layer to the next."""
    epsilon: Annotated[float, Field(gt=0)] = 0.1
    """Maximum Euclidean distance between the sent gradient and the true one. Not a privacy parameter."""
    lr: Annotated[float, Field(gt=0)] = 1.0
    """Step size of the gradient descent on the images."""
    evaluator: Path | None = None
    """File written by `rayfed train-evaluator`; `~` and environment variables are expanded. Null: the network included
    in rayfed."""

    def check(self, model: nn.Module) -> None:
        """Raise `UserError` if the evaluation network cannot be loaded."""
        load_evaluator(self.evaluator, torch.device("cpu"))

    def check_gradient(self, task: Task) -> None:
        """Raise `UserError` if the model's gradient cannot be differentiated with respect to its inputs."""
        inputs = task.data.inputs.clone().requires_grad_()
        with needing_from_model(
            "refiner", "gradients that can be differentiated", "use operations that PyTorch differentiates twice"
        ):
            slopes, _ = gradients.gradient(
                task.model, task.weights, task.buffers, inputs, task.data.labels, create_graph=True
            )
            torch.autograd.grad(gradients.flatten(slopes).square().sum(), inputs)

    @property
    def has_latents(self) -> bool:
        """Return True, because refined images start from random noise."""
        return True

    def transform(self, task: Task, tensors: Named) -> Named:
        """Return the gradient unchanged: the sent gradient is within a distance of `epsilon`."""
        return tensors

    def wrap_gradient(self, next: GradientMethod) -> GradientMethod:
        """Replace a batch's gradient by the gradient of robust data, projected into a ball around the true gradient.

        The batch-norm statistics are those of the robust data, too.
        """

        def gradient(task: Task, weights: Named, batch: Batch) -> tuple[Named, Tensor]:
            true, loss = next(_apart(task), weights, batch)
            sent, _ = next(task, weights, self._refined(task, weights, batch, true))
            return projected(sent, true, self.epsilon), loss

        return gradient

    def _refined(self, task: Task, weights: Named, batch: Batch, true: Named) -> Batch:
        """Return the batch with its images replaced by robust ones."""
        noise = torch.rand(batch.inputs.shape, generator=task.generator).to(batch.inputs)
        images = (1 - self.alpha) * batch.inputs + self.alpha * noise
        evaluator = load_evaluator(self.evaluator, images.device)
        importance = (utility_weights if self.utility == "printed" else relative_weights)(true, weights, self.tau)
        for _ in range(self.iterations):
            images.requires_grad_()
            slopes, _ = gradients.gradient(
                task.model, weights, _apart(task).buffers, images, batch.labels, batch.mask, create_graph=True
            )
            differences = gradients.flatten({name: importance[name] * (g - true[name]) for name, g in slopes.items()})
            push = len(images) * torch.autograd.grad(differences.square().sum(), images)[0]
            push -= self.beta * torch.autograd.grad(evaluator(images).sum(), images)[0]
            images = (images.detach() - self.lr * push).clamp(0, 1)
        return batch._replace(inputs=images)


def utility_weights(true: Named, weights: Named, tau: float) -> Named:
    """Return each gradient value's importance (equation 3): |gradient * weight| * tau^layer, with layers from 1."""
    layers = _layers(weights)
    return {name: (true[name] * w).abs() * tau ** layers[name] for name, w in weights.items()}


def relative_weights(true: Named, weights: Named, tau: float) -> Named:
    """Return each tensor's importance relative to the true gradient: tau^layer / norm(gradient), a scalar."""
    norm = gradients.norm(true).clamp(min=torch.finfo(torch.float32).tiny)
    return {name: tau**layer / norm for name, layer in _layers(weights).items()}


def _layers(weights: Named) -> dict[str, int]:
    """Return the layer of each parameter: the number of its module, from 1."""
    modules = list(dict.fromkeys(name.rpartition(".")[0] for name in weights))
    return {name: 1 + modules.index(name.rpartition(".")[0]) for name in weights}


def projected(sent: Named, true: Named, radius: float) -> Named:
    """Project the gradient `sent` onto the ball of the given radius around the gradient `true`, over all layers."""
    apart = {name: t - true[name] for name, t in sent.items()}
    share = torch.clamp(radius / gradients.norm(apart), max=1.0)
    return {name: true[name] + share * t for name, t in apart.items()}


def _apart(task: Task) -> Task:
    """Return the task with a copy of its buffers, so that auxiliary passes do not change the sent ones."""
    return task.replace(buffers={name: b.clone() for name, b in task.buffers.items()})
