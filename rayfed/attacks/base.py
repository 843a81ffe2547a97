"""The contract of an attack: from observations to the images and labels behind them, or to an inference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from rayfed.samples import SampleSpec
from rayfed.update import Named, Observation


@dataclass(frozen=True)
class Reconstruction:
    """A reconstruction of the samples behind one observation."""

    images: Tensor
    """Inputs (N, *shape) as the observation's `sample` says, such as images (N, C, H, W) in [0, 1], for its batch size
    N; the order is the attack's own."""
    labels: Tensor
    """(N,) int64, the attack's own estimate (equal to the observation's where those were given)."""
    loss: float = float("nan")
    """The attack's own final objective, by which restarts are compared; of closed forms the sine of the angle between
    the gradient at what was found and the observed one, NaN where labels and images are not matched."""
    fit: float | None = None
    """How far the gradient at these samples and labels is from the observed one, as a share of a grey sample's; filled
    in after the attack (`rayfed.attacks.fit`)."""
    fits: Tensor | None = None
    """The same of each part of the gradient by itself, (P,), in which small values count nearly as much as large."""
    nats: float | None = None
    """By how many nats an update in noise is less likely at these samples than without noise."""
    trace: list[tuple[int, float]] = field(default_factory=list)
    """(iteration, objective) pairs along the way."""
    snapshots: tuple[tuple[int, Tensor], ...] = ()
    """(iteration, the first few of `images` as they were then) of the restart that counts, the last as it is returned;
    none of closed forms."""
    iterations: int = 0
    seconds: float = 0.0
    """Wall time of the batched call divided by its observations."""
    status: Literal["ok", "diverged", "not applicable", "failed"] = "ok"
    message: str = ""
    """Why the status is not ok, or what the attacker had to do without, in words for the report."""
    inherent: bool = False
    """Of one that is not applicable: whether it is so for every update of such a model and batch size, whatever the
    attacker knows beside it."""
    notes: tuple[str, ...] = ()
    """Messages for the run's log, which change nothing about the result."""


@runtime_checkable
class Attack(Protocol):
    """An attack that reconstructs samples: a frozen dataclass whose fields are the scenario's parameters.

    One that never looks at the update says so by a class variable `reads_update = False`: encryption does not stop it.
    One that has no meaning where labels are numbers says `needs_classes = True`, and is not applicable there. Where
    labels are a class for each place (`Observation.has_places`) those alone are played that say `place_labels`: "given"
    of attacks that need them, "unneeded" of others.
    """

    def reconstruct(
        self, observations: Sequence[Observation], model: nn.Module, generators: Sequence[torch.Generator]
    ) -> list[Reconstruction]:
        """Return one reconstruction for each observation, in order.

        `model` is the architecture (its own weights carry no meaning; its training or evaluation mode is the
        clients'). All observations were sent the same weights; batch sizes may differ. `generators[i]` is the only
        source of randomness for observation i, so a result does not depend on what else is in the call.
        """
        ...


@runtime_checkable
class Checked(Protocol):
    """An attack that can check before a run whether it applies."""

    def check(self, model: nn.Module, sample: SampleSpec, classes: int) -> None:
        """Raise `UserError` where the attack, this model and such samples do not fit."""
        ...


InferenceMetric = Literal["auc", "accuracy", "class_share"]


@dataclass(frozen=True)
class Inference:
    """A statement of an attack about a victim's data, without rebuilding them."""

    metric: InferenceMetric
    """Metric of its score: `auc` of the candidates' scores, `accuracy` of the answer whether class `label` is in the
    batch, share of `images` that look like class `label` to a classifier of the test data."""
    scores: Tensor = field(default_factory=lambda: torch.empty(0))
    """`auc`: (M,) one for each candidate, higher for members. `accuracy`: (1,) the probability of yes."""
    control: Tensor | None = None
    """`auc`: (M,) scores of the same candidates on an update behind which none of them is; None without a control."""
    images: Tensor = field(default_factory=lambda: torch.empty(0))
    """`class_share`: (G, C, H, W) in [0, 1]."""
    label: int = -1
    """The class that the inference is about, -1 for none."""
    chance: float = 0.5
    """Value of the metric without any observation."""
    seconds: float = 0.0
    status: Literal["ok", "diverged", "not applicable", "failed"] = "ok"
    message: str = ""
    """Why the status is not ok, or what the attacker had to do without, in words for the report."""
    inherent: bool = False
    """Of one that is not applicable: whether it is so for every update of such a model and batch size, whatever the
    attacker knows beside it."""
    notes: tuple[str, ...] = ()
    """Messages for the run's log, which change nothing about the result."""


Guess = Reconstruction | Inference
"""Result of an attack of either kind."""


@runtime_checkable
class InferenceAttack(Protocol):
    """An attack that infers something of a victim's data and rebuilds no sample: a frozen dataclass, as an `Attack`."""

    metric: ClassVar[InferenceMetric]
    """Metric of its inferences."""

    def infer(
        self, observations: Sequence[Observation], model: nn.Module, generators: Sequence[torch.Generator]
    ) -> list[Inference]:
        """Return one inference for each observation, in order; the arguments are those of `Attack.reconstruct`."""
        ...


@runtime_checkable
class MaliciousServer(Protocol):
    """An attack by a server that breaks the protocol: it sends its victims another model."""

    def tamper(
        self,
        model: nn.Module,
        weights: Named,
        buffers: Named,
        image_shape: tuple[int, ...],
        extra: Mapping[str, Any],
        generator: torch.Generator,
    ) -> tuple[nn.Module, Named, Named]:
        """Return the model, weights and buffers that victims are sent in place of these, which stay as they are.

        A pure function of its arguments. What never leaves a client (`rayfed.models.private`) is not among them: of
        such tensors `model` has a draw of its own, and what is returned of them is not used. `extra` holds the public
        data where they are granted, as in the observation; the tampered weights and buffers are those of the
        observation, so `reconstruct` can read what was done.
        """
        ...


class NotApplicable(Exception):
    """What an attack raises that does not fit a model or an observation, and finds out late; its message says why."""

    def __init__(self, message: str, inherent: bool = False) -> None:
        super().__init__(message)
        self.inherent = inherent
        """As that of `Reconstruction`."""


def not_applicable(observation: Observation, message: str, inherent: bool = False) -> Reconstruction:
    """Return the result of an attack that does not fit the model or the observation: zeros, label 0."""
    return Reconstruction(
        images=observation.sample.blank(observation.batch_size),
        labels=torch.zeros(observation.batch_size, dtype=torch.int64),
        status="not applicable",
        message=message,
        inherent=inherent,
    )


def check_form(results: Sequence[Any], observations: Sequence[Observation]) -> None:
    """Raise `ValueError` unless an attack returned one reconstruction of the right shape for each observation."""
    if len(results) != len(observations):
        raise ValueError(f"the attack returned {len(results)} results for {len(observations)} observations")
    for result, observation in zip(results, observations, strict=True):
        if not isinstance(result, Reconstruction):
            raise ValueError(f"the attack returned a {type(result).__name__}, not a Reconstruction")
        if result.status in ("not applicable", "failed"):
            continue
        expected = observation.batch_size, *observation.sample.shape
        if tuple(result.images.shape) != expected:
            raise ValueError(f"the attack returned images {tuple(result.images.shape)}, not {expected}")
        if len(result.labels) != observation.batch_size:
            raise ValueError(f"the attack returned {len(result.labels)} labels, not {observation.batch_size}")


def failed(method: Attack | InferenceAttack, message: str) -> Guess:
    """Return the result of an attack that did not finish."""
    if isinstance(method, InferenceAttack):
        return Inference(metric=method.metric, status="failed", message=message)
    return Reconstruction(torch.empty(0), torch.empty(0, dtype=torch.int64), status="failed", message=message)
