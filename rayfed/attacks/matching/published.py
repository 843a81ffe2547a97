"""Published searches of Inverting Gradients, for comparisons with the figures of papers.

Sources: the code of Geiping et al. 2020, "Inverting Gradients - How easy is it to break privacy in federated learning?"
(`reconstruct_image.py`), and of Wu et al. 2024, "Concealing Sensitive Samples against Gradient Leakage in Federated
Learning" (DCS2, attack `gs`). Both run Adam on normalised pixels, from standard normal noise, with the step size
divided by ten at 3/8, 5/8 and 7/8 of the steps, and return the last images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from rayfed.attacks.adaptive.estimate import as_sent
from rayfed.attacks.matching.adam import Descent, adam
from rayfed.attacks.matching.priors import Prior, total_variation
from rayfed.attacks.matching.problem import Matching
from rayfed.attacks.matching.snapshots import Snapshots
from rayfed.models.build import Normalise
from rayfed.update import Observation

TV = 1e-4
"""Weight of the total variation of normalised pixels in both codes."""
_DECAYS = 2.667, 1.6, 1.142
"""The number of steps divided by these numbers gives the steps at which the step size is divided by ten."""


@dataclass(frozen=True)
class PublishedSearch:
    """Differences between the published searches."""

    signed: bool
    """Whether Adam uses only the sign of the slope."""
    boxed: bool
    """Whether pixels are limited to [0, 1]."""


SEARCHES = {"geiping": PublishedSearch(signed=True, boxed=True), "dcs2": PublishedSearch(signed=False, boxed=False)}


def without_evidence(problem: Matching, observations: Sequence[Observation], prior: Prior) -> Matching:
    """Return the problem of matching every sent value as it is, without the evidence of an update on its defence."""
    sent = [as_sent(observation).gradient for observation in observations]
    targets = {name: torch.stack([g[name] for g in sent]).to(target) for name, target in problem.targets.items()}
    return replace(problem, targets=targets, sent=None, through=None, statistics=None, relative=None, prior=prior)


def normalised_variation(model: nn.Module, weight: float) -> Prior:
    """Return the total variation of pixels as the model normalises them, times a weight."""
    _, std = pixel_statistics(model)

    def prior(images: Tensor) -> Tensor:
        return weight * total_variation(images / std.to(images)).mean(1)

    return prior


def pixel_statistics(model: nn.Module) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation with which a model normalises pixels, (C, 1, 1); 0 and 1 if it does not."""
    for hook in model._forward_pre_hooks.values():
        if isinstance(hook, Normalise):
            return hook.mean, hook.std
    return torch.zeros(1, 1, 1), torch.ones(1, 1, 1)


def noise_as_pixels(problem: Matching, noise: Tensor) -> Tensor:
    """Return points (Q, D) whose normalised pixels are standard normal noise (Q, D)."""
    mean, std = pixel_statistics(problem.model)
    points, pixels = noise.clone(), problem.images(noise)
    points[:, : problem.pixels] = (mean.to(pixels) + std.to(pixels) * pixels).flatten(1)
    return points


def run_search(
    problem: Matching, start: Tensor, victims: Tensor, rates: Sequence[float], found: PublishedSearch, watch: Snapshots
) -> Descent:
    """Return the result of a published search, with the last points as the best.

    Searches begin at `start` (Q, D). A step of normalised pixels is a step of pixels times their deviation.
    """
    _, std = pixel_statistics(problem.model)
    factors = torch.ones_like(start[0])
    factors[: problem.pixels] = std.to(start).expand(problem.images_shape).flatten()
    descent = adam(
        problem.objective(victims),
        start,
        [rate * factors for rate in rates],
        signed=found.signed,
        watch=watch.note,
        boxed=problem.pixels if found.boxed else 0,
    )
    return replace(descent, best=descent.last, best_values=descent.last_values)


def published_rates(lr: float, iterations: int) -> list[float]:
    """Return the step size of each iteration."""
    milestones = [iterations // share for share in _DECAYS]
    return [lr * 0.1 ** sum(step >= milestone for milestone in milestones) for step in range(iterations)]
