"""Unlock: the adaptive attacker on models with a private part (keys and locks, passports, private layers).

Ren 2023 (thesis, section 5.3.3) and Gu et al. 2021 ("Federated Deep Learning with Bayesian Privacy", section 5.2) let
an attacker put a private part of his own in the place of the client's and keep it. But the public layers' gradient
depends on the private part as it does on the images: both are unknowns of one problem, that of Zhu et al. 2019, "Deep
Leakage from Gradients", equation 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from rayfed.attacks.base import Reconstruction, not_applicable
from rayfed.attacks.dlg import Dlg
from rayfed.attacks.matching.problem import Matching
from rayfed.catalogue import component
from rayfed.models.private import only, private_names, without
from rayfed.update import Observation

_NOTHING_PRIVATE = (
    "the update has the gradients of all the model's layers, so there is nothing to unlock: `dlg` is enough"
)


@component
class Unlock(Dlg):
    """Fits images, soft labels and the model's private part in squared L2 by L-BFGS.

    The private part begins where the threat model puts it: at a draw of the attacker's own, or at what he was given. It
    moves in units of the deviation of each of its tensors; images begin between 0 and 1, for from N(0, 1) a lock often
    ends up with the negative image.
    """

    def reconstruct(
        self, observations: Sequence[Observation], model: nn.Module, generators: Sequence[torch.Generator]
    ) -> list[Reconstruction]:
        """One reconstruction for each observation (see `Attack`). Raises `UserError` for an unknown layer."""
        if not _hidden(observations[0], model):
            return [not_applicable(observation, _NOTHING_PRIVATE) for observation in observations]
        return super().reconstruct(observations, model, generators)

    def _matching(self, observations: Sequence[Observation], model: nn.Module) -> Matching:
        problem = super()._matching(observations, model)
        hidden = _hidden(observations[0], model)
        return replace(problem, buffers=without(problem.buffers, hidden), sought=only(problem.buffers, hidden))

    def _starts(self, problem: Matching, observation: Observation, generator: torch.Generator) -> Tensor:
        noise = torch.stack([torch.rand(problem.dimension, generator=generator) for _ in range(self.restarts)])
        noise[:, problem.shown :] = 0
        return self._started(noise, observation)


def _hidden(observation: Observation, model: nn.Module) -> frozenset[str]:
    """The private parameters and buffers that the update says nothing of."""
    return private_names(model) - observation.weights.keys()
