"""Property inference: does the batch behind an update hold a sample of some class?

The attacker computes the updates of public batches with and without the property at the weights that the victim was
sent, and trains a classifier on them. The property is a class here, which a batch may hold or not.

Source: Melis et al. 2019, "Exploiting Unintended Feature Leakage in Collaborative Learning", section 5 (passive,
single-batch property inference).
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from pydantic import Field
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn

from rayfed.attacks.base import Inference, InferenceMetric
from rayfed.attacks.forward_probe import buffers_for
from rayfed.attacks.inference.one_by_one import OneByOne
from rayfed.gradients import flatten, many_gradients
from rayfed.registry import component
from rayfed.samples import MODALITIES, Modality
from rayfed.update import Observation

_FEATURES = 4096
"""Number of entries of the gradient, drawn at random, that the classifier sees: enough, and few for its memory."""
_IMAGES_AT_ONCE = 256


@component
class PropertyInference(OneByOne):
    """Asks whether a class is in the batch, of a classifier trained on gradients of public batches; metric: accuracy.

    Chance is what always giving the answer that is right for most public batches of that size gets.
    """

    takes: ClassVar[tuple[Modality, ...]] = MODALITIES
    metric: ClassVar[InferenceMetric] = "accuracy"

    target_class: Annotated[int, Field(ge=0)] = 0
    """The class asked for, counted from 0."""
    batches: Annotated[int, Field(ge=10)] = 400
    """Number of public batches that the classifier is trained on; one half holds the class."""

    def _inference(self, observation: Observation, model: nn.Module, generator: torch.Generator) -> Inference:
        if "public" not in observation.extra:
            message = "there are no batches to learn from: grant `knowledge: [public]`"
            return Inference(metric=self.metric, status="not applicable", message=message)
        images, labels = (t.cpu() for t in observation.extra["public"])
        holds = labels == self.target_class
        if not holds.any() or holds.all():
            message = f"public images with and without class {self.target_class} are needed"
            return Inference(metric=self.metric, status="not applicable", message=message)
        if not all(t.isfinite().all() for t in observation.update.values()):
            return Inference(metric=self.metric, status="diverged", message="the update is not finite")
        answers = torch.arange(self.batches) % 2
        drawn = torch.stack([_batch(holds, bool(yes), observation.batch_size, generator) for yes in answers])
        entries = torch.randperm(sum(t.numel() for t in observation.update.values()), generator=generator)[:_FEATURES]
        known = self._features(observation, model, images, labels, drawn, entries)
        classifier = make_pipeline(StandardScaler(), LogisticRegression(C=1e-2, max_iter=1000))
        classifier.fit(known.numpy(), answers.numpy())
        seen = flatten(observation.gradient).cpu()[entries][None]
        share = 1 - (1 - holds.float().mean().item()) ** observation.batch_size
        return Inference(
            metric=self.metric,
            scores=torch.from_numpy(classifier.predict_proba(seen.numpy())[:, 1]),
            label=self.target_class,
            chance=max(share, 1 - share),
        )

    def _features(
        self, observation: Observation, model: nn.Module, images: Tensor, labels: Tensor, drawn: Tensor, entries: Tensor
    ) -> Tensor:
        """Return entries of the gradients of the batches `drawn` (P, N) of public samples: (P, F)."""
        weights, device = observation.weights, next(iter(observation.weights.values())).device
        model, buffers = model.to(device), buffers_for(model, observation)
        features = []
        for rows in drawn.split(max(1, _IMAGES_AT_ONCE // observation.batch_size)):
            found = many_gradients(model, weights, buffers, images[rows].to(device), labels[rows].to(device))
            features.append(torch.cat([g.flatten(1) for g in found.values()], 1)[:, entries.to(device)].cpu())
        return torch.cat(features)


def _batch(holds: Tensor, yes: bool, size: int, generator: torch.Generator) -> Tensor:
    """Return the indices (size,) of a random batch that does hold the property, or does not; samples may repeat."""
    if not yes:
        return _one_of((~holds).nonzero().flatten(), size, generator)
    rows = _one_of(torch.arange(len(holds)), size, generator)
    if not holds[rows].any():
        rows[:1] = _one_of(holds.nonzero().flatten(), 1, generator)
    return rows


def _one_of(rows: Tensor, size: int, generator: torch.Generator) -> Tensor:
    return rows[torch.randint(len(rows), (size,), generator=generator)]
