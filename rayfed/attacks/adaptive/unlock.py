"""Unlock: the adaptive attack on models with a private part (keys and locks, passports, private layers).

Ren 2023 (thesis, section 5.3.3) and Gu et al. 2021 ("Federated Deep Learning with Bayesian Privacy", section 5.2) let
an attacker substitute a fixed private part for the client's. But the public layers' gradient depends on the private
part as well as on the images. Both are unknowns of one problem: Zhu et al. 2019, "Deep Leakage from Gradients",
equation 2. If the update includes the lock, its key is the input of a linear layer and needs no search: Phong et al.
2018, "Privacy-Preserving Deep Learning via Additively Homomorphic Encryption", section 3.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace
from fnmatch import filter as filter_names
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from rayfed.attacks.base import Reconstruction, not_applicable
from rayfed.attacks.matching.dlg import Dlg
from rayfed.attacks.matching.problem import Matching
from rayfed.errors import UserError, nearest
from rayfed.models.private import only, private_names, without
from rayfed.registry import component
from rayfed.samples import SampleSpec
from rayfed.update import Named, Observation

_NOTHING_PRIVATE = (
    "the update has the gradients of all the model's layers, so there is nothing to unlock: use the attack `dlg`"
)


@component
class Unlock(Dlg):
    """Reconstruct images, soft labels and the model's private part, minimising the squared L2 distance of gradients.

    The private part starts at random values, or at those that the threat model grants. It is scaled by the standard
    deviation of each of its tensors. Images start between 0 and 1, because a lock often leads to the negative image
    from N(0, 1). The key of a layer in the update is recovered from the layer's gradient.
    """

    several_rounds: ClassVar[bool] = False

    kept: tuple[str, ...] = ()
    """Patterns (`fnmatch`) of private tensors to keep as the threat model gives them, because the attacker knows their
    values. Example: `*.conv.weight` of passports in round 0, which `start: common` gives to all clients."""

    def check(self, model: nn.Module, sample: SampleSpec, classes: int) -> None:
        """Raise `UserError` for a pattern in `layers` or `kept` that matches nothing in a model with a private part."""
        super().check(model, sample, classes)
        if private := private_names(model) - _statistics(model):
            _without(private, self.kept)

    def reconstruct(
        self, observations: Sequence[Observation], model: nn.Module, generators: Sequence[torch.Generator]
    ) -> list[Reconstruction]:
        """Return one reconstruction for each observation (see `Attack`). Raises `UserError` for an unknown pattern."""
        if not private_names(model) - observations[0].weights.keys():
            return [not_applicable(observation, _NOTHING_PRIVATE) for observation in observations]
        read = [replace(seen, buffers=seen.buffers | _keys(seen, model)) for seen in observations]
        return super().reconstruct(read, model, generators)

    def _matching(self, observations: Sequence[Observation], model: nn.Module) -> Matching:
        problem = super()._matching(observations, model)
        hidden: Set[str] = private_names(model) - observations[0].weights.keys() - _keys(observations[0], model).keys()
        hidden = _without(hidden - _statistics(model), self.kept)
        return replace(problem, buffers=without(problem.buffers, hidden), sought=only(problem.buffers, hidden))

    def _starts(self, problem: Matching, observation: Observation, generator: torch.Generator) -> Tensor:
        noise = torch.stack([torch.rand(problem.dimension, generator=generator) for _ in range(self.restarts)])
        noise[:, problem.shown :] = 0
        return self._started(noise, observation)


def _without(hidden: Set[str], kept: Sequence[str]) -> Set[str]:
    """Return the private tensors that match no pattern in `kept`. Raises `UserError` for an unmatched pattern."""
    for pattern in kept:
        fitting = set(filter_names(hidden, pattern))
        if not fitting:
            raise UserError(f"kept: no private tensor of the model matches '{pattern}': {nearest(pattern, hidden)}")
        hidden = hidden - fitting
    return hidden


def _statistics(model: nn.Module) -> set[str]:
    """Return the buffers of batch norms, which PyTorch does not differentiate. Scale and shift compensate for them."""
    norms = [(path, module) for path, module in model.named_modules() if isinstance(module, _BatchNorm)]
    return {f"{path}.{name}" for path, norm in norms for name, _ in norm.named_buffers()}


def _keys(seen: Observation, model: nn.Module) -> Named:
    """Return the private vectors that enter private linear layers with observed gradients, in closed form.

    Row j of a weight's gradient is the layer's input times entry j of the bias's gradient, also in a sum of several
    steps.
    """
    found, update = Named(), seen.undecayed
    for path, module in model.named_modules():
        if not getattr(module, "private", False):
            continue
        for inner, linear in module.named_modules(prefix=path):
            if isinstance(linear, nn.Linear) and f"{inner}.bias" in update:
                weight, bias = update[f"{inner}.weight"], update[f"{inner}.bias"]
                row = bias.abs().argmax()
                fits = (name for name, b in module.named_buffers(prefix=path) if b.shape == (linear.in_features,))
                found |= dict.fromkeys(fits, weight[row] / bias[row])
    return found
