"""Toy data: points in the plane from two different Gaussian mixtures, one per client.

Source: Ren's thesis, section 4.3.1 and figure 4.2. The thesis gives the sizes; the means and deviations are our choice.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field

from rayfed.data.base import Source, StoredSplit
from rayfed.registry import component

EXTENT = 4.0
"""Maximum absolute coordinate."""
_CLUSTERS = (
    (((-2.0, -1.0), 0.6), ((-0.6, 0.8), 0.5)),
    (((1.0, -1.4), 0.9), ((1.8, 1.2), 1.0)),
)
"""[client][class]: mean and standard deviation of a round Gaussian."""


@component
class GaussianToy(Source):
    """Points in the plane as images of 1x1x2 pixels, with two classes and two clients.

    Coordinates are stored as 8-bit pixels: 256 values from -4 to 4, and values outside this range are clipped. The
    first half of the training points belongs to client 0, the second half to client 1, so use the partition `blocks`.
    The test split has points of both clients.
    """

    is_public: ClassVar[bool] = True

    samples: Annotated[int, Field(ge=20)] = 40000
    """Number of points per client, of which a tenth are in the test split."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of the points."""

    def read(self) -> tuple[StoredSplit, StoredSplit, tuple[str, ...]]:
        """Sample the points of both clients, and return the train split, the test split and the class names."""
        rng = np.random.default_rng(self.seed)
        tested = self.samples // 10
        images, labels = zip(*(self._draw(classes, rng) for classes in _CLUSTERS), strict=True)
        train, test = (
            StoredSplit(np.concatenate([i[rows] for i in images]), np.concatenate([y[rows] for y in labels]))
            for rows in (slice(tested, None), slice(tested))
        )
        return train, test, ("blue", "orange")

    def _draw(
        self, classes: tuple[tuple[tuple[float, float], float], ...], rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        labels = rng.integers(0, len(classes), self.samples)
        means, deviations = (np.array(values)[labels] for values in zip(*classes, strict=True))
        points = means + deviations[:, None] * rng.standard_normal((self.samples, 2))
        places = np.rint(255 * (points + EXTENT) / (2 * EXTENT)).clip(0, 255)
        return places.astype(np.uint8).reshape(-1, 1, 1, 2), labels
