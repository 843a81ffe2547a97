"""Membership inference: which of some candidates did the victim train on?

`loss`: members have a small loss in the victim's local model (the weights that it was sent minus its update). `norm`:
their gradients are small there. `cosine`: a member's own gradient at the weights sent is a part of the update, so the
angle between them is small. None needs shadow models.

Sources: Yeom et al. 2018, "Privacy Risk in Machine Learning: Analyzing the Connection to Overfitting", section 3
(`loss`); Nasr et al. 2019, "Comprehensive Privacy Analysis of Deep Learning", which feeds gradients to a trained
attack model: their norm and direction are used here as they are.
"""

from __future__ import annotations

import copy
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from rayfed.attacks.base import Inference, InferenceMetric
from rayfed.attacks.inference.one_by_one import OneByOne
from rayfed.gradients import flatten, per_sample_gradients
from rayfed.registry import component
from rayfed.samples import MODALITIES, Modality
from rayfed.update import Named, Observation

_AT_ONCE = 32
"""Number of candidates whose gradients are held at the same time."""


@component
class Membership(OneByOne):
    """Scores the candidates of `knowledge: [candidates]`, half of which the victim trained on; metric: AUC."""

    takes: ClassVar[tuple[Modality, ...]] = MODALITIES
    metric: ClassVar[InferenceMetric] = "auc"

    score: Literal["loss", "norm", "cosine"] = "cosine"
    """Sign of a member: small loss or small gradient norm after the victim's update, or a gradient in its direction."""

    def _own(self, model: nn.Module) -> nn.Module:
        return copy.deepcopy(model).eval()  # a candidate's score must not depend on the candidates beside it

    def _inference(self, observation: Observation, model: nn.Module, generator: torch.Generator) -> Inference:
        if "candidates" not in observation.extra:
            message = "there is nobody to ask about: grant `knowledge: [candidates]`"
            return Inference(metric=self.metric, status="not applicable", message=message)
        device = next(iter(observation.weights.values())).device
        model = model.to(device)
        inputs, labels = (t.to(device) for t in observation.extra["candidates"])
        local = {name: w - observation.update[name] for name, w in observation.weights.items()}
        chunks = zip(inputs.split(_AT_ONCE), labels.split(_AT_ONCE), strict=True)
        scores = torch.cat([self._scores(observation, model, local, *chunk) for chunk in chunks]).cpu()
        if not scores.isfinite().all():
            message = f"the {self.score} of some candidates is not a number"
            return Inference(metric=self.metric, scores=scores, status="diverged", message=message)
        return Inference(metric=self.metric, scores=scores)

    @torch.no_grad()
    def _scores(
        self, observation: Observation, model: nn.Module, local: Named, inputs: Tensor, labels: Tensor
    ) -> Tensor:
        """Return the scores (n,) of inputs (n, *shape) with labels (n,), higher for members."""
        if self.score == "loss":
            logits = functional_call(model, {**local, **observation.buffers}, (inputs,))
            return -F.cross_entropy(logits, labels, reduction="none")
        weights = local if self.score == "norm" else observation.weights
        gradients = per_sample_gradients(model, weights, observation.buffers, inputs, labels)
        rows = torch.cat([g.flatten(1) for g in gradients.values()], 1)
        if self.score == "norm":
            scores: Tensor = -rows.norm(dim=1)
            return scores
        update = flatten({name: observation.update[name] for name in gradients})
        return F.cosine_similarity(rows, update[None])
