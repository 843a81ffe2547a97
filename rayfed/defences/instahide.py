"""InstaHide: clients train on mixtures of images with random signs of pixels.

Source: Huang et al. 2020, "InstaHide: Instance-hiding Schemes for Private Distributed Learning", algorithm 1 (inside a
data set) and section 4 (with public images); the bounds on the coefficients are those of its experiments. Its code
(github.com/Hazelsuko07/InstaHide) chooses partners by permutations, so an image may be mixed with itself. Here all
images of a mixture are different, as in the code of Huang et al. 2021, "Evaluating Gradient Inversion Attacks and
Defenses in Federated Learning". Broken by Carlini et al. 2021, "Is Private Learning Possible with Instance Encoding?",
if the attacker sees many mixtures of an image.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import numpy as np
import torch
from pydantic import Field

from rayfed.core.subsets import subsets
from rayfed.defences.base import Batch, DataMethod, Defence, Task
from rayfed.defences.mixing import blend, distinct_partners, mixtures, numpy_draws, pool
from rayfed.errors import UserError
from rayfed.registry import component
from rayfed.samples import Modality

_PRIVATE = 2
"""Number of the client's own images in a mixture with public ones."""
_LEAST_PRIVATE = 0.3
"""Minimum total weight of the client's own images."""


@component
class InstaHide(Defence):
    """Mix every sample with other or public ones, then change the sign of random pixels.

    Mixtures and sign changes are new in every round. A mixture never contains the same sample twice, and clients with
    too few samples are an error. An earlier defence may have changed the images. Images are in [0, 1], so a sign change
    maps x to 1 - x. If `normalise` has mean 0.5 and deviation 0.5, this is the sign of the model's input. Public images
    have no labels: the labels of the client's images are reweighted to sum to 1. Test images are not mixed. Empirical.
    """

    takes: ClassVar[tuple[Modality, ...]] = ("pixels", "records")

    images: Annotated[int, Field(ge=2)] = 4
    """Number of images per mixture, all different."""
    public: bool = False
    """Mix two of the client's images with public ones (the scenario's `data.public`), instead of only with each
    other."""
    largest: Annotated[float, Field(gt=0, le=1)] = 0.65
    """Maximum weight of an image. Must exceed 1 / `images`, and also 0.15 with public images."""

    def __post_init__(self) -> None:
        if self.largest * self.images <= 1:
            raise ValueError(
                f"largest: found {self.largest}, but {self.images} images need a value above 1/{self.images}"
            )
        if self.public and self.largest * _PRIVATE <= _LEAST_PRIVATE:
            raise ValueError(
                f"largest: found {self.largest}, but {_PRIVATE} private images with a total weight of at least "
                f"{_LEAST_PRIVATE} need a value above {_LEAST_PRIVATE / _PRIVATE}"
            )
        if self.public and self.images <= _PRIVATE:
            raise ValueError(
                f"images: found {self.images}; expected at least {_PRIVATE + 1}, {_PRIVATE} private and 1 public image"
            )

    @property
    def least_samples(self) -> int:
        """Return the minimum number of samples of a client: the number of the client's images per mixture."""
        return _PRIVATE if self.public else self.images

    @property
    def least_public(self) -> int:
        """Return the minimum number of public samples: the number of public images per mixture."""
        return self.images - self.least_samples

    @property
    def has_latents(self) -> bool:
        """Return True: coefficients and signs are random, and partners may be other samples of the client."""
        return True

    def transform_data(self, task: Task, batch: Batch) -> Batch:
        """Return one random mixture of each sample with samples of the batch, or with noise if these are too few."""
        others = self._noise(task, batch) if len(batch.labels) < self.least_samples else None
        return self.wrap_data(lambda own: own.data)(task.replace(data=batch, others=others))

    def wrap_data(self, next: DataMethod) -> DataMethod:
        """Replace the client's images by mixtures of images with random signs of pixels."""

        def data(task: Task) -> Batch:
            samples, images, labels = pool(next, task)
            draw = numpy_draws(task)
            private = self.least_samples
            _check(len(labels), private, "client")
            coefficients = self._coefficients(samples, draw)
            rows = distinct_partners(samples, len(labels), private - 1, draw)
            own = coefficients[:, :private]
            mixed = blend(images, rows, own)
            if self.public:
                others = task.public_for("instahide with `public: true`")
                _check(len(others.labels), self.least_public, "public")
                shared = subsets(draw, samples, len(others.labels), self.least_public)
                mixed += blend(others.inputs, shared, coefficients[:, private:])
            flips = torch.rand(mixed.shape, generator=task.generator).to(mixed) < 0.5
            return mixtures(torch.where(flips, 1 - mixed, mixed), blend(labels, rows, own / own.sum(1, keepdims=True)))

        return data

    def _noise(self, task: Task, batch: Batch) -> Batch:
        """Return images of noise, with the labels of the batch, instead of the client's other samples."""
        rows = torch.arange(self.least_samples, device=batch.labels.device) % len(batch.labels)
        like = batch.inputs.detach()[rows]
        return Batch(torch.rand(like.shape, generator=task.generator).to(like), batch.labels[rows])

    def _coefficients(self, samples: int, draw: np.random.Generator) -> np.ndarray:
        """Sample coefficients (N, images) by rejection, uniformly within the bounds.

        With a low bound, rejection would be slow. Then the differences to the bound are sampled instead, which also sum
        to a constant.
        """
        found = np.empty((samples, self.images))
        missing = np.arange(samples)
        left = self.largest * self.images - 1
        while len(missing):
            drawn = draw.dirichlet(np.ones(self.images), size=len(missing))
            found[missing] = drawn = drawn if left >= 1 else self.largest - left * drawn
            bad = (drawn.max(1) > self.largest) | (drawn.min(1) < 0)
            if self.public:
                bad |= drawn[:, :_PRIVATE].sum(1) < _LEAST_PRIVATE
            missing = missing[bad]
        return found


def _check(found: int, needed: int, whose: str) -> None:
    if found < needed:
        raise UserError(
            f"instahide mixes {needed} different {whose} images, but found only {found}: lower images, or add samples"
        )
