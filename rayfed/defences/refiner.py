"""Refiner: the gradient of robust data is sent, which look like noise but train like the client's own.

Source: Fan et al. 2024, "Refiner: Data Refining against Gradient Leakage Attacks in Federated Learning", equations 2 to
4 and section 3.4; section 4.1 for the radius.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar

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
    """Replace each batch by robust data, which an evaluation network takes for noise, before its gradient.

    Empirical. Where the paper leaves room: equation 4 adds up the squares of all layers' differences; a layer is a
    module with parameters, counted from 1; the slopes are multiplied by the number of images, so that `lr` means the
    same for every batch; pixels stay in [0, 1]; the projection, whose appendix C is missing, is Euclidean.
    """

    takes: ClassVar[tuple[Modality, ...]] = ("pixels",)

    alpha: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Share of uniform noise in the images from which the refinement starts."""
    beta: Annotated[float, Field(ge=0)] = 1.0
    """Weight of the privacy metric against the utility metric."""
    iterations: Annotated[int, Field(ge=0)] = 10
    """Steps of gradient descent on the images."""
    tau: Annotated[float, Field(gt=0, le=1)] = 0.95
    """Decay of the utility metric's weights from layer to layer."""
    epsilon: Annotated[float, Field(gt=0)] = 0.1
    """Largest Euclidean distance of the gradient that is sent from the true one; no privacy parameter."""
    lr: Annotated[float, Field(gt=0)] = 1.0
    """Step size of the refinement."""
    evaluator: Path | None = None
    """File that `rayfed train-evaluator` wrote, `~` and environment variables expanded; null takes the network that
    comes with rayfed."""

    def check(self, model: nn.Module) -> None:
        """Raise `UserError` unless the evaluation network can be loaded."""
        load_evaluator(self.evaluator, torch.device("cpu"))

    def check_gradient(self, task: Task) -> None:
        """Raise `UserError` if the model's gradient cannot be differentiated in its inputs."""
        inputs = task.data.inputs.clone().requires_grad_()
        with needing_from_model(
            "refiner", "gradients that can be differentiated", "use operations that PyTorch differentiates twice"
        ):
            slopes, _ = gradients.gradient(
                task.model, task.weights, task.buffers, inputs, task.data.labels, create_graph=True
            )
            torch.autograd.grad(gradients.flatten(slopes).square().sum(), inputs)

    def wrap_gradient(self, next: GradientMethod) -> GradientMethod:
        """Return the gradient of robust data, near the true one.

        The statistics of batch norm are those of the robust data, too.
        """

        def gradient(task: Task, weights: Named, batch: Batch) -> tuple[Named, Tensor]:
            true, loss = next(_apart(task), weights, batch)
            sent, _ = next(task, weights, self._refined(task, weights, batch, true))
            return projected(sent, true, self.epsilon), loss

        return gradient

    def _refined(self, task: Task, weights: Named, batch: Batch, true: Named) -> Batch:
        """Return the batch with robust images in place of its own."""
        noise = torch.rand(batch.inputs.shape, generator=task.generator).to(batch.inputs)
        images = (1 - self.alpha) * batch.inputs + self.alpha * noise
        evaluator = load_evaluator(self.evaluator, images.device)
        importance = utility_weights(true, weights, self.tau)
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
    """Return each gradient value's importance (equation 3): |gradient * weight| * tau^layer, from 1."""
    modules = list(dict.fromkeys(name.rpartition(".")[0] for name in weights))
    return {
        name: (true[name] * w).abs() * tau ** (1 + modules.index(name.rpartition(".")[0]))
        for name, w in weights.items()
    }


def projected(sent: Named, true: Named, radius: float) -> Named:
    """Return the point nearest to `sent` in the ball of this radius around `true`, all layers as one vector."""
    apart = {name: t - true[name] for name, t in sent.items()}
    share = torch.clamp(radius / gradients.norm(apart), max=1.0)
    return {name: true[name] + share * t for name, t in apart.items()}


def _apart(task: Task) -> Task:
    """Return the task with its own buffers, so that unsent passes do not change them."""
    return task.replace(buffers={name: b.clone() for name, b in task.buffers.items()})
