"""Mixup: clients train on weighted sums of their images and labels.

Sources: Zhang et al. 2018, "mixup: Beyond Empirical Risk Minimization", section 2; as a defence, Huang et al. 2021,
"Evaluating Gradient Inversion Attacks and Defenses in Federated Learning", section 3.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field

from rayfed.defences.base import Batch, DataMethod, Defence, Task
from rayfed.defences.mixing import blend, mixtures, numpy_draws, partners, pool
from rayfed.registry import component
from rayfed.samples import Modality


@component
class Mixup(Defence):
    """Mix every sample and label with other samples of the same client, anew in every round. Empirical.

    The coefficients are sampled from a symmetric Dirichlet distribution; for two images, from Beta(alpha, alpha). A
    sample may be mixed with itself, and always is if the client has no other.
    """

    takes: ClassVar[tuple[Modality, ...]] = ("pixels", "records")

    alpha: Annotated[float, Field(gt=0)] = 1.0
    """Concentration of the Dirichlet distribution. Small: one image dominates a mixture. Large: all images weigh
    alike."""
    images: Annotated[int, Field(ge=2)] = 2
    """Number of images per mixture, sampled with replacement."""

    @property
    def has_latents(self) -> bool:
        """Return True, because the coefficients are random, and partners may be other samples of the client."""
        return True

    def transform_data(self, task: Task, batch: Batch) -> Batch:
        """Return one random mixture of each sample with samples of the batch."""
        return self.wrap_data(lambda own: own.data)(task.replace(data=batch, others=None))

    def wrap_data(self, next: DataMethod) -> DataMethod:
        """Replace the client's samples and labels by mixtures with other samples of the client."""

        def data(task: Task) -> Batch:
            samples, images, labels = pool(next, task)
            draw = numpy_draws(task)
            rows = partners(samples, len(labels), self.images - 1, draw)
            coefficients = draw.dirichlet(np.full(self.images, self.alpha), size=samples)
            return mixtures(blend(images, rows, coefficients), blend(labels, rows, coefficients))

        return data
