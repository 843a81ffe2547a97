"""Fed-CDP: sample-level noise with a clip bound per layer that may decay over rounds.

Source: Wei et al. 2021, 'Gradient-leakage resilient federated learning', algorithm 2 and Fed-CDP(decay). The paper's
accounting uses the bound of one layer as the bound of the whole gradient. Here the sensitivity of L layers is `clip *
sqrt(L)`.
"""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from typing import Annotated, ClassVar

from pydantic import Field

from rayfed.defences.base import Defence, Task
from rayfed.defences.dp_sgd import DpSgd
from rayfed.defences.noise import clip_factors, sample_norms, scaled_sum
from rayfed.privacy.accountant import Method, Release
from rayfed.privacy.spending import PrivacySetting
from rayfed.registry import component
from rayfed.update import Named


@component
class FedCdp(DpSgd):
    """Clip every sample's gradient layer by layer and add noise to the sum, in every local step.

    The paper uses a noise multiplier of 6 and a clip bound of 4, or one that decays from 6 to 2.
    """

    title: ClassVar[str] = "fed_cdp"
    bounded: ClassVar[str] = "each layer's clip bound"

    last_clip: Annotated[float, Field(gt=0)] | None = None
    """Clip bound of the last round, to which `clip` decays linearly. Null: no decay."""
    rounds: Annotated[int, Field(ge=1)] | None = None
    """Number of rounds over which the bound decays. Null: all rounds of the run."""

    def calibrated(self, setting: PrivacySetting, accountant: Method | None) -> Defence:
        """Return a copy with the noise multiplier for this run and the run's number of rounds."""
        found = super().calibrated(setting, accountant)
        return replace(found, rounds=self.rounds or setting.rounds)  # type: ignore[type-var]

    def clipped_sum(self, each: Named, task: Task) -> Named:
        """Return the sum over samples of gradients (N, ...), with each sample's gradient clipped layer by layer."""
        bound = self._bound(task.round)
        return {name: scaled_sum(g, clip_factors(sample_norms(g), bound)) for name, g in each.items()}

    def noise(self, task: Task) -> float:
        """Return the standard deviation of the noise on the sum of gradients, which decays with the clip bound."""
        return self.deviation * self._bound(task.round) / self.clip

    def released(self, setting: PrivacySetting, multiplier: float) -> tuple[Release, ...]:
        """Return the releases of a run as for `dp_sgd`, but with the joint sensitivity of all layers."""
        return super().released(setting, multiplier / sqrt(setting.layers))

    def _bound(self, round: int) -> float:
        if self.last_clip is None:
            return self.clip
        share = min(1.0, round / max(1, (self.rounds or 1) - 1))
        return self.clip + share * (self.last_clip - self.clip)
