"""InstaHide: clients train on mixtures of images with random signs of pixels.

Source: Huang et al. 2020, "InstaHide: Instance-hiding Schemes for Private Distributed Learning", algorithm 1 (inside a
data set) and section 4 (with public images); the bounds on the coefficients are those of its experiments. Its code
(github.com/Hazelsuko07/InstaHide) draws partners by permutations, so that an image can meet itself. Here no two are the
same, as in the code of Huang et al. 2021, "Evaluating Gradient Inversion Attacks and Defenses in Federated Learning".
Broken by Carlini et al. 2021, "Is Private Learning Possible with Instance Encoding?", where many mixtures of an image
are seen.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import numpy as np
import torch
from pydantic import Field

from rayfed.defences.base import Batch, DataMethod, Defence, Task
from rayfed.defences.mixing import blend, distinct_partners, mixtures, numpy_draws, pool
from rayfed.errors import UserError
from rayfed.registry import component
from rayfed.samples import Modality
from rayfed.subsets import subsets

_PRIVATE = 2
"""Images of the client in a mixture with public ones."""
_LEAST_PRIVATE = 0.3
"""Least weight of the client's own images together."""


@component
class InstaHide(Defence):
    """Mix every sample with other or public ones, then change the sign of random pixels.

    No two images of a mixture are the same sample; an image is what the defence before this one makes of a sample. A
    client with too few samples is refused. A new mixture and new flips in every round. Images are in [0, 1] here, so a
    change of sign is one about the grey in the middle, x to 1 - x: with `normalise` by mean 0.5 and deviation 0.5 it is
    the sign of what the model sees. Public images have no label: those of the client's images share the whole. The test
    images stay as they are. Empirical.
    """

    takes: ClassVar[tuple[Modality, ...]] = ("pixels", "records")

    images: Annotated[int, Field(ge=2)] = 4
    """Images in a mixture, no two the same."""
    public: bool = False
    """Mix two of the client's images with public ones (the scenario's `data.public`), instead of its own alone."""
    largest: Annotated[float, Field(gt=0, le=1)] = 0.65
    """Largest weight of an image; above 1 / `images`, with public images above 0.15, too."""

    def __post_init__(self) -> None:
        if self.largest * self.images <= 1:
            raise ValueError(f"largest: found {self.largest}, but {self.images} images need more than 1/{self.images}")
        if self.public and self.largest * _PRIVATE <= _LEAST_PRIVATE:
            raise ValueError(
                f"largest: found {self.largest}, but {_PRIVATE} private images, which weigh {_LEAST_PRIVATE} or more "
                f"together, need more than {_LEAST_PRIVATE / _PRIVATE}"
            )
        if self.public and self.images <= _PRIVATE:
            raise ValueError(f"images: found {self.images}, but {_PRIVATE} private ones leave no room for public ones")

    @property
    def least_samples(self) -> int:
        """Number of a client's own images in a mixture."""
        return _PRIVATE if self.public else self.images

    @property
    def least_public(self) -> int:
        """Number of public images in a mixture."""
        return self.images - self.least_samples

    def wrap_data(self, next: DataMethod) -> DataMethod:
        """Train on mixtures with flipped pixels."""

        def data(task: Task) -> Batch:
            samples, images, labels = pool(next, task)
            draw = numpy_draws(task)
            private = self.least_samples
            _check(len(labels), private, "of the client's own")
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

    def _coefficients(self, samples: int, draw: np.random.Generator) -> np.ndarray:
        """Draw coefficients (N, images), uniform within the bounds, by rejection.

        What is left below a low bound sums to a constant, too, and is drawn in place of the coefficients where that
        is less: few draws would keep such a bound.
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
        raise UserError(f"instahide mixes {needed} distinct images {whose}, and there are {found}")
