"""Two images: the adaptive attack on the defence `dcs2`, with knowledge of the defence and its `lambda_g`.

The gradient that dcs2 sends belongs to two batches: the sensitive images and as many concealed ones. Cross entropy is
linear in the labels, so the two losses of the concealed images are one loss with mixed labels (Wu et al. 2024,
"Concealing Sensitive Samples against Gradient Leakage in Federated Learning", equation 10). The attack is Inverting
Gradients on a batch of twice the size, of which half is discarded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from rayfed.attacks.base import Reconstruction, not_applicable
from rayfed.attacks.forward_probe import run
from rayfed.attacks.inference.labels import last_linear
from rayfed.attacks.matching.distances import one_minus_cosine
from rayfed.attacks.matching.inverting_gradients import InvertingGradients
from rayfed.attacks.matching.options import model_dtype
from rayfed.attacks.matching.problem import Matching, most_likely
from rayfed.registry import component
from rayfed.update import Observation

_DUMMIES = 64
_NO_BIAS = "the update has no last linear layer with a bias, from which to recover the labels of concealed samples"


@component
class TwoImages(InvertingGradients):
    """Reconstruct a sensitive and a concealed image for every sample, and keep the sensitive images.

    The attack assumes that all samples are concealed and that the step is not projected. Concealed images leave [0, 1],
    so their pixels are searched in a wider box. Labels of concealed samples are recovered from the last layer. In
    batches of more than one, their assignment to sensitive samples is random.
    """

    needs_classes: ClassVar[bool] = True
    several_rounds: ClassVar[bool] = False

    lambda_g: Annotated[float, Field(gt=0, le=1)] = 0.7
    """`lambda_g` of the defence."""
    width: Annotated[float, Field(ge=1)] = 10.0
    """Width of the box of concealed pixels, centred at grey."""

    @model_validator(mode="after")
    def _has_no_published_search(self) -> Self:
        if self.published is not None:
            raise ValueError("two_images has no published search: remove `published`")
        return self

    def reconstruct(
        self, observations: Sequence[Observation], model: nn.Module, generators: Sequence[torch.Generator]
    ) -> list[Reconstruction]:
        """Return one reconstruction for each observation (see `Attack`). Raises `UserError` for an unknown layer."""
        head = last_linear(observations[0].update, observations[0].classes)
        if head is None or f"{head}.bias" not in observations[0].update:
            return [not_applicable(observation, _NO_BIAS) for observation in observations]
        return super().reconstruct(observations, model, generators)

    def _group(
        self, observations: Sequence[Observation], model: nn.Module, generators: Sequence[torch.Generator]
    ) -> list[Reconstruction]:
        found = super()._group(observations, model, generators)
        return [
            replace(
                pair,
                images=pair.images[: seen.batch_size],
                labels=pair.labels[: seen.batch_size],
                snapshots=tuple((iteration, images[: seen.batch_size]) for iteration, images in pair.snapshots),
            )
            for pair, seen in zip(found, observations, strict=True)
        ]

    def _matching(
        self, observations: Sequence[Observation], model: nn.Module, generators: Sequence[torch.Generator]
    ) -> Matching:
        sensitive = observations[0].batch_size
        pairs = [self._paired(seen, model, g) for seen, g in zip(observations, generators, strict=True)]
        problem = _Pairs.of(
            pairs,
            model,
            self.layers,
            one_minus_cosine,
            lambda images: self._prior(images[:, :sensitive]),
            self.local_steps,
            model_dtype=model_dtype(self.precision),
        )
        if not any(seen.labels.is_floating_point() for seen in observations if seen.labels is not None):
            problem = replace(problem, labels=problem.supposed, supposed=None)
        return self._weighted(replace(problem, width=self.width), observations)

    def _paired(self, seen: Observation, model: nn.Module, generator: torch.Generator) -> Observation:
        """Return the observation with twice as many samples and labels (2N, K) as probabilities."""
        own = F.one_hot(_labels(seen), seen.classes).float()
        concealed = F.one_hot(self._concealed_labels(seen, own, model, generator), seen.classes).float()
        labels = torch.cat([own, torch.lerp(own, concealed, self.lambda_g)])
        return replace(seen, batch_size=2 * seen.batch_size, labels=labels)

    def _concealed_labels(self, seen: Observation, own: Tensor, model: nn.Module, generator: torch.Generator) -> Tensor:
        """Return the labels of the concealed samples (N,) int64, recovered from the gradient of the last bias.

        This gradient is the sum over 2N samples of model probabilities minus labels, divided by N. The model
        probabilities are measured on noise.
        """
        head = last_linear(seen.update, seen.classes)
        assert head is not None
        noise = seen.sample.noise(_DUMMIES, generator)
        _, logits = run(model, seen, head, noise)
        size = seen.batch_size
        left = size * (2 * logits.softmax(1).mean(0) - seen.gradient[f"{head}.bias"]) - (2 - self.lambda_g) * own.sum(0)
        labels = []
        for _ in range(size):
            labels.append(left.argmax())
            left[labels[-1]] -= self.lambda_g
        return torch.stack(labels)


@dataclass(frozen=True)
class _Pairs(Matching):
    """Matching problem whose second half of images are concealed ones, in a wider box."""

    width: float = 1.0

    def images(self, points: Tensor) -> Tensor:
        """Return the sensitive and then the concealed images (Q, 2N, C, H, W) at points (Q, D) of the search."""
        sensitive, concealed = super().images(points).chunk(2, dim=1)
        return torch.cat([sensitive, 0.5 + self.width * (concealed - 0.5)], dim=1)


def _labels(seen: Observation) -> Tensor:
    """Return the labels of an observation, which every group has: granted, inferred or assumed."""
    assert seen.labels is not None
    return most_likely(seen.labels)
