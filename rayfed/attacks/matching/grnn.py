"""GRNN (generative regression): train a generator's weights until its images have the observed gradient.

Source: Ren 2022, "GRNN: Generative Regression Neural Network - A Data Leakage Attack for Federated Learning", equation
4, and his thesis, section 3.2.2, equation 3.4, algorithm 1; the terms' weights from section 3.3.1.

RMSprop with the thesis' settings needs 1300 steps to reconstruct a CIFAR-10 image at 33 dB. The objective falls by a
factor of 10^4, and a mean square with a decay of 0.99 keeps steps short long after the slopes have become small. With
0.9, as in Tieleman and Hinton 2012, "Lecture 6.5 - RMSProp", 700 steps are enough.

The Wasserstein distance is the exact W1 distance between the values of the two gradients. The authors' published code
has two other terms. The term named Wasserstein distance is the Euclidean norm of the difference of the gradients, and
the total variation squares the differences. The options `norm` and `tv_power` give these terms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from rayfed.attacks.base import Reconstruction
from rayfed.attacks.groups import in_groups
from rayfed.attacks.matching.adam import Descent, best_restarts
from rayfed.attacks.matching.distances import one_minus_cosine, squared_l2
from rayfed.attacks.matching.generators import LATENT, Generator
from rayfed.attacks.matching.priors import squared_variation, total_variation
from rayfed.attacks.matching.problem import LocalSteps, Matching, matched_layers
from rayfed.attacks.matching.snapshots import Snapshots
from rayfed.attacks.progress import tell
from rayfed.core import seeds
from rayfed.registry import component
from rayfed.samples import Modality, SampleSpec
from rayfed.update import Named, Observation

_WEIGHTS_AT_ONCE = 64_000_000
"""Maximum number of generator parameters trained together: 1 GB with their slopes and the states of RMSprop."""
_EPSILON = 1e-8
_TRACED = 50


@component
class Grnn:
    """Train one generator per victim so that the generated images, and unknown labels, have the observed gradient.

    Each image has one latent, sampled at the start and then fixed.
    """

    takes: ClassVar[tuple[Modality, ...]] = ("pixels",)
    place_labels: ClassVar[str] = "given"

    iterations: Annotated[int, Field(ge=1)] = 1000
    """Number of steps of RMSprop."""
    lr: Annotated[float, Field(gt=0)] = 1e-3
    """Step size before momentum, which makes steps up to 1 / (1 - momentum) times as long. In the thesis: 1e-4."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Momentum of RMSprop. In the thesis: 0.99, with the same lr / (1 - momentum)."""
    smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of the mean square of the gradients (PyTorch's `alpha`). In the thesis: 0.99."""
    mse: Annotated[float, Field(ge=0)] = 1.0
    """Weight of the squared L2 distance of the gradients."""
    wd: Annotated[float, Field(ge=0)] = 1.0
    """Weight of the Wasserstein-1 distance between the values of the gradients."""
    norm: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the Euclidean norm of the difference of the gradients, without the square. The authors' published code
    calls this norm a Wasserstein distance: `norm: 1` with `wd: 0` is its objective."""
    cd: Annotated[float, Field(ge=0)] = 0.0
    """Weight of one minus the cosine of the gradients."""
    tv: Annotated[float, Field(ge=0)] = 1e-3
    """Weight of the total variation. In the thesis: 1e-3 for LeNet, 1e-6 for ResNet-18."""
    tv_power: Literal[1, 2] = 1
    """Power of the pixel differences in the total variation. `1`: absolute differences. `2`: squared differences,
    counted twice, as in the authors' published code."""
    layers: list[str] | None = None
    """Names or patterns (`conv*`) of the parameters to match. Default: all."""
    local_steps: LocalSteps = "divided"
    """Treatment of several local steps: `divided` by learning rate and steps into one gradient, or `simulated`."""

    def __post_init__(self) -> None:
        if not (self.mse or self.wd or self.norm or self.cd):
            raise ValueError("mse, wd, norm and cd are all 0: set at least one of them above 0")

    def check(self, model: nn.Module, sample: SampleSpec, classes: int) -> None:
        """Raise `UserError` for a pattern in `layers` that matches no parameter of the model."""
        matched_layers([name for name, _ in model.named_parameters()], self.layers)

    def reconstruct(
        self, observations: Sequence[Observation], model: nn.Module, generators: Sequence[torch.Generator]
    ) -> list[Reconstruction]:
        """Return one reconstruction for each observation (see `Attack`). Raises `UserError` for an unknown layer."""
        return in_groups(lambda o, g: self._group(o, model, g), observations, generators)

    def distance(self, gradients: Named, targets: Named) -> Tensor:
        """Return the weighted sum (Q,) of squared L2, Wasserstein-1, L2 and cosine distances between gradients."""
        terms = ((self.mse, squared_l2), (self.wd, wasserstein), (self.norm, l2), (self.cd, one_minus_cosine))
        return torch.stack([weight * term(gradients, targets) for weight, term in terms if weight]).sum(0)

    def prior(self, images: Tensor) -> Tensor:
        """Return the weighted total variation (Q,) of images (Q, N, C, H, W)."""
        variation = total_variation if self.tv_power == 1 else squared_variation
        return self.tv * variation(images).mean(1)

    def _group(
        self, observations: Sequence[Observation], model: nn.Module, generators: Sequence[torch.Generator]
    ) -> list[Reconstruction]:
        problem = Matching.of(observations, model, self.layers, self.distance, self.prior, self.local_steps)
        victims = torch.arange(len(observations), device=problem.device)
        found = []
        for some in victims.split(trained_together(problem)):
            makers, snapshots = Makers.draw(problem, [generators[v] for v in some.tolist()]), Snapshots(problem.images)
            found += best_restarts(problem, self._train(problem, makers, some, snapshots), some, snapshots)
        return found

    def _train(self, problem: Matching, makers: Makers, victims: Tensor, snapshots: Snapshots) -> Descent:
        optimiser = RmsProp(makers.weights, self.lr, self.momentum, self.smoothing)
        points = makers.points()
        best, best_values = points.detach(), torch.full_like(points[:, 0].detach(), torch.inf)
        trace, objective = [], problem.objective(victims)
        for i in range(self.iterations + 1):
            values, slopes = objective(points)
            better = values < best_values
            best = torch.where(better[:, None], points.detach(), best)
            best_values = torch.where(better, values, best_values)
            tell(i, self.iterations, best_values)
            snapshots.note(i, best)
            if i % max(1, self.iterations // _TRACED) == 0:
                trace.append((i, values))
            if i == self.iterations:
                break
            optimiser.step(torch.autograd.grad(points, list(makers.weights.values()), slopes, materialize_grads=True))
            points = makers.points()
        return Descent(best, best_values, points.detach(), values, trace, self.iterations)


def l2(gradients: Named, targets: Named) -> Tensor:
    """Return the Euclidean distance (Q,) between gradients, with all layers as one vector; its slope at 0 is 0."""
    squares = squared_l2(gradients, targets)
    return squares.clamp(min=torch.finfo(squares.dtype).tiny).sqrt()


def wasserstein(gradients: Named, targets: Named) -> Tensor:
    """Return the Wasserstein-1 distance (Q,) between the values of two gradients, over all layers together.

    For two sets of equal size, this is the mean distance of the sorted values.
    """
    values, goals = (
        torch.cat([t.reshape(len(t), -1) for t in g.values()], 1).sort(1).values for g in (gradients, targets)
    )
    return (values - goals).abs().mean(1)


def trained_together(problem: Matching) -> int:
    """Return the maximum number of victims whose generators can be trained together in memory."""
    with torch.device("meta"):
        generator = Generator(problem.images_shape[1:], problem.classes)
    size = sum(weight.numel() for weight in generator.parameters())
    return max(1, min(problem.at_once, _WEIGHTS_AT_ONCE // size))


@dataclass(frozen=True)
class Makers:
    """Generators of V victims as one batched network."""

    network: nn.Module
    """Architecture."""
    weights: Named
    """Weights, each with a leading dimension V."""
    latents: Tensor
    """(V, N, LATENT)"""
    labels: bool
    """Whether the generators also return label logits."""

    @classmethod
    def draw(cls, problem: Matching, generators: Sequence[torch.Generator]) -> Makers:
        """Initialise generators and sample latents from each victim's own random generator."""
        size, channels, height, width = problem.images_shape
        made = [_drawn((channels, height, width), problem.classes, generator) for generator in generators]
        latents = torch.stack([torch.randn(size, LATENT, generator=generator) for generator in generators])
        weights, _ = stack_module_state(made)
        return cls(
            network=made[0],
            weights={name: w.detach().to(problem.device).requires_grad_() for name, w in weights.items()},
            latents=latents.to(problem.device),
            labels=problem.labels is None,
        )

    def points(self) -> Tensor:
        """Generate images and label logits as points (V, D) of the matching problem, with the autograd graph."""
        images, logits = vmap(lambda weights, latents: functional_call(self.network, weights, (latents,)))(
            self.weights, self.latents
        )
        return torch.cat([images.flatten(1), logits.flatten(1)], 1) if self.labels else images.flatten(1)


def _drawn(image_shape: tuple[int, ...], classes: int, generator: torch.Generator) -> Generator:
    """Return a generator with PyTorch's default initialisation, seeded from `generator`."""
    with seeds.global_stream(seeds.sample_key(generator)):
        return Generator(image_shape, classes)


class RmsProp:
    """RMSprop optimiser with momentum, without the slow imports at the first use of `torch.optim.RMSprop`.

    The optimiser works entry by entry, so stacked problems stay independent even if the gradient of one is not finite.
    """

    def __init__(self, weights: Named, lr: float, momentum: float, smoothing: float) -> None:
        self.weights = list(weights.values())
        self.lr, self.momentum, self.smoothing = lr, momentum, smoothing
        self.squares = [torch.zeros_like(w) for w in self.weights]
        self.velocities = [torch.zeros_like(w) for w in self.weights]

    @torch.no_grad()
    def step(self, slopes: Sequence[Tensor]) -> None:
        """Update the weights in place by one step with the gradients `slopes`, in the order of the weights."""
        for weight, square, velocity, slope in zip(self.weights, self.squares, self.velocities, slopes, strict=True):
            square.mul_(self.smoothing).addcmul_(slope, slope, value=1 - self.smoothing)
            velocity.mul_(self.momentum).addcdiv_(slope, square.sqrt().add_(_EPSILON))
            weight.sub_(velocity, alpha=self.lr)
