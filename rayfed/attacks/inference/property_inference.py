"""Property inference: decide whether the batch of an update contains a sample of a class.

The attacker computes updates of public batches with and without the class (`shadows`), at the weights that the victim
was sent. A classifier is trained on these updates.

Source: Melis et al. 2019, "Exploiting Unintended Feature Leakage in Collaborative Learning", section 5 (passive,
single-batch property inference).
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from pydantic import Field
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn

from rayfed.attacks.base import Inference, InferenceMetric
from rayfed.attacks.inference.one_by_one import OneByOne
from rayfed.attacks.inference.shadows import shadow_updates
from rayfed.gradients import flatten
from rayfed.registry import component
from rayfed.samples import MODALITIES, Modality
from rayfed.update import Observation

_FEATURES = 4096
"""Number of randomly chosen entries of the update used as features; limits the memory of the classifier."""


@component
class PropertyInference(OneByOne):
    """Predict whether a class is in the batch with a classifier trained on public updates; metric: accuracy.

    With `knowledge: [public, defence]`, the public updates pass through the victim's defences. Chance is the accuracy
    of always predicting the more frequent outcome among the batches that the victims could have sampled.
    """

    needs_classes: ClassVar[bool] = True
    takes: ClassVar[tuple[Modality, ...]] = MODALITIES
    metric: ClassVar[InferenceMetric] = "accuracy"

    target_class: Annotated[int, Field(ge=0)] = 0
    """Class to predict, counted from 0."""
    batches: Annotated[int, Field(ge=10)] = 400
    """Number of public batches to train the classifier on; half of them contain the class."""

    def _inference(self, observation: Observation, model: nn.Module, generator: torch.Generator) -> Inference:
        if "public" not in observation.extra:
            message = "the attack needs public samples to train the classifier on: add `knowledge: [public]`"
            return Inference(metric=self.metric, status="not applicable", message=message)
        images, labels = (t.cpu() for t in observation.extra["public"])
        holds = labels == self.target_class
        if not holds.any() or holds.all():
            message = f"the public samples must include class {self.target_class} and at least one other class"
            return Inference(metric=self.metric, status="not applicable", message=message)
        if not all(t.isfinite().all() for t in observation.update.values()):
            return Inference(metric=self.metric, status="diverged", message="the update is not finite")
        answers = torch.arange(self.batches) % 2
        drawn = torch.stack([_batch(holds, bool(yes), observation.batch_size, generator) for yes in answers])
        seen = flatten(observation.update)
        entries = _entries(seen.cpu(), generator).to(seen.device)
        shadows = shadow_updates(observation, model, images[drawn], labels[drawn], generator)
        known = torch.cat([some[:, entries].cpu() for some in shadows])
        mean, scale = known.mean(0), known.std().clamp(min=torch.finfo(known.dtype).tiny)  # one scale: most may be zero
        classifier = LogisticRegression(C=1e-2, max_iter=1000)
        classifier.fit(((known - mean) / scale).numpy(), answers.numpy())
        probability = classifier.predict_proba(((seen[entries].cpu() - mean) / scale)[None].numpy())[:, 1]
        return Inference(metric=self.metric, scores=torch.from_numpy(probability), label=self.target_class)


def _entries(seen: Tensor, generator: torch.Generator) -> Tensor:
    """Return random indices of the update's entries (D,) to use as features, non-zero entries first."""
    order = torch.randperm(len(seen), generator=generator)
    return order[(seen[order] == 0).to(torch.uint8).argsort(stable=True)][:_FEATURES]


def _batch(holds: Tensor, yes: bool, size: int, generator: torch.Generator) -> Tensor:
    """Return the indices (size,) of a random batch with (`yes`) or without the class; samples may repeat."""
    if not yes:
        return _one_of((~holds).nonzero().flatten(), size, generator)
    rows = _one_of(torch.arange(len(holds)), size, generator)
    if not holds[rows].any():
        rows[:1] = _one_of(holds.nonzero().flatten(), 1, generator)
    return rows


def _one_of(rows: Tensor, size: int, generator: torch.Generator) -> Tensor:
    return rows[torch.randint(len(rows), (size,), generator=generator)]
