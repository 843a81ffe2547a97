"""Laplace noise on the update (Zhu 2019, section 5.1); with a clip bound, the mechanism of Dwork et al. 2006."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from rayfed.defences.noise import LocalNoise
from rayfed.registry import component


@component
class Laplace(LocalNoise):
    """Clip the update to an L1 norm, then add independent Laplace noise to every value.

    With a clip bound, every single update has a privacy guarantee, also against the server, and the guarantees of all
    rounds are composed. Without a clip bound the defence is empirical. Sources: Zhu 2019, section 5.1; Dwork et al.
    2006, 'Calibrating noise to sensitivity'.
    """

    family: ClassVar[Literal["gaussian", "laplace"]] = "laplace"
    order: ClassVar[float] = 1
    measure: ClassVar[str] = "scale"

    scale: Annotated[float, Field(ge=0)] | None = None
    """Scale b of the noise (standard deviation: b * sqrt 2), in the units of the update."""
    delta: Annotated[float, Field(ge=0, lt=0.1)] = 0.0
    """Probability that the guarantee fails. With 0 the epsilons of the rounds add up; a larger delta allows a smaller
    total epsilon."""

    def multiplier(self, epsilon: float) -> float:
        """Return the noise multiplier at which one update satisfies an epsilon, by the Laplace mechanism."""
        return 1 / epsilon
