"""InstaHide: mixtures of images whose pixels change their sign at random.

Source: Huang et al. 2020, "InstaHide: Instance-hiding Schemes for Private Distributed Learning", algorithm 1 (inside a
data set) and section 4 (with public images); the bounds on the coefficients are those of its experiments. Broken by
Carlini et al. 2021, "Is Private Learning Possible with Instance Encoding?", where many mixtures of an image are seen.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import numpy as np
import torch
from pydantic import Field

from rayfed.catalogue import component
from rayfed.data.forms import Kind
from rayfed.defences.base import Batch, DataMethod, Defence, Task
from rayfed.defences.mixing import blend, mixtures, numpy_draws, partners, pool

_PRIVATE = 2
"""Images of the client in a mixture with public ones."""
_LEAST_PRIVATE = 0.3
"""The least that these weigh together."""


@component
class InstaHide(Defence):
    """Every sample is mixed with others of the same client, or with one of them and public ones; then pixels flip.

    A new mixture and new flips in every round. Images are in [0, 1] here, so a change of sign is one about the grey in
    the middle, x to 1 - x: with `normalise` by mean 0.5 and deviation 0.5 it is the sign of what the model sees.
    Public images have no label: those of the client's images share the whole. The test images stay as they are.
    Empirical.
    """

    takes: ClassVar[tuple[Kind, ...]] = ("pixels", "records")

    images: Annotated[int, Field(ge=2)] = 4
    """Images in a mixture."""
    public: bool = False
    """Mix two of the client's images with public ones (the scenario's `data.public`), instead of its own alone."""
    largest: Annotated[float, Field(gt=0, le=1)] = 0.65
    """No image weighs more; above 1 / `images`."""

    def __post_init__(self) -> None:
        if self.largest * self.images <= 1:
            raise ValueError(f"largest: found {self.largest}, but {self.images} images need more than 1/{self.images}")
        if self.public and self.images <= _PRIVATE:
            raise ValueError(f"images: found {self.images}, but {_PRIVATE} private ones leave no room for public ones")

    @property
    def needs_public(self) -> bool:
        """For the mixture."""
        return self.public

    def wrap_data(self, next: DataMethod) -> DataMethod:
        """Train on mixtures with flipped pixels."""

        def data(task: Task) -> Batch:
            samples, images, labels = pool(next, task)
            draw = numpy_draws(task)
            coefficients = self._coefficients(samples, draw)
            private = _PRIVATE if self.public else self.images
            rows = partners(samples, len(labels), private - 1, draw)
            own = coefficients[:, :private]
            mixed = blend(images, rows, own)
            if self.public:
                others = task.public_for("instahide with `public: true`")
                mixed += blend(
                    others.images,
                    draw.integers(len(others.labels), size=(samples, self.images - private)),
                    coefficients[:, private:],
                )
            flips = torch.rand(mixed.shape, generator=task.generator).to(mixed) < 0.5
            return mixtures(torch.where(flips, 1 - mixed, mixed), blend(labels, rows, own / own.sum(1, keepdims=True)))

        return data

    def _coefficients(self, samples: int, draw: np.random.Generator) -> np.ndarray:
        """(N, images), uniform among those that keep the bounds: what does not is drawn again."""
        found = np.empty((samples, self.images))
        missing = np.arange(samples)
        while len(missing):
            found[missing] = draw.dirichlet(np.ones(self.images), size=len(missing))
            bad = found.max(1) > self.largest
            if self.public:
                bad |= found[:, :_PRIVATE].sum(1) < _LEAST_PRIVATE
            missing = np.flatnonzero(bad)
        return found
