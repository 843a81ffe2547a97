"""Model inversion of a split model: reconstruct images from the activations of the victim's private part.

Source: Gu et al. 2021, "Federated Deep Learning with Bayesian Privacy", appendix A.2.2, algorithm 3; after He et al.
2019, "Model Inversion Attacks Against Collaborative Inference".
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.func import vmap

from rayfed.attacks.base import Reconstruction, not_applicable
from rayfed.attacks.forward_probe import without_tracking
from rayfed.attacks.groups import in_groups
from rayfed.attacks.inference.labels import needs_labels
from rayfed.attacks.matching.lbfgs import Minima, minimise
from rayfed.attacks.matching.priors import total_variation
from rayfed.attacks.matching.snapshots import Snapshots
from rayfed.models.front import Front
from rayfed.registry import component
from rayfed.samples import Modality, SampleSpec
from rayfed.update import Observation

_NOT_GRANTED = (
    "the attack needs the victim's activations and a colluder's private part: add `knowledge: [activations, colluder]`"
)
_TRACED = 50


@component
class ModelInversion:
    """Reconstruct images whose activations in a colluder's private part match those that the victim sent.

    Added to the paper: a penalty on the squared distance of a pixel from [0, 1], and a final clamp. Labels are
    recovered from the gradient of the last layer.
    """

    needs_classes: ClassVar[bool] = True
    takes: ClassVar[tuple[Modality, ...]] = ("pixels",)

    cut: str
    """Name of the last private module, for example `features.0`."""
    iterations: Annotated[int, Field(ge=1)] = 500
    """Maximum number of L-BFGS steps. The search ends earlier if the objective stops improving."""
    tv: Annotated[float, Field(ge=0)] = 0.1
    """Weight of an image's total variation, relative to the sum of squared errors of its activations."""

    def check(self, model: nn.Module, sample: SampleSpec, classes: int) -> None:
        """Raise `UserError` unless the model contains the module `cut` and runs the module in a forward pass."""
        Front(model, self.cut).names(sample)

    @needs_labels
    def reconstruct(
        self, observations: Sequence[Observation], model: nn.Module, generators: Sequence[torch.Generator]
    ) -> list[Reconstruction]:
        """Return one reconstruction for each observation (see `Attack`). Raises `UserError` for an unknown `cut`."""
        if any(not {"activations", "colluder"} <= observation.extra.keys() for observation in observations):
            return [not_applicable(observation, _NOT_GRANTED) for observation in observations]
        return in_groups(lambda o, g: self._group(o, model, g), observations, generators)

    def _group(
        self, observations: Sequence[Observation], model: nn.Module, generators: Sequence[torch.Generator]
    ) -> list[Reconstruction]:
        shape = (observations[0].batch_size, *observations[0].sample.shape)
        device = next(iter(observations[0].weights.values())).device
        sent = torch.stack([observation.extra["activations"] for observation in observations]).to(device)
        front = Front(without_tracking(model).to(device), self.cut)
        colluders = {
            name: torch.stack([observation.extra["colluder"][name] for observation in observations]).to(device)
            for name in front.names(observations[0].sample)
        }

        def objective(points: Tensor, victims: Tensor) -> tuple[Tensor, Tensor]:
            images = points.detach().requires_grad_().unflatten(1, shape)
            outputs = vmap(front)({name: t[victims] for name, t in colluders.items()}, images)
            missed, outside = outputs - sent[victims], images - images.clamp(0, 1)
            losses = _squares(missed) + _squares(outside) + self.tv * total_variation(images).sum(1)
            (slopes,) = torch.autograd.grad(losses.sum(), images)
            return losses.detach(), slopes.flatten(1)

        start = torch.stack([torch.rand(shape, generator=g).flatten() for g in generators]).to(device)
        snapshots = Snapshots(lambda points: points.unflatten(1, shape))
        minima = minimise(objective, start, self.iterations, watch=snapshots.note)
        images = minima.points.unflatten(1, shape).clamp(0, 1).cpu()
        return [
            _reconstruction(image, o, minima, row, snapshots)
            for row, (image, o) in enumerate(zip(images, observations, strict=True))
        ]


def _squares(tensors: Tensor) -> Tensor:
    """Return the sum of squares of each tensor, (Q, ...) -> (Q,)."""
    return tensors.square().flatten(1).sum(1)


def _reconstruction(
    images: Tensor, observation: Observation, minima: Minima, row: int, snapshots: Snapshots
) -> Reconstruction:
    assert observation.labels is not None
    steps, loss = int(minima.iterations[row]), minima.values[row].item()
    chosen = sorted({*range(0, steps, max(1, steps // _TRACED)), steps})
    return Reconstruction(
        images=images,
        labels=observation.labels.cpu(),
        loss=loss,
        trace=[(i, minima.history[i, row].item()) for i in chosen],
        snapshots=snapshots.until(steps, images, row),
        iterations=steps,
        status="ok" if isfinite(loss) else "diverged",
        message="" if isfinite(loss) else "the objective is not finite at the starting point of the search",
    )
