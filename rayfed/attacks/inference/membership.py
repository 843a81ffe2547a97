"""Membership inference: decide which of the candidates the victim trained on.

- `regression`: the update is a sum of the members' gradients, so members have large coefficients in its regression on
  all candidates' gradients. Gradients are normalised and taken at the weights that were sent. After several local
  steps, those at the victim's final weights are added. Entries with an update of zero are excluded.
- `lira`: likelihood ratio of the candidate's loss in shadow clients that train on it and in others that do not.
- `loss`: members have a small loss in the victim's local model (the sent weights minus the update).
- `norm`: members have small gradients in the victim's local model.
- `cosine`: a member's gradient at the sent weights is a part of the update, so the angle between them is small.

Sources: Yeom et al. 2018, "Privacy Risk in Machine Learning: Analyzing the Connection to Overfitting", section 3
(`loss`); Nasr et al. 2019, "Comprehensive Privacy Analysis of Deep Learning" (gradients, there as inputs of a trained
attack model); Li et al. 2023, "Effective Passive Membership Inference Attacks in Federated Learning against
Overparameterized Models" (nearly orthogonal gradients; our `regression` only needs linear independence); Golub et al.
1979, "Generalized Cross-Validation as a Method for Choosing a Good Ridge Parameter"; Carlini et al. 2022, "Membership
Inference Attacks From First Principles", section 5 (`lira`, online, one variance for all candidates).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from rayfed.attacks.base import Inference, InferenceMetric
from rayfed.attacks.forward_probe import without_tracking
from rayfed.attacks.inference.one_by_one import OneByOne
from rayfed.attacks.inference.shadows import shadow_updates
from rayfed.core import losses
from rayfed.gradients import flatten, gradient, per_sample_gradients, sample_rows, unflatten
from rayfed.models.copying import copy_model
from rayfed.registry import component
from rayfed.samples import MODALITIES, Modality
from rayfed.update import Named, Observation

_AT_ONCE = 32
"""Number of candidates whose gradients are held in memory at once."""
_ENTRIES = 65_536
"""Maximum number of update entries in the regression: those with the largest gradients of candidates."""
_NOBODY = "the attacker knows no candidates: add `knowledge: [candidates]`"
_NO_MATCH = (
    "there are no candidates: no label of the update has two samples that no client trained on; "
    "increase the held-out share of clients (federation.validation)"
)
_NO_PUBLIC = "the score `lira` needs public samples to train shadow clients: add `knowledge: [candidates, public]`"


@component
class Membership(OneByOne):
    """Score how likely each candidate (`knowledge: [candidates]`) is a member of the update's batch; metric: AUC.

    The AUC compares members with non-members of the same labels. The control is the AUC of the same candidates on an
    update of equal length from samples that no client trained on. If the control differs significantly from 0.5,
    members and non-members differ even without the update. Possible reasons are different sources, or earlier rounds in
    which the model was trained on members.
    """

    takes: ClassVar[tuple[Modality, ...]] = MODALITIES
    place_labels: ClassVar[str] = "unneeded"
    metric: ClassVar[InferenceMetric] = "auc"

    score: Literal["regression", "lira", "loss", "norm", "cosine"] = "regression"
    """Score of a candidate. `regression`: coefficient of its gradient in the update. `lira`: likelihood ratio from
    shadow clients (needs `knowledge: [candidates, public]`). `loss`, `norm`: negative loss or gradient norm in the
    victim's local model. `cosine`: cosine of its gradient and the update."""
    shadows: Annotated[int, Field(ge=4)] = 32
    """Number of shadow clients (`lira`)."""

    def _own(self, model: nn.Module) -> nn.Module:
        return copy_model(model)

    def _inference(self, observation: Observation, model: nn.Module, generator: torch.Generator) -> Inference:
        if (obstacle := self._obstacle(observation)) is not None:
            return Inference(metric=self.metric, status="not applicable", message=obstacle)
        if not all(t.isfinite().all() for t in observation.update.values()):
            return Inference(metric=self.metric, status="diverged", message="the update is not finite")
        device = next(iter(observation.weights.values())).device
        model = model.to(device)
        scores = self._scores(observation, model, generator)
        if not scores.isfinite().all():
            message = f"the {self.score} score of some candidates is not finite"
            return Inference(metric=self.metric, scores=scores, status="diverged", message=message)
        control = self._scores(replace(observation, update=_nobodys(observation, model)), model, generator)
        return Inference(metric=self.metric, scores=scores, control=control if control.isfinite().all() else None)

    def _scores(self, observation: Observation, model: nn.Module, generator: torch.Generator) -> Tensor:
        candidates = _Candidates(observation, model)
        if self.score == "regression":
            return candidates.shares().cpu()
        if self.score == "lira":
            return candidates.likelihood_ratios(self.shadows, without_tracking(model), generator).cpu()
        return candidates.each(self.score).cpu()

    def _obstacle(self, observation: Observation) -> str | None:
        if "candidates" not in observation.extra:
            return _NOBODY
        if not len(observation.extra["candidates"][1]):
            return _NO_MATCH
        return _NO_PUBLIC if self.score == "lira" and "public" not in observation.extra else None


def _nobodys(observation: Observation, model: nn.Module) -> Named:
    """Return the mean gradient of the control samples, scaled to the length of the observed update."""
    inputs, labels = (t.to(next(iter(observation.weights.values())).device) for t in observation.extra["control"])
    made, _ = gradient(copy_model(model).eval(), observation.weights, observation.buffers, inputs, labels)
    long, length = (flatten(dict(update)).norm() for update in (observation.update, made))
    return {name: t * (long / length.clamp(min=1e-12)) for name, t in made.items()}


class _Candidates:
    """Scores (M,) of the M candidates of an observation."""

    def __init__(self, observation: Observation, model: nn.Module) -> None:
        self.observation, self.model = observation, copy_model(model).eval()  # scores do not depend on other candidates
        device = next(iter(observation.weights.values())).device
        self.inputs, self.labels = (t.to(device) for t in observation.extra["candidates"])
        self.local = {name: w - observation.update[name] for name, w in observation.weights.items()}

    @torch.no_grad()
    def each(self, score: Literal["loss", "norm", "cosine"]) -> Tensor:
        """Return the score of each candidate, (M,): minus the loss, minus the gradient norm, or the cosine."""
        if score == "loss":
            return -self._losses(self.local)
        if score == "norm":
            return torch.cat([-rows.norm(dim=1) for rows in self._gradients([self.local])])
        update = self._flat()[None]
        return torch.cat([F.cosine_similarity(rows, update) for rows in self._gradients([self.observation.weights])])

    @torch.no_grad()
    def shares(self) -> Tensor:
        """Return the coefficients of a ridge regression of the update on the candidates' normalised gradients."""
        weights, update = self.observation.weights, self._flat()
        at = [weights] if self.observation.local.steps == 1 else [weights, self.local]
        entries = update.nonzero().flatten()
        if len(entries) > _ENTRIES:
            energy = next(self._gradients(at)).square().sum(0)[entries]
            entries = entries[energy.topk(_ENTRIES).indices]
        rows = torch.cat([F.normalize(some)[:, entries] for some in self._gradients(at)]).double()
        return ridge(rows, update[entries].double())

    def likelihood_ratios(self, count: int, model: nn.Module, generator: torch.Generator) -> Tensor:
        """Return the log-likelihood ratio of each candidate's loss, from shadow clients with and without the candidate.

        `model` is the result of `without_tracking`. The batch of a shadow client contains up to half of the candidates
        and is filled with public samples.
        """
        public, size = self.observation.extra["public"], self.observation.batch_size
        own = min(size, len(self.labels) // 2)
        drawn = [torch.randperm(len(self.labels), generator=generator)[:own] for _ in range(count)]
        rest = [torch.randint(len(public[1]), (size - own,), generator=generator) for _ in range(count)]
        inputs, labels = (
            torch.stack([torch.cat([c[a], p[b]]) for a, b in zip(drawn, rest, strict=True)])
            for c, p in zip((self.inputs.cpu(), self.labels.cpu()), (t.cpu() for t in public), strict=True)
        )
        made = torch.cat(list(shadow_updates(self.observation, model, inputs, labels, generator)))
        with torch.no_grad():
            found = torch.stack([self._confidences(self._moved(update)) for update in made])
            trained = torch.zeros_like(found, dtype=torch.bool)
            for row, places in zip(trained, drawn, strict=True):
                row[places.to(row.device)] = True
            return log_ratios(self._confidences(self.local), found, trained)

    def _moved(self, update: Tensor) -> Named:
        parts = unflatten(update, self.observation.update)
        return {name: w - parts[name] for name, w in self.observation.weights.items()}

    def _flat(self) -> Tensor:
        """Return the update (D,), in the order of the weights, without weight decay."""
        update = self.observation.undecayed
        return flatten({name: update[name] for name in self.observation.weights})

    def _losses(self, weights: Named) -> Tensor:
        state = {**weights, **self.observation.buffers}
        logits = torch.cat([functional_call(self.model, state, (some,)) for some in self.inputs.split(_AT_ONCE)])
        return losses.get_loss(self.model)(logits, self.labels, "none")

    def _confidences(self, weights: Named) -> Tensor:
        """Return log(p / (1 - p)) for the probability p of each candidate's label; it is roughly normal."""
        losses = self._losses(weights).double().clamp(min=1e-12)
        return -torch.log(torch.expm1(losses.clamp(max=500)))

    def _gradients(self, at: Sequence[Named]) -> Iterator[Tensor]:
        """Yield the candidates' gradients (m, D), summed over the weights in `at`, in chunks."""
        buffers = self.observation.buffers
        for inputs, labels in zip(self.inputs.split(_AT_ONCE), self.labels.split(_AT_ONCE), strict=True):
            found = [per_sample_gradients(self.model, weights, buffers, inputs, labels) for weights in at]
            rows = [sample_rows({name: one[name] for name in self.observation.weights}) for one in found]
            yield torch.stack(rows).sum(0)


def ridge(rows: Tensor, seen: Tensor) -> Tensor:
    """Return the coefficients (M,) of a ridge regression of `seen` (D,) on `rows` (M, D).

    Generalised cross-validation selects the penalty from 23 values from 1e-10 to 10 times the largest eigenvalue.
    """
    values, vectors = torch.linalg.eigh(rows @ rows.T)
    values = values.clamp(min=0)
    along = vectors.T @ (rows @ seen)
    best, least = torch.zeros_like(along), torch.inf
    for penalty in values[-1] * torch.logspace(-10, 1, 23, dtype=rows.dtype, device=rows.device):
        found = along / (values + penalty)
        left = seen @ seen - 2 * found @ along + found.square() @ values
        score = float(left / (rows.shape[1] - (values / (values + penalty)).sum()).square())
        if score < least:
            best, least = found, score
    coefficients: Tensor = vectors @ best
    return coefficients


def log_ratios(seen: Tensor, shadows: Tensor, trained: Tensor) -> Tensor:
    """Return each candidate's Gaussian log-likelihood ratio (M,), trained on the candidate against not trained on.

    `seen` (M,) are the values in the victim and `shadows` (T, M) the values in T shadow clients. `trained` (T, M) marks
    the clients that trained on the candidate. Each candidate has its own means, and all share one variance per side.
    """
    logs = []
    for side in (trained, ~trained):
        count = side.sum(0).clamp(min=1)
        mean = (shadows * side).sum(0) / count
        freedom = (side.sum() - (side.sum(0) > 0).sum()).clamp(min=1)
        variance = ((shadows - mean).square() * side).sum() / freedom
        logs.append(-(seen - mean).square() / (2 * variance) - variance.log() / 2)
    with_it, without = logs
    return with_it - without
