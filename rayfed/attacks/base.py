"""Interfaces and result types of attacks, which turn observations into reconstructions or inferences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from rayfed.core.reasons import Reason
from rayfed.samples import SampleSpec
from rayfed.update import Named, Observation


@dataclass(frozen=True)
class Reconstruction:
    """Result of an attack that reconstructs the samples of one observation."""

    images: Tensor
    """Inputs (N, *shape) in the format of the observation's `sample`, such as images (N, C, H, W) in [0, 1]; in any
    order."""
    labels: Tensor
    """(N,) int64, the attack's own estimate, or the observation's labels if these were given."""
    loss: float = float("nan")
    """The attack's final objective, used to compare restarts. Closed forms: the sine of the angle between the observed
    gradient and that of the reconstruction; NaN if labels and images are not matched."""
    fit: float | None = None
    """Distance between the gradient at this reconstruction and the observed one, divided by that of a grey sample; set
    after the attack (`rayfed.attacks.fit`)."""
    fits: Tensor | None = None
    """The same distance for each part of the gradient, (P,), with small values weighted nearly as much as large."""
    nats: float | None = None
    """Decrease of the log-likelihood (nats) of a noisy update at this reconstruction, compared with no noise."""
    trace: list[tuple[int, float]] = field(default_factory=list)
    """(iteration, objective) pairs."""
    snapshots: tuple[tuple[int, Tensor], ...] = ()
    """(iteration, first few of `images` at that iteration) of the chosen restart, the last as returned; empty for
    closed forms."""
    iterations: int = 0
    seconds: float = 0.0
    """Wall time of the batched call divided by its number of observations."""
    status: Literal["ok", "diverged", "not applicable", "failed"] = "ok"
    message: str = ""
    """Reason why the status is not ok, or the information that the attacker lacked; shown in the report."""
    reason: Reason | None = None
    """Set if the channel hides the update, or if another attack may reveal more; verdicts depend on it."""
    inherent: bool = False
    """Whether an attack with status "not applicable" is so for every update of this model and batch size, with any
    attacker knowledge."""
    notes: tuple[str, ...] = ()
    """Messages for the run's log; they do not affect the result."""


@runtime_checkable
class Attack(Protocol):
    """An attack that reconstructs samples: a frozen dataclass whose fields are the scenario's parameters.

    Optional class variables:

    - `reads_update = False`: the attack ignores the update, so encryption does not stop it.
    - `needs_classes = True`: the attack is not applicable to numeric labels.
    - `place_labels`: the attack supports one label per position (`Observation.has_places`). "given" if it needs these
      labels, else "unneeded".
    """

    def reconstruct(
        self, observations: Sequence[Observation], model: nn.Module, generators: Sequence[torch.Generator]
    ) -> list[Reconstruction]:
        """Return one reconstruction for each observation, in order.

        `model` is the architecture in the clients' training or evaluation mode; ignore its weights. All observations
        share the weights that were sent; batch sizes may differ. `generators[i]` is the only source of randomness for
        observation i, so its result does not depend on the other observations in the call.
        """
        ...


@runtime_checkable
class Checked(Protocol):
    """An attack that can check, before a run, whether a model and samples are supported."""

    def check(self, model: nn.Module, sample: SampleSpec, classes: int) -> None:
        """Raise `UserError` if the attack does not support this model or these samples."""
        ...


InferenceMetric = Literal["auc", "accuracy", "class_share"]


@dataclass(frozen=True)
class Inference:
    """Result of an attack that infers a fact about a victim's data without reconstructing samples."""

    metric: InferenceMetric
    """`auc`: area under the ROC curve of the candidates' scores. `accuracy`: of predicting whether class `label` is in
    the batch. `class_share`: share of `images` that a classifier of the test data assigns to class `label`."""
    scores: Tensor = field(default_factory=lambda: torch.empty(0))
    """`auc`: (M,) one for each candidate, higher for members. `accuracy`: (1,) the probability that the class is in the
    batch."""
    control: Tensor | None = None
    """`auc`: (M,) scores of the same candidates on an update of other samples; None without a control."""
    images: Tensor = field(default_factory=lambda: torch.empty(0))
    """`class_share`: (G, C, H, W) in [0, 1]."""
    label: int = -1
    """The target class, -1 for none."""
    chance: float = 0.5
    """Expected value of the metric without an observation."""
    seconds: float = 0.0
    status: Literal["ok", "diverged", "not applicable", "failed"] = "ok"
    message: str = ""
    """Reason why the status is not ok, or the information that the attacker lacked; shown in the report."""
    reason: Reason | None = None
    """Set if the channel hides the update, or if another attack may reveal more; verdicts depend on it."""
    inherent: bool = False
    """Whether an attack with status "not applicable" is so for every update of this model and batch size, with any
    attacker knowledge."""
    notes: tuple[str, ...] = ()
    """Messages for the run's log; they do not affect the result."""


Guess = Reconstruction | Inference
"""Result of an attack of either kind."""


@runtime_checkable
class InferenceAttack(Protocol):
    """An attack that infers a fact about a victim's data without reconstructing samples: a frozen dataclass."""

    metric: ClassVar[InferenceMetric]
    """Metric of the inferences."""

    def infer(
        self, observations: Sequence[Observation], model: nn.Module, generators: Sequence[torch.Generator]
    ) -> list[Inference]:
        """Return one inference for each observation, in order; the arguments are those of `Attack.reconstruct`."""
        ...


@runtime_checkable
class MaliciousServer(Protocol):
    """An attack by a server that breaks the protocol and sends its victims a modified model."""

    def tamper(
        self,
        model: nn.Module,
        weights: Named,
        buffers: Named,
        image_shape: tuple[int, ...],
        extra: Mapping[str, Any],
        generator: torch.Generator,
    ) -> tuple[nn.Module, Named, Named]:
        """Return the modified model, weights and buffers to send to victims, without changing the arguments.

        The result must depend only on the arguments. Tensors that never leave a client (`rayfed.models.private`) are
        not passed: `model` holds random values for them, and returned values are ignored. `extra` holds the public
        data if they are granted. The observation contains the modified weights and buffers, so `reconstruct` can use
        them.
        """
        ...


class NotApplicable(Exception):
    """Exception for an attack that turns out not to apply to an observation; the message gives the reason."""

    def __init__(self, message: str, inherent: bool = False) -> None:
        super().__init__(message)
        self.inherent = inherent
        """See `Reconstruction.inherent`."""


def not_applicable(observation: Observation, message: str, inherent: bool = False) -> Reconstruction:
    """Return a result with status "not applicable": blank samples with label 0."""
    return Reconstruction(
        images=observation.sample.blank(observation.batch_size),
        labels=torch.zeros(observation.batch_size, dtype=torch.int64),
        status="not applicable",
        message=message,
        inherent=inherent,
    )


def check_form(results: Sequence[Any], observations: Sequence[Observation]) -> None:
    """Raise `ValueError` unless an attack's `results` are one reconstruction of the right shape per observation."""
    if len(results) != len(observations):
        raise ValueError(
            f"the attack returned {len(results)} results for {len(observations)} observations: return one for each"
        )
    for result, observation in zip(results, observations, strict=True):
        if not isinstance(result, Reconstruction):
            raise ValueError(f"the attack returned a {type(result).__name__}: return a Reconstruction")
        if result.status in ("not applicable", "failed"):
            continue
        expected = observation.batch_size, *observation.sample.shape
        if tuple(result.images.shape) != expected:
            raise ValueError(f"the attack returned images of shape {tuple(result.images.shape)}, expected {expected}")
        if len(result.labels) != observation.batch_size:
            raise ValueError(f"the attack returned {len(result.labels)} labels for {observation.batch_size} samples")


def failed(method: Attack | InferenceAttack, message: str) -> Guess:
    """Return an empty result with status "failed" for an attack that did not finish."""
    if isinstance(method, InferenceAttack):
        return Inference(metric=method.metric, status="failed", message=message)
    return Reconstruction(torch.empty(0), torch.empty(0, dtype=torch.int64), status="failed", message=message)
