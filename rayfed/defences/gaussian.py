"""Gaussian noise on the update (Zhu 2019, section 5.1); with a clip bound, a differentially private mechanism."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from rayfed.defences.noise import LocalNoise
from rayfed.privacy.accountant import analytic_gaussian
from rayfed.registry import component


@component
class Gaussian(LocalNoise):
    """Clip the update to an L2 norm, then add independent Gaussian noise to every value.

    With a clip bound, every single update has a privacy guarantee, also against the server, and the guarantees of all
    rounds are composed. Without a clip bound the defence is empirical. Sources: Zhu 2019, section 5.1; Refiner (Fan
    2024), section 5.1 with clip 1; Balle and Wang 2018, 'Improving the Gaussian mechanism', to compute the noise from
    an epsilon.
    """

    family: ClassVar[Literal["gaussian", "laplace"]] = "gaussian"
    order: ClassVar[float] = 2
    measure: ClassVar[str] = "sigma"

    sigma: Annotated[float, Field(ge=0)] | None = None
    """Standard deviation of the noise, in the units of the update (not multiplied by the clip bound)."""
    delta: Annotated[float, Field(gt=0, lt=0.1)] = 1e-5
    """Probability that the guarantee fails."""

    def multiplier(self, epsilon: float) -> float:
        """Return the noise multiplier at which one update satisfies an epsilon, by the analytic Gaussian mechanism."""
        return analytic_gaussian(epsilon, self.delta)
