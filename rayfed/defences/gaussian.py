"""Gaussian noise on the update: 'noisy gradients' (Zhu 2019, section 5.1), Geyer 2017 without an accountant."""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from pydantic import Field

from rayfed.catalogue import component
from rayfed.defences.base import Defence, UpdateMethod
from rayfed.defences.noise import noisy


@component
class Gaussian(Defence):
    """Clip the update to an L2 norm, then add independent Gaussian noise to every value.

    Empirical: it carries no (epsilon, delta) as it stands, for noise and clip are free of each other and no accountant
    follows the rounds. Source: Zhu 2019, section 5.1; Refiner (Fan 2024), section 5.1 with clip 1.
    """

    post_processes: ClassVar[bool] = True

    sigma: Annotated[float, Field(ge=0)]
    """Standard deviation of the noise, in the units of the update (not multiplied by the clip bound)."""
    clip: Annotated[float, Field(gt=0)] | None = None
    """Bound on the L2 norm of the whole update before the noise; null does not clip."""

    def wrap_update(self, next: UpdateMethod) -> UpdateMethod:
        """Clip and add noise to what is sent."""
        return noisy(next, self.clip, 2, lambda shape, g: self.sigma * torch.randn(shape, generator=g))
