"""Laplace noise on the update (Zhu 2019, section 5.1); with a clip bound, the mechanism of Dwork et al. 2006."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from rayfed.defences.noise import LocalNoise
from rayfed.privacy.spending import PrivacySetting, Spending
from rayfed.registry import component


@component
class Laplace(LocalNoise):
    """Clip the update to an L1 norm (or L2: `norm`), then add independent Laplace noise to every value.

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

    norm: Literal["l1", "l2"] = "l1"
    """Norm that `clip` bounds. `l2` is the usual clipping of gradients, as in papers that replace the normal noise of
    clipped gradients by Laplace noise. There is no guarantee then, because this noise hides differences in L1."""

    @model_validator(mode="after")
    def _l2_without_epsilon(self) -> Self:
        if self.norm == "l2" and (self.clip is None or self.epsilon_per_update is not None):
            raise ValueError("norm: l2 needs clip and scale, and has no epsilon: remove epsilon_per_update or norm")
        return self

    @property
    def clip_order(self) -> float:
        """Return the order of the norm that `clip` bounds."""
        return 1 if self.norm == "l1" else 2

    def spends(self, setting: PrivacySetting) -> Spending | None:
        """Return the privacy accounting; None without a clip bound of the L1 norm."""
        return super().spends(setting) if self.norm == "l1" else None

    def multiplier(self, epsilon: float) -> float:
        """Return the noise multiplier at which one update satisfies an epsilon, by the Laplace mechanism."""
        return 1 / epsilon
