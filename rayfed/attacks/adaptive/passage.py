"""Passage of a gradient through the defences of a victim, for searches: maximum likelihood through the declarations.

A search compares the observed update with the update that the defences would send for the gradient of its images, and
differentiates through the defences (Athalye 2018, "Obfuscated gradients give a false sense of security"). Noise with a
structure is compared by its declared density instead of a distance (Balunovic 2022, "Bayesian framework for gradient
leakage").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from rayfed.attacks.matching.sent import signs_alone
from rayfed.gradients import flatten, unflatten
from rayfed.update import Named, Observation

_EQUAL = 0.01
"""Largest relative difference of equal derivatives, and of a gradient and its multiple."""


@dataclass(frozen=True)
class Passage:
    """Passage of a gradient through the defences of one victim."""

    declared: Any
    """Observation model of the victim (`rayfed.threat_model.observation_model`)."""
    task: Any
    """The victim's task, with blank samples."""
    observation: Observation
    structured: bool
    """Whether the update is compared by the density of the noise."""
    silence: float = 1.0
    """Nats of the update for a gradient of zeros."""

    def send(self, gradient: Named) -> Named:
        """Return the defended update of a gradient, divided by the update's scale, with the gradient's dtype."""
        sent: Named = self.declared.through(self.task, gradient, self.observation)
        return {name: sent[name].to(tensor) for name, tensor in gradient.items()}

    def nats(self, sent: Named) -> Tensor:
        """Return minus the log-likelihood of the update for a result of `send`, divided by that of zeros."""
        observation = self.observation
        expected = {name: observation.scale * tensor for name, tensor in sent.items()}
        update = {name: tensor.to(expected[name]) for name, tensor in observation.update.items()}
        values = self.declared.noise.log_likelihood(self.task, update, expected)
        masks = self.declared.sent_values(observation.update, observation)
        total: Tensor = self.declared.sum_sent(values, masks)
        return -total / self.silence


def find_passages(
    observations: Sequence[Observation], names: Sequence[str], model: nn.Module, scale_free: bool
) -> tuple[Passage, ...] | None:
    """Return the passage of each victim; None if a gradient passes unchanged, or if the defences are not known.

    If the distance of the search is `scale_free`, a gradient times a factor counts as unchanged.
    """
    first = observations[0]
    if first.earlier or first.local.steps > 1 or not set(first.weights) <= set(names):
        return None
    models = []
    for observation in observations:
        declared = observation.extra.get("observation_model")
        if declared is None or declared.inverted or not observation.update or signs_alone(observation.step):
            return None  # signs are matched without this model
        if any(stage.has_latents for stage in declared.stages):
            return None  # the declared effect may differ much from that on the victim
        models.append(declared)
    victims = list(zip(models, observations, strict=True))
    # One objective for all victims: the density as soon as one of them needs it.
    structured = any(_has_structure(declared, observation, model) for declared, observation in victims)
    if not structured and not all(one.changes_values(observation, model, scale_free) for one, observation in victims):
        return None
    return tuple(_passage(declared, observation, model, structured) for declared, observation in victims)


def find_noise_passage(observation: Observation, model: nn.Module) -> Passage | None:
    """Return the passage of a gradient if the declared noise has a structure; None otherwise."""
    declared = observation.extra.get("observation_model")
    if declared is None or declared.inverted or not observation.update:
        return None
    if observation.earlier or observation.local.steps > 1 or not _has_structure(declared, observation, model):
        return None
    return _passage(declared, observation, model, structured=True)


def _passage(declared: Any, observation: Observation, model: nn.Module, structured: bool) -> Passage:
    task = declared.blank_task(observation, model)
    passage = Passage(declared, task, observation, structured)
    if not structured:
        return passage
    silence = float(passage.nats({name: torch.zeros_like(tensor) for name, tensor in observation.update.items()}))
    return replace(passage, silence=silence) if silence > 0 else passage


def _has_structure(declared: Any, observation: Observation, model: nn.Module) -> bool:
    """Return whether the density of the noise differs between values, or whether values depend on each other.

    Otherwise, the derivative of the log density of permuted residuals is permuted in the same way, and does not change
    with other residuals.
    """
    if declared.noise is None or (declared.samplewise and observation.batch_size > 1):
        return False
    task = declared.blank_task(observation, model)
    update = observation.update
    residuals = torch.randn(flatten(update).shape, generator=torch.Generator().manual_seed(0)).to(flatten(update))
    order = torch.randperm(len(residuals), generator=torch.Generator().manual_seed(1)).to(residuals.device)
    half = order < len(order) / 2

    def score(values: Tensor) -> Tensor:
        expected = {name: torch.zeros_like(tensor).requires_grad_() for name, tensor in update.items()}
        likelihoods = declared.noise.log_likelihood(task, unflatten(values, update), expected)
        total = torch.stack([likelihood.sum() for likelihood in likelihoods.values()]).sum()
        return flatten(unflatten(torch.cat([s.flatten() for s in _slopes(total, expected)]), update))

    try:
        with torch.enable_grad():
            scores, permuted = score(residuals), score(residuals[order])
            alone = score(residuals.where(half, 0.0))
    except Exception:  # code of users may raise anything
        return False
    moved, changed = (permuted - scores[order]).norm(), (alone - scores)[half].norm()
    return bool(torch.maximum(moved, changed) > _EQUAL * scores.norm())


def _slopes(total: Tensor, tensors: Named) -> Sequence[Tensor]:
    return torch.autograd.grad(total, list(tensors.values()), allow_unused=True, materialize_grads=True)
