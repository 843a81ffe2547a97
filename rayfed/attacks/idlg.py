"""Improved deep leakage from gradients: the labels are inferred first, then the images alone are fitted.

Source: Zhao et al. 2020, "iDLG: Improved Deep Leakage from Gradients", algorithm 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from rayfed.attacks.base import Reconstruction, not_applicable
from rayfed.attacks.dlg import Dlg
from rayfed.attacks.labels import NO_HEAD, with_labels
from rayfed.catalogue import component
from rayfed.update import Observation


@component
class Idlg(Dlg):
    """DLG with the labels read from the last layer's gradient; batches by the estimate of label counts."""

    def reconstruct(
        self, observations: Sequence[Observation], model: nn.Module, generators: Sequence[torch.Generator]
    ) -> list[Reconstruction]:
        """One reconstruction for each observation (see `Attack`). Raises `UserError` for an unknown layer."""
        labelled = with_labels(observations, model, generators)
        if labelled is None:
            return [not_applicable(observation, NO_HEAD) for observation in observations]
        return super().reconstruct(labelled, model, generators)
