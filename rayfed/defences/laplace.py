"""Laplace noise on the update (Zhu 2019, section 5.1; Dwork 2006 for the mechanism)."""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from rayfed.catalogue import component
from rayfed.defences.base import Defence, UpdateMethod
from rayfed.defences.noise import noisy


@component
class Laplace(Defence):
    """Clip the update to an L1 norm, then add independent Laplace noise to every value.

    Empirical: no accountant follows it. Source: Zhu 2019, section 5.1.
    """

    post_processes: ClassVar[bool] = True

    scale: Annotated[float, Field(ge=0)]
    """Scale b of the noise (its standard deviation is b * sqrt 2), in the units of the update."""
    clip: Annotated[float, Field(gt=0)] | None = None
    """Bound on the L1 norm of the whole update before the noise; null does not clip."""

    def wrap_update(self, next: UpdateMethod) -> UpdateMethod:
        """Clip and add noise to what is sent."""
        return noisy(next, self.clip, 1, self._draw)

    def _draw(self, shape: torch.Size, generator: torch.Generator) -> Tensor:
        """The difference of two exponentials is Laplace, and never takes the logarithm of zero."""
        first, second = (torch.empty(shape).exponential_(generator=generator) for _ in range(2))
        return self.scale * (first - second)
