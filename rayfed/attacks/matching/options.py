"""Options of gradient-matching attacks: the layers to match, the start, and how to match local steps.

Sources: Wu et al. 2024, "Concealing Sensitive Samples against Gradient Leakage in Federated Learning" (DCS2), table 4,
for the start at a class's average image (an adaptive attack); Geiping et al. 2020, "Inverting Gradients", section 6,
for local steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from rayfed.attacks.base import Reconstruction, not_applicable
from rayfed.attacks.groups import Group, in_groups
from rayfed.attacks.matching.distances import Distance
from rayfed.attacks.matching.priors import Prior
from rayfed.attacks.matching.problem import LocalSteps, Matching, matched_layers, most_likely
from rayfed.registry import component
from rayfed.samples import SampleSpec
from rayfed.update import Observation

_NO_PUBLIC = "the start `class_average` is a mean of public images; grant them with `knowledge: [public]`"
_NO_CLASSES = "the start `class_average` needs one class per sample, but labels are numbers, or per token or pixel"
_NO_LABELS = "the start `class_average` needs labels; grant them with `knowledge: [labels]`, or use `idlg`"


@component
class GradientMatching:
    """Options common to gradient-matching attacks."""

    several_rounds: ClassVar[bool] = True
    """Whether the attack also matches updates of earlier rounds (`Observation.earlier`)."""

    place_labels: ClassVar[str] = "unneeded"

    layers: list[str] | None = None
    """Names or patterns (`conv*`) of the parameters to match. `!fc.*` excludes parameters. Default: all."""
    start: Literal["noise", "grey", "class_average"] = "noise"
    """Start of the first restart: `noise`, `grey` images, or `class_average`, the mean public image of each label's
    class, which needs `knowledge: [public]`. Further restarts start from noise."""
    local_steps: LocalSteps = "divided"
    """How to match an update of several local steps. `divided`: divide it by learning rate and steps, and match it as
    one gradient. `simulated`: simulate the steps on the images, with the same batch order in every epoch. Both are
    equal for one step."""

    def check(self, model: nn.Module, sample: SampleSpec, classes: int) -> None:
        """Raise `UserError` for a pattern in `layers` that matches no parameter of the model."""
        matched_layers([name for name, _ in model.named_parameters()], self.layers)

    def _problem(
        self,
        observations: Sequence[Observation],
        model: nn.Module,
        distance: Distance,
        prior: Prior | None = None,
        dtype: torch.dtype = torch.float32,
        model_dtype: torch.dtype | None = None,
    ) -> Matching:
        return Matching.of(observations, model, self.layers, distance, prior, self.local_steps, dtype, model_dtype)

    def _where_it_can_start(
        self, attack: Group, observations: Sequence[Observation], generators: Sequence[torch.Generator]
    ) -> list[Reconstruction]:
        """Attack, in groups, the observations that `start` supports. Return a message for each of the others."""
        obstacles = [self._obstacle(observation) for observation in observations]
        able = [i for i, obstacle in enumerate(obstacles) if obstacle is None]
        found = in_groups(attack, [observations[i] for i in able], [generators[i] for i in able])
        results = dict(zip(able, found, strict=True))
        return [
            results[i] if obstacle is None else not_applicable(observations[i], obstacle)
            for i, obstacle in enumerate(obstacles)
        ]

    def _obstacle(self, observation: Observation) -> str | None:
        if self.start != "class_average":
            return None
        if "public" not in observation.extra:
            return _NO_PUBLIC
        if observation.has_numbers or observation.has_places:
            return _NO_CLASSES
        return _NO_LABELS if observation.labels is None else None

    def _started(self, points: Tensor, observation: Observation) -> Tensor:
        """Return the noise `points` (R, D) of an observation's restarts, with pixels of the first set to `start`."""
        if self.start == "noise":
            return points
        shape = (observation.batch_size, *observation.sample.shape)
        images = torch.full(shape, 0.5) if self.start == "grey" else class_averages(observation)
        points = points.clone()
        points[0, : images.numel()] = images.flatten()
        return points


def model_dtype(precision: str | None) -> torch.dtype:
    """Return the dtype of a model's forward and backward passes for a precision's name; float32 for None."""
    return torch.bfloat16 if precision == "bfloat16" else torch.float32


def class_averages(observation: Observation) -> Tensor:
    """Return the mean public image of each label's class, (N, C, H, W); of all images for a class without any."""
    images, labels = (part.cpu() for part in observation.extra["public"])
    assert observation.labels is not None
    averages = []
    for label in most_likely(observation.labels).cpu():
        members = labels == label
        averages.append((images[members] if members.any() else images).mean(0))
    return torch.stack(averages)
