"""Gaussian updates (Blanchard 2017, 'Machine learning with adversaries'): noise instead of an update."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import torch
from pydantic import Field

from rayfed.core.number_types import check_types
from rayfed.poisoning.base import Insight, Poisoning
from rayfed.registry import component
from rayfed.update import Update


@component
class GaussianUpdate(Poisoning):
    """Send Gaussian noise with mean zero instead of the update.

    Source: Blanchard et al. 2017, experiments.
    """

    deviation: Annotated[float, Field(gt=0)] = 1.0
    """Standard deviation of every value, in the units of the update."""

    def poison_update(self, update: Update, insight: Insight) -> Update:
        """Return Gaussian noise in the shapes of the update's tensors."""
        check_types(update.tensors, "gaussian_update")
        noise = {name: torch.randn(t.shape, generator=insight.generator).to(t) for name, t in update.tensors.items()}
        return replace(update, tensors={name: self.deviation * tensor for name, tensor in noise.items()}, bits=32)
