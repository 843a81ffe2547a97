"""Gaussian noise on the update: 'noisy gradients' (Zhu 2019, section 5.1); clipped, it hides a client's data."""

from __future__ import annotations

from typing import Annotated, ClassVar, Self

import torch
from pydantic import Field, model_validator

from rayfed.catalogue import component
from rayfed.defences.base import Defence, UpdateMethod
from rayfed.defences.noise import local_spending, noisy
from rayfed.privacy.accountant import Release, analytic_gaussian
from rayfed.privacy.spending import Setting, Spending


@component
class Gaussian(Defence):
    """Clip the update to an L2 norm, then add independent Gaussian noise to every value.

    With a clip bound every update has a guarantee of its own, against the server too, and the rounds are accounted;
    without one it is empirical. Sources: Zhu 2019, section 5.1; Refiner (Fan 2024), section 5.1 with clip 1; Balle and
    Wang 2018, 'Improving the Gaussian mechanism', for the noise of an epsilon.
    """

    post_processes: ClassVar[bool] = True

    sigma: Annotated[float, Field(ge=0)] | None = None
    """Standard deviation of the noise, in the units of the update (not multiplied by the clip bound)."""
    epsilon_per_update: Annotated[float, Field(gt=0)] | None = None
    """Instead of sigma: what one update may spend at `delta`; takes a clip bound."""
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    """The probability with which the guarantee may fail."""
    clip: Annotated[float, Field(gt=0)] | None = None
    """Bound on the L2 norm of the whole update before the noise; null does not clip."""

    @model_validator(mode="after")
    def _one_measure_of_noise(self) -> Self:
        if (self.sigma is None) == (self.epsilon_per_update is None):
            raise ValueError("give either sigma or epsilon_per_update")
        if self.epsilon_per_update is not None and self.clip is None:
            raise ValueError("epsilon_per_update takes a clip bound: give clip")
        return self

    @property
    def deviation(self) -> float:
        """Of the noise: as given, or what the epsilon needs where two updates are up to twice the clip bound apart."""
        if self.sigma is not None:
            return self.sigma
        assert self.clip is not None
        assert self.epsilon_per_update is not None
        return 2 * self.clip * analytic_gaussian(self.epsilon_per_update, self.delta)

    def wrap_update(self, next: UpdateMethod) -> UpdateMethod:
        """Clip and add noise to what is sent."""
        deviation = self.deviation
        return noisy(next, self.clip, 2, lambda shape, g: deviation * torch.randn(shape, generator=g))

    def spends(self, setting: Setting) -> Spending | None:
        """All updates of the client that sends most."""
        if self.clip is None:
            return None
        multiplier = self.deviation / (2 * self.clip)
        return local_spending("gaussian", Release("gaussian", multiplier, setting.most_rounds), self.delta)
