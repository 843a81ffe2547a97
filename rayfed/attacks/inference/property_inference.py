"""Property inference: does the batch behind an update hold a sample of some class?

The attacker makes the updates of public batches with and without the property at the weights that the victim was sent,
as the victim sends its own (`shadows`), and trains a classifier on them. The property is a class here, which a batch
may hold or not.

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
"""Number of entries of the update, drawn at random, that the classifier sees: enough, and few for its memory."""


@component
class PropertyInference(OneByOne):
    """Asks whether a class is in the batch, of a classifier trained on updates of public batches; metric: accuracy.

    With `knowledge: [public, defence]` these go through the victim's defences. Chance is what always giving the answer
    that is right for most of the batches gets that the attack's victims could have drawn.
    """

    needs_classes: ClassVar[bool] = True
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
    """Draw the entries of the update (D,) that the classifier sees, those that are not zero first."""
    order = torch.randperm(len(seen), generator=generator)
    return order[(seen[order] == 0).to(torch.uint8).argsort(stable=True)][:_FEATURES]


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
