"""Improved deep leakage from gradients: the labels are inferred first, then the images alone are fitted.

Source: Zhao et al. 2020, "iDLG: Improved Deep Leakage from Gradients", algorithm 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import torch
from pydantic import Field
from torch import nn

from rayfed.attacks.base import Reconstruction, not_applicable
from rayfed.attacks.dlg import Dlg
from rayfed.attacks.labels import NO_HEAD, with_labels
from rayfed.catalogue import component
from rayfed.update import Observation


@component
class Idlg:
    """DLG with the labels read from the last layer's gradient; batches by the estimate of label counts."""

    iterations: Annotated[int, Field(ge=1)] = 300
    """At most so many iterations of 20 L-BFGS steps each, a start; it ends when nothing improves any more."""
    restarts: Annotated[int, Field(ge=1)] = 3
    """At most so many random starts, N(0, 1); further ones only while no start has matched the gradient."""
    layers: list[str] | None = None
    """Names or patterns (`conv*`) of the parameters that are matched; all by default."""

    def reconstruct(
        self, observations: Sequence[Observation], model: nn.Module, generators: Sequence[torch.Generator]
    ) -> list[Reconstruction]:
        """One reconstruction for each observation (see `Attack`). Raises `UserError` for an unknown layer."""
        labelled = with_labels(observations, model, generators)
        if labelled is None:
            return [not_applicable(observation, NO_HEAD) for observation in observations]
        fit = Dlg(iterations=self.iterations, restarts=self.restarts, layers=self.layers)
        return fit.reconstruct(labelled, model, generators)
