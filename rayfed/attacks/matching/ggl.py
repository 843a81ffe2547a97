"""Generative gradient leakage (GGL): search for a generator's latent whose image has the observed gradient.

Sources: Li et al. 2022, "Auditing Privacy Defenses in Federated Learning via Generative Gradient Leakage" (GGL),
equation 3, with CMA-ES; Fan et al. 2024, "Refiner", appendix, for the KL divergence as prior (there: GGA); Hansen 2016,
"The CMA Evolution Strategy: A Tutorial". Unlike theirs, the generator must be conditional: it generates images of the
given or inferred class.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from rayfed.attacks.base import Reconstruction
from rayfed.attacks.groups import in_groups
from rayfed.attacks.inference.labels import needs_labels
from rayfed.attacks.matching.distances import Distance, one_minus_cosine, squared_l2
from rayfed.attacks.matching.priors import latent_divergence
from rayfed.attacks.matching.problem import Matching, matched_layers
from rayfed.attacks.matching.snapshots import Snapshots
from rayfed.attacks.progress import tell
from rayfed.errors import require_extra
from rayfed.models.dcgan import Generator
from rayfed.models.pretrained import load_generator
from rayfed.registry import component
from rayfed.samples import Modality, SampleSpec
from rayfed.update import Observation

_DISTANCES: dict[str, Distance] = {"squared_l2": squared_l2, "cosine": one_minus_cosine}
_TRACED = 50


@component
class Ggl:
    """Search the latents of a generator, trained on public images, for images that have the observed gradient.

    Labels are given or inferred. The result looks like a real image under every defence, so judge the result only by
    the distance to the original.
    """

    needs_classes: ClassVar[bool] = True
    takes: ClassVar[tuple[Modality, ...]] = ("pixels",)

    generator: Path
    """Generator file written by `rayfed train-generator`; `~` and environment variables are expanded."""
    optimiser: Literal["cma", "adam"] = "cma"
    """`cma`: CMA-ES, which needs no gradient and escapes local minima; `adam`: gradient descent on the latent."""
    iterations: Annotated[int, Field(ge=1)] = 200
    """Number of generations of CMA-ES, or of steps of Adam."""
    population: Annotated[int, Field(ge=2)] = 50
    """Number of latents per generation (cma)."""
    lr: Annotated[float, Field(gt=0)] = 0.1
    """Step size (adam)."""
    distance: Literal["squared_l2", "cosine"] = "cosine"
    """Gradient distance: squared Euclidean as in the paper, or one minus the cosine, which is robust to pruning."""
    prior: Annotated[float, Field(ge=0)] = 0.1
    """Weight of the latents' divergence from N(0, 1)."""
    layers: list[str] | None = None
    """Names or patterns (`conv*`) of the parameters to match. Default: all."""

    def check(self, model: nn.Module, sample: SampleSpec, classes: int) -> None:
        """Raise `UserError` for an unknown layer, or if the generator is missing or makes images of another shape."""
        if self.optimiser == "cma":
            _require_cma()
        matched_layers([name for name, _ in model.named_parameters()], self.layers)
        load_generator(self.generator, sample.shape, classes)

    @needs_labels
    def reconstruct(
        self, observations: Sequence[Observation], model: nn.Module, generators: Sequence[torch.Generator]
    ) -> list[Reconstruction]:
        """Return one reconstruction for each observation (see `Attack`).

        Raises `UserError` for an unknown layer, and if the generator is missing, altered or for other images.
        """
        pretrained = load_generator(self.generator, observations[0].sample.shape, observations[0].classes)
        return in_groups(lambda o, g: self._group(o, model, pretrained, g), observations, generators)

    def _group(
        self,
        observations: Sequence[Observation],
        model: nn.Module,
        pretrained: Generator,
        generators: Sequence[torch.Generator],
    ) -> list[Reconstruction]:
        problem = Matching.of(observations, model, self.layers, _DISTANCES[self.distance])
        search = LatentSearch(problem, pretrained.to(problem.device), self.prior)
        victims = torch.arange(len(observations), device=problem.device)
        snapshots = Snapshots(lambda latents: search.images(latents, victims))
        if self.optimiser == "cma":
            found = evolve(search, generators, self.iterations, self.population, snapshots)
        else:
            found = descend(search, generators, self.iterations, self.lr, snapshots)
        images = search.images(found.latents, victims).detach().cpu()
        labels = problem.hard_labels(found.latents, victims).cpu()
        return [_reconstruction(images[v], labels[v], found, v, self.iterations) for v in range(len(observations))]


@dataclass(frozen=True)
class LatentSearch:
    """Gradient-matching objective of V victims as a function of latents; a point holds the D values of N latents."""

    problem: Matching
    generator: Generator
    prior: float

    @property
    def dimension(self) -> int:
        """Return D, the number of values in the latents of one batch."""
        return self.problem.images_shape[0] * self.generator.latent

    def images(self, latents: Tensor, victims: Tensor) -> Tensor:
        """Generate images (Q, N, C, H, W) from latents (Q, D) and the labels of victims (Q,)."""
        labels = self.problem.hard_labels(latents, victims)
        images = self.generator(latents.reshape(-1, self.generator.latent), labels.flatten())
        batches: Tensor = images.unflatten(0, labels.shape)
        return batches

    def values(self, latents: Tensor, victims: Tensor) -> Tensor:
        """Return the objective (Q,) at latents (Q, D) of victims (Q,); non-finite values become infinity."""
        pixels = self.images(latents, victims).flatten(1)
        return _or_infinite(self.problem.values(pixels, victims) + self._penalty(latents))

    def value_and_gradient(self, latents: Tensor, victims: Tensor) -> tuple[Tensor, Tensor]:
        """Return the objective (Q,) at latents (Q, D) and the gradient (Q, D) with respect to the latents, detached."""
        latents = latents.detach().requires_grad_()
        pixels, penalty = self.images(latents, victims).flatten(1), self._penalty(latents)
        values, slopes = self.problem.value_and_gradient(pixels, victims)
        # Apply the chain rule by hand, so that the matching is still computed in chunks.
        (gradient,) = torch.autograd.grad((pixels, penalty), latents, (slopes, torch.ones_like(penalty)))
        return _or_infinite(values + penalty.detach()), gradient

    def _penalty(self, latents: Tensor) -> Tensor:
        return self.prior * latent_divergence(latents.unflatten(1, (-1, self.generator.latent))).mean(1)


class Found:
    """Best latents of V searches so far."""

    def __init__(self, start: Tensor, snapshots: Snapshots) -> None:
        """Start with the latents `start` (V, D), which remain the result if no objective value is finite."""
        self.latents = start.clone()
        self.values = torch.full_like(start[:, 0], torch.inf)
        self.trace: list[Tensor] = []
        """Smallest value (V,) of each iteration."""
        self.snapshots = snapshots
        snapshots.note(0, start)

    def note(self, latents: Tensor, values: Tensor) -> None:
        """Record one iteration's latents (V, P, D) and objective values (V, P), and keep the best of each search."""
        smallest, index = values.min(1)
        better = smallest < self.values
        rows = torch.arange(len(values), device=values.device)
        self.latents = torch.where(better[:, None], latents[rows, index], self.latents)
        self.values = torch.where(better, smallest, self.values)
        self.trace.append(smallest)
        self.snapshots.note(len(self.trace), self.latents)


def _require_cma() -> None:
    require_extra("search", "the attack ggl with `optimiser: cma`", "cmaes")


def evolve(
    search: LatentSearch, generators: Sequence[torch.Generator], iterations: int, population: int, snapshots: Snapshots
) -> Found:
    """Minimise the objective by CMA-ES from N(0, I), with one strategy per victim, and return the best latents."""
    _require_cma()
    from cmaes import CMA

    device, count = search.problem.device, len(generators)
    seeds = [int(torch.randint(2**31, (), generator=g)) for g in generators]
    start = torch.zeros(count, search.dimension)
    strategies = [
        CMA(s.double().numpy(), 1.0, seed=seed, population_size=population)
        for s, seed in zip(start, seeds, strict=True)
    ]
    victims = torch.arange(count, device=device).repeat_interleave(population)
    found = Found(start.to(device), snapshots)
    for i in range(iterations):
        asked = [[strategy.ask() for _ in range(population)] for strategy in strategies]
        latents = torch.tensor(np.array(asked), dtype=torch.float32, device=device)
        values = search.values(latents.flatten(0, 1), victims).reshape(count, population)
        found.note(latents, values)
        tell(i, iterations, found.values)
        for strategy, points, row in zip(strategies, asked, values.tolist(), strict=True):
            strategy.tell(list(zip(points, row, strict=True)))
    return found


def descend(
    search: LatentSearch, generators: Sequence[torch.Generator], iterations: int, lr: float, snapshots: Snapshots
) -> Found:
    """Minimise the objective by Adam from one sample of N(0, I) per victim, and return the best latents.

    Entries of the gradient that are not finite are set to 0.
    """
    start = torch.stack([torch.randn(search.dimension, generator=g) for g in generators]).to(search.problem.device)
    latents = start.clone().requires_grad_()
    victims = torch.arange(len(start), device=start.device)
    adam, found = torch.optim.Adam([latents], lr=lr), Found(start, snapshots)
    for i in range(iterations):
        values, slopes = search.value_and_gradient(latents, victims)
        found.note(latents.detach()[:, None], values[:, None])
        tell(i, iterations, found.values)
        latents.grad = slopes.nan_to_num(0, 0, 0)
        adam.step()
    return found


def _or_infinite(values: Tensor) -> Tensor:
    return values.where(values.isfinite(), torch.inf)


def _reconstruction(images: Tensor, labels: Tensor, found: Found, victim: int, iterations: int) -> Reconstruction:
    loss = found.values[victim].item()
    chosen = sorted({*range(0, iterations, max(1, iterations // _TRACED)), iterations - 1})
    return Reconstruction(
        images=images,
        labels=labels,
        loss=loss,
        trace=[(i + 1, found.trace[i][victim].item()) for i in chosen],
        snapshots=found.snapshots.until(iterations, images, victim),
        iterations=iterations,
        status="ok" if isfinite(loss) else "diverged",
        message="" if isfinite(loss) else "the objective is not finite at any of the latents that were tried",
    )
