"""FedBoosting: clients score each other's models, and models that generalise better get more weight.

Source: Ren's thesis, chapter 4, equations 4.1 to 4.3 and 4.5, and algorithms 2 and 3. `boosting_over_channel` has its
encryption. The thesis once calls V a loss. Its statements on poisoned models imply that V is a score for which higher
is better, and so it is here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import isfinite, nan
from statistics import fmean
from typing import Annotated, Any, ClassVar, Generic, Literal, Self, TypeVar

import torch
from pydantic import Field
from torch import Tensor

from rayfed.aggregation.base import InteractiveAggregation, Member
from rayfed.aggregation.weighted_sum import scaled
from rayfed.core.questions import Memory, Question, RoundSession, Tables
from rayfed.errors import UserError
from rayfed.registry import component
from rayfed.update import Mixtures, Named, Update

Model = TypeVar("Model")
"""A client's update and buffers, plain or encrypted."""

_BETAS, _EPSILON = (0.9, 0.999), 1e-8
"""Constants of Adam (Kingma and Ba 2015, algorithm 1)."""
_LEAST = 1e-12
"""Lower limit of losses and weights when a logarithm is taken."""


@dataclass(frozen=True)
class Candidate(Generic[Model]):
    """One client's update with the client's training loss."""

    client: int
    model: Model
    """The client's update and buffers, plain or encrypted."""
    loss: float
    """Mean loss over the client's local steps (nats); NaN if there was none. Never encrypted: the server weighs by
    it."""


Candidates = dict[int, Candidate[Model]]
"""Candidates by client."""
Tensors = tuple[Named, Named]
"""An update and its buffers, or a mean of several."""


@dataclass(frozen=True)
class Score(Generic[Model]):
    """Question to a client: evaluate all models of the round on the client's validation samples."""

    models: dict[int, Model]
    """Client -> the model or mixture that represents it."""


@dataclass(frozen=True)
class Evaluation:
    """One client's evaluation of all models of a round: losses and accuracies."""

    validation: dict[int, tuple[float, float]]
    """Model -> mean loss (nats) and accuracy on the client's validation samples."""
    training_accuracy: float = nan
    """Accuracy of the client's own model on its training samples, if the rule uses it."""


@dataclass(frozen=True)
class RoundScores(RoundSession, Generic[Model]):
    """Session of a FedBoosting round: the updates, the clients' scores of the models, and the resulting weights."""

    weigh: Callable[[Mapping[int, float], Mapping[int, Evaluation], Memory], tuple[dict[int, float], Memory]]
    """Function that computes the weights (`FedBoosting.weigh`)."""
    mixed: Callable[[Mapping[int, Model]], dict[int, Model]]
    """Function that returns the model or mixture that represents each client in scoring."""
    memory: Memory
    """State of the smoothed weights, by client."""
    candidates: Candidates[Model] = field(default_factory=dict)
    evaluations: Mapping[int, Evaluation] = field(default_factory=dict)
    weights: dict[int, float] = field(default_factory=dict)

    def finalise(self, total: Candidates[Model]) -> Self:
        """Return the session after all updates of the round have arrived."""
        return replace(self, candidates=total)

    def request(self) -> Question | None:
        """Return the round's only question: every client scores all models. None after the replies."""
        if self.evaluations or not self.candidates:
            return None
        return Question(Score(self.mixed({client: candidate.model for client, candidate in self.candidates.items()})))

    def receive(self, answers: Mapping[int, Any]) -> Self:
        """Return the session after the clients' scores, with the computed weights."""
        losses = {client: candidate.loss for client, candidate in self.candidates.items()}
        weights, memory = self.weigh(losses, answers, self.memory)
        return replace(self, evaluations=answers, weights=weights, memory=memory)

    def remembered(self) -> Memory:
        """Return the state of the clients' smoothed weights for the next round."""
        return self.memory

    def rows(self) -> Tables:
        """Return the rows of the tables `weights` and `scores` for the round."""
        said = [
            {"model": model, "validator": validator, "loss": loss, "accuracy": accuracy}
            for model in self.candidates
            for validator, evaluation in self.evaluations.items()
            for loss, accuracy in [evaluation.validation[model]]
        ]
        weights = [
            {
                "client": client,
                "weight": self.weights[client],
                "train_loss": candidate.loss,
                "accuracy": fmean(row["accuracy"] for row in said if row["model"] == client),
            }
            for client, candidate in self.candidates.items()
        ]
        return {"weights": weights, "scores": said}


@component
class FedBoosting(InteractiveAggregation[Update, Candidates[Tensors], RoundScores[Tensors]]):
    """Weighted sum of the updates, with weights from clients' training losses and their models' scores.

    Source: thesis, section 4.2.1. The weights sum to 1 and do not depend on the clients' numbers of samples. As in
    algorithm 2, a client also scores its own model. Every client receives all models of a round, plain or fused.
    """

    rule: Literal["paper", "code"] = "paper"
    """Formula of the weights. `paper`: softmax(softmax(T) x V), with the sums V of models' scores and the training
    losses T (equation 4.2): a high training loss increases a weight. `code`: as in the authors' published code,
    proportional to mean score x training accuracy, or with `score: loss` to 1 / (mean loss x training loss)."""
    score: Literal["accuracy", "loss"] = "accuracy"
    """Score of a model: accuracy, or the mean loss. `paper` maps the loss to exp(-loss), which is also in 0..1."""
    training_loss: bool = True
    """Use the training loss (or accuracy) in the weights (figure 4.6). If false, it is treated as equal for all
    clients."""
    sharpness: Annotated[float, Field(gt=0)] = 1.0
    """Exponent applied to the weights before they are normalised again; 1 is the thesis' value."""
    smoothing: Annotated[float, Field(gt=0)] | None = None
    """Step size of Adam for smoothing the logarithm of a client's weight over its rounds (the thesis' future work).
    Null: no smoothing."""
    fusion: Annotated[float, Field(gt=0.5, lt=1)] | None = None
    """Share of a client's own update in the mixture that is scored; the other clients share the rest equally (the
    thesis' "DP fusion", with 0.9). It adds no noise, so there is no (epsilon, delta), and every update can be computed
    from all mixtures. Null: no mixing."""

    gathers: ClassVar[bool] = True
    validates: ClassVar[bool] = True
    reveals: ClassVar[str | None] = "training losses and model scores"

    def check(self, clients: int) -> None:
        """Raise `UserError` if `fusion` is set and rounds have only one client."""
        if self.fusion is not None and clients < 2:
            raise UserError("fedboosting: fusion needs at least two clients per round: set fusion to null")

    def partial(self, sent: Iterable[Update]) -> Candidates[Tensors]:
        """Return the unchanged updates of one cohort of clients, with their training losses, by client."""
        return {u.client: Candidate(u.client, (u.tensors, u.buffers), u.loss) for u in sent}

    def merge(self, left: Candidates[Tensors], right: Candidates[Tensors]) -> Candidates[Tensors]:
        """Merge the updates of two groups of cohorts, by client."""
        return left | right

    def begin_round(self, clients: Sequence[int], memory: Memory) -> RoundScores[Tensors]:
        """Begin a round with the clients' smoothed weights of earlier rounds, and return the session."""
        return RoundScores(self.weigh, self.mixed, memory)

    def mixed(self, models: Mapping[int, Tensors]) -> dict[int, Tensors]:
        """Return the update and buffers that are scored for each client: the client's own, or a mixture with others."""
        if self.fusion is None:
            return dict(models)
        updates = {client: tensors for client, (tensors, _) in models.items()}
        buffers = {client: values for client, (_, values) in models.items()}
        shares = self.shares(models)
        return {model: (weighted_sum(updates, mix), weighted_sum(buffers, mix)) for model, mix in shares.items()}

    def shares(self, clients: Collection[int]) -> dict[int, dict[int, Fraction]]:
        """Return the share of each client's update in each mixture that is scored: model -> client -> share.

        This is equation 4.5 without P. Shares are exact, and an encrypted sender rounds them down to whole pieces.
        """
        if self.fusion is None:
            return {model: {model: Fraction(1)} for model in clients}
        own = Fraction(str(self.fusion))
        other = (1 - own) / (len(clients) - 1)
        return {model: {client: own if client == model else other for client in clients} for model in clients}

    def mixtures(self, updates: Sequence[Update]) -> Mixtures:
        """Return the models (or mixtures) that clients receive for scoring, given a round's updates."""
        models = {update.client: (update.tensors, update.buffers) for update in updates}
        return as_mixtures(self.mixed(models), self.shares(models))

    def answer(self, payload: Score[Tensors], member: Member) -> Evaluation:
        """Return a client's scores of all models, on the client's validation samples.

        A model whose loss is not finite gets accuracy 0.
        """
        found = {model: member.evaluate(*tensors) for model, tensors in payload.models.items()}
        kept = {model: (loss, accuracy) if isfinite(loss) else (nan, 0.0) for model, (loss, accuracy) in found.items()}
        if self.rule == "code" and self.score == "accuracy" and self.training_loss:
            return Evaluation(kept, member.evaluate(*payload.models[member.client], split="train")[1])
        return Evaluation(kept)

    def weigh(
        self, losses: Mapping[int, float], evaluations: Mapping[int, Evaluation], memory: Memory
    ) -> tuple[dict[int, float], Memory]:
        """Return every client's weight in the sum, and the rule's state for the next round.

        Both depend only on the clients' reports.
        """
        logits = self.sharpness * self._evidence(losses, evaluations)
        weights = torch.softmax(logits, dim=0) if logits.isfinite().any() else torch.full_like(logits, 1 / len(logits))
        if self.smoothing is not None:
            weights, memory = _smoothed(weights, list(losses), memory, self.smoothing)
        return dict(zip(losses, weights.tolist(), strict=True)), memory

    def _evidence(self, losses: Mapping[int, float], evaluations: Mapping[int, Evaluation]) -> Tensor:
        """Return the logarithms of the weights up to a common additive constant, (N,) float64."""
        found = _doubles([[judge.validation[model] for judge in evaluations.values()] for model in losses])
        loss, accuracy = found.nan_to_num(nan=torch.inf, posinf=torch.inf).unbind(dim=-1)  # (models, validators)
        trained = _doubles(list(losses.values()))
        known = trained.isfinite()
        trained = torch.where(known, trained, trained[known].mean())  # clients without a step get the mean
        if self.rule == "paper":
            scores = accuracy if self.score == "accuracy" else torch.exp(-loss)
            share = torch.softmax(trained if self.training_loss else torch.zeros_like(trained), dim=0)
            return share * scores.sum(dim=1)
        if self.score == "loss":
            logits = -loss.mean(dim=1).clamp(min=_LEAST).log()
            return logits - trained.clamp(min=_LEAST).log() if self.training_loss else logits
        fit = _doubles([evaluations[model].training_accuracy if self.training_loss else 1.0 for model in losses])
        return accuracy.mean(dim=1).log() + fit.log()

    def combine(self, total: RoundScores[Tensors], generator: torch.Generator) -> Tensors:
        """Return the weighted sums of the updates and of the buffers (equation 4.1 of the thesis)."""
        updates = {client: candidate.model[0] for client, candidate in total.candidates.items()}
        buffers = {client: candidate.model[1] for client, candidate in total.candidates.items()}
        return weighted_sum(updates, total.weights), weighted_sum(buffers, total.weights)


def as_mixtures(models: Mapping[int, Tensors], shares: Mapping[int, Mapping[int, Fraction]]) -> Mixtures:
    """Convert models that were mixed by the given shares to `Mixtures`, for attackers."""
    return Mixtures(
        updates={model: update for model, (update, _) in models.items()},
        buffers={model: buffers for model, (_, buffers) in models.items()},
        shares=_doubles([[float(shares[model].get(client, 0)) for client in models] for model in models]),
    )


def weighted_sum(tensors: Mapping[int, Named], weights: Mapping[int, float | Fraction]) -> Named:
    """Return the weighted sum of the clients' tensors, added in the order of `tensors`."""
    total: Named = {}
    for client, named in tensors.items():
        for name, tensor in scaled(named, float(weights[client])).items():
            total[name] = total[name] + tensor if name in total else tensor
    return total


def _doubles(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _smoothed(weights: Tensor, clients: list[int], memory: Memory, lr: float) -> tuple[Tensor, Memory]:
    """Take one step of Adam on the logits of smoothed weights, and return these weights and the state.

    The state is client -> (logit, first and second moment, steps). The step descends the cross entropy from the round's
    weights to the softmax of the logits, whose gradient is the difference of the two. A new client starts at the
    logarithm of its weight divided by the mean weight. The state of absent clients does not change.
    """
    starts = dict(zip(clients, (weights * len(clients)).clamp(min=_LEAST).log().tolist(), strict=True))
    state = torch.stack([memory.get(client, _doubles([starts[client], 0, 0, 0])) for client in clients])
    logit, first, second, steps = state.unbind(dim=1)
    slope, steps = torch.softmax(logit, dim=0) - weights, steps + 1
    b1, b2 = _BETAS
    first, second = b1 * first + (1 - b1) * slope, b2 * second + (1 - b2) * slope.square()
    logit = logit - lr * (first / (1 - b1**steps)) / ((second / (1 - b2**steps)).sqrt() + _EPSILON)
    moved = torch.stack([logit, first, second, steps], dim=1)
    return torch.softmax(logit, dim=0), memory | dict(zip(clients, moved, strict=True))
