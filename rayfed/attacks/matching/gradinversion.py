"""GradInversion: match gradients in squared distance with image priors and agreement between several seeds.

Source: Yin et al. 2021, "See through Gradients: Image Batch Recovery via GradInversion", section 3. Two differences:
the seeds' images are not registered before averaging, so shifted copies average to a blur. Labels are inferred as in
the other attacks, because the paper's column minima of the last layer cannot find a label twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import cos, pi
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from rayfed.attacks.base import Reconstruction
from rayfed.attacks.inference.labels import fits_labels
from rayfed.attacks.matching.adam import adam, best_restarts
from rayfed.attacks.matching.batch_norm import batch_norm_prior
from rayfed.attacks.matching.distances import squared_l2
from rayfed.attacks.matching.options import GradientMatching, model_dtype
from rayfed.attacks.matching.priors import Prior, euclidean, total_variation
from rayfed.attacks.matching.snapshots import Snapshots
from rayfed.registry import component
from rayfed.samples import Modality
from rayfed.update import Named, Observation

_WARM_UP = 50 / 20_000
"""Share of the iterations in which the step size rises."""


@component
class GradInversion(GradientMatching):
    """Fit images in [0, 1] to the gradient from several random starts, and pull the starts towards their mean image.

    Labels are given or inferred. The batch-norm prior is omitted if the model tracks no running statistics. The seed
    with the smallest objective is returned; the group term is not part of this objective.
    """

    takes: ClassVar[tuple[Modality, ...]] = ("pixels",)

    iterations: Annotated[int, Field(ge=1)] = 4000
    """Number of Adam steps; the step size rises, then falls along a cosine to zero."""
    seeds: Annotated[int, Field(ge=1)] = 4
    """Number of random starts that are fitted together."""
    lr: Annotated[float, Field(gt=0)] = 0.1
    """Maximum step size, in units of the pixel range."""
    matching: Annotated[float, Field(ge=0)] = 1.0
    """Weight of the squared distance of the gradients."""
    tv: Annotated[float, Field(ge=0)] = 1e-4
    """Weight of the total variation."""
    l2: Annotated[float, Field(ge=0)] = 1e-6
    """Weight of the images' Euclidean norm."""
    batch_norm: Annotated[float, Field(ge=0)] = 0.1
    """Weight of the distance between the batch's statistics and the running statistics, at every batch norm."""
    group: Annotated[float, Field(ge=0)] = 0.01
    """Weight of an image's Euclidean distance to the mean of the seeds."""
    noise: Annotated[float, Field(ge=0)] = 0.01
    """Standard deviation of the Gaussian noise added in every step, divided by the step size."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Precision of the model and its gradients; images, objective and priors are always float32."""

    @fits_labels
    def reconstruct(
        self, observations: Sequence[Observation], model: nn.Module, generators: Sequence[torch.Generator]
    ) -> list[Reconstruction]:
        """Return one reconstruction for each observation (see `Attack`). Raises `UserError` for an unknown layer."""
        return self._where_it_can_start(lambda o, g: self._group(o, model, g), observations, generators)

    def _group(
        self, observations: Sequence[Observation], model: nn.Module, generators: Sequence[torch.Generator]
    ) -> list[Reconstruction]:
        prior = self._prior(model, observations[0])
        problem = self._problem(observations, model, self._distance, prior, model_dtype=model_dtype(self.precision))
        shape = self.seeds, problem.dimension
        start = torch.cat(
            [
                self._started(torch.rand(*shape, generator=generator), observation)
                for observation, generator in zip(observations, generators, strict=True)
            ]
        )
        victims = torch.arange(len(observations), device=problem.device).repeat_interleave(self.seeds)

        matched = problem.objective(victims)

        def objective(points: Tensor) -> tuple[Tensor, Tensor]:
            values, slopes = matched(points)
            slopes[:, : problem.pixels] += self.group * _apart(problem.images(points), self.seeds).flatten(1)
            return values, slopes

        def noise() -> Tensor:
            return self.noise * torch.cat([torch.randn(*shape, generator=g) for g in generators]).to(problem.device)

        snapshots, rates = Snapshots(problem.images), _rates(self.lr, self.iterations)
        descent = adam(
            objective,
            problem.begun(start.to(problem.device), victims),
            rates,
            noise=noise,
            watch=snapshots.note,
            boxed=problem.pixels,
        )
        return best_restarts(problem, descent, victims, snapshots)

    def _distance(self, gradients: Named, targets: Named) -> Tensor:
        return self.matching * squared_l2(gradients, targets)

    def _prior(self, model: nn.Module, observation: Observation) -> Prior:
        statistics = batch_norm_prior(model, observation)

        def prior(images: Tensor) -> Tensor:
            value = (self.tv * total_variation(images) + self.l2 * euclidean(images)).mean(1)
            return value if statistics is None else value + self.batch_norm * statistics(images)

        return prior


def _apart(images: Tensor, seeds: int) -> Tensor:
    """Return the slope of every image's distance to its mean over the seeds, with the mean fixed; (Q, N, C, H, W).

    The slope is divided by N, as all terms are means over the batch. Row v * seeds + s holds seed s of victim v.
    """
    groups = images.unflatten(0, (-1, seeds))
    difference = groups - groups.mean(1, keepdim=True)
    norms = euclidean(difference)[..., None, None, None].clamp(min=torch.finfo(images.dtype).tiny)
    directions: Tensor = (difference / norms).flatten(0, 1) / images.shape[1]
    return directions


def _rates(lr: float, iterations: int) -> list[float]:
    """Return the step size of each iteration: linear warm-up to `lr`, multiplied by half a cosine."""
    warm_up = max(1, round(_WARM_UP * iterations))
    return [lr * min(1, (i + 1) / warm_up) * (1 + cos(pi * i / iterations)) / 2 for i in range(iterations)]
