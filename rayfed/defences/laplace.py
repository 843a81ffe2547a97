"""Laplace noise on the update (Zhu 2019, section 5.1); with a clip bound, the mechanism of Dwork et al. 2006."""

from __future__ import annotations

from typing import Annotated, ClassVar, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from rayfed.catalogue import component
from rayfed.defences.base import Defence, UpdateMethod
from rayfed.defences.noise import local_spending, noisy
from rayfed.privacy.accountant import Release
from rayfed.privacy.spending import Setting, Spending


@component
class Laplace(Defence):
    """Clip the update to an L1 norm, then add independent Laplace noise to every value.

    With a clip bound every update has a guarantee of its own, against the server too, and the rounds are accounted;
    without one it is empirical. Sources: Zhu 2019, section 5.1; Dwork et al. 2006, 'Calibrating noise to sensitivity'.
    """

    post_processes: ClassVar[bool] = True

    scale: Annotated[float, Field(ge=0)] | None = None
    """Scale b of the noise (its standard deviation is b * sqrt 2), in the units of the update."""
    epsilon_per_update: Annotated[float, Field(gt=0)] | None = None
    """Instead of scale: what one update may spend; takes a clip bound."""
    delta: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """With 0 the epsilons of the rounds add up; more lets the accountant find a smaller sum."""
    clip: Annotated[float, Field(gt=0)] | None = None
    """Bound on the L1 norm of the whole update before the noise; null does not clip."""

    @model_validator(mode="after")
    def _one_measure_of_noise(self) -> Self:
        if (self.scale is None) == (self.epsilon_per_update is None):
            raise ValueError("give either scale or epsilon_per_update")
        if self.epsilon_per_update is not None and self.clip is None:
            raise ValueError("epsilon_per_update takes a clip bound: give clip")
        return self

    @property
    def width(self) -> float:
        """The scale of the noise: as given, or what the epsilon needs for updates up to twice the clip bound apart."""
        if self.scale is not None:
            return self.scale
        assert self.clip is not None
        assert self.epsilon_per_update is not None
        return 2 * self.clip / self.epsilon_per_update

    def wrap_update(self, next: UpdateMethod) -> UpdateMethod:
        """Clip and add noise to what is sent."""
        return noisy(next, self.clip, 1, self._draw)

    def spends(self, setting: Setting) -> Spending | None:
        """All updates of the client that sends most."""
        if self.clip is None:
            return None
        return local_spending(
            "laplace", Release("laplace", self.width / (2 * self.clip), setting.most_rounds), self.delta
        )

    def _draw(self, shape: torch.Size, generator: torch.Generator) -> Tensor:
        """The difference of two exponentials is Laplace, and never takes the logarithm of zero."""
        first, second = (torch.empty(shape).exponential_(generator=generator) for _ in range(2))
        return self.width * (first - second)
