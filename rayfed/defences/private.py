"""Base of defences with privacy accounting: a clip bound, and a noise multiplier, set or computed from an epsilon."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Self

from pydantic import Field, field_validator, model_validator

from rayfed.defences.base import Defence
from rayfed.privacy.accountant import Method, Release, find_least_noise
from rayfed.privacy.spending import PrivacySetting
from rayfed.registry import component


@component
class Private(Defence):
    """Base of the mechanisms whose privacy loss is composed over the whole run."""

    clip: Annotated[float, Field(gt=0)] = 1.0
    """Clip bound C: maximum L2 norm of the contribution of one unit of privacy (a sample or a client)."""
    noise_multiplier: Annotated[float, Field(ge=0)] | None = None
    """Standard deviation of the noise divided by C. Set either this or `epsilon`."""
    epsilon: Annotated[float, Field(gt=0, le=10_000)] | None = None
    """Epsilon for the whole run. The smallest sufficient noise multiplier is computed before the run."""
    delta: Annotated[float, Field(gt=0, lt=0.1)] = 1e-5
    """Probability that the guarantee fails. Choose it well below 1 / (number of protected samples or clients)."""

    @field_validator("delta", mode="before")
    @classmethod
    def _may_seldom_fail(cls, delta: Any) -> Any:
        if isinstance(delta, int | float) and delta >= 0.1:
            raise ValueError("should be less than 0.1 (the probability that the guarantee fails)")
        return delta

    @model_validator(mode="after")
    def _one_measure_of_noise(self) -> Self:
        if (self.noise_multiplier is None) == (self.epsilon is None):
            raise ValueError("give either noise_multiplier or epsilon")
        return self

    def calibrated(self, setting: PrivacySetting, accountant: Method | None) -> Defence:
        """Return a copy with the noise multiplier that the epsilon needs in this run."""
        if self.epsilon is None:
            return self
        noise = find_least_noise(lambda z: self.released(setting, z), self.epsilon, self.delta, accountant)
        return replace(self, noise_multiplier=noise, epsilon=None)

    def released(self, setting: PrivacySetting, multiplier: float) -> tuple[Release, ...]:
        """Return the releases of a run at a noise multiplier, one per client that may have the largest epsilon."""
        raise NotImplementedError

    @property
    def deviation(self) -> float:
        """Return the standard deviation of the noise, in the units of the clipped vector."""
        assert self.noise_multiplier is not None, "calibrated before it is used"
        return self.clip * self.noise_multiplier
