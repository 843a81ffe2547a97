"""Define the losses that clients minimise: built-in ones, the user's components, and functions of outputs and targets.

A loss is attached to its model (`attach_loss`), so training, evaluation and attacks use the same one. Targets have one
of these forms:

- classes (N,) int64, their probabilities (N, K), or words (N, L) int64;
- numbers (N, k) float, one per output of the model: 0 and 1 for several labels, any number for regression;
- a class for each place of a sample, (N, L) or (N, H, W) int64, such as the text's tokens for language models.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isclose
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.linalg import vector_norm
from torch.nn import functional as F

from rayfed import registry
from rayfed.core import objective
from rayfed.core.objective import NO_TARGET
from rayfed.errors import UserError
from rayfed.registry import component
from rayfed.samples import SampleSpec, Tokens

TABLE = {
    "cross_entropy": "rayfed.core.losses:CrossEntropy",
    "binary_cross_entropy": "rayfed.core.losses:BinaryCrossEntropy",
    "mean_squared_error": "rayfed.core.losses:MeanSquaredError",
    "place_cross_entropy": "rayfed.core.losses:PlaceCrossEntropy",
    "causal_lm": "rayfed.core.losses:CausalLM",
    "masked_lm": "rayfed.core.losses:MaskedLM",
}

Reduction = Literal["mean", "sum", "none"]


@component
class Loss(ABC):
    """Base class of all losses. The loss of a batch is the mean of its samples' losses."""

    takes: ClassVar[Literal["classes", "numbers", "places", "tokens", "either"]]
    """Targets that the loss takes. For `numbers`, classes are converted. `places` are a class for each place of a
    sample. `tokens` are the text's own tokens; labels of the data are ignored."""

    @abstractmethod
    def per_sample(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Compute each sample's loss (N,) from the model's outputs (N, K) and targets."""

    def __call__(self, outputs: Tensor, targets: Tensor, reduction: Reduction = "mean") -> Tensor:
        """Return a batch's mean loss, a scalar. With the reduction `none`, return the loss of each sample, (N,)."""
        losses = self.per_sample(outputs, targets)
        return losses if reduction == "none" else losses.sum() if reduction == "sum" else losses.mean()

    def predicted(self, outputs: Tensor) -> Tensor:
        """Convert model outputs (..., K) to predictions, such as probabilities. Default: return the outputs."""
        return outputs

    def right(self, outputs: Tensor, targets: Tensor) -> Tensor | None:
        """Return each sample's share of correctly predicted labels, (N,). None if targets are numbers."""
        return None if targets.is_floating_point() else objective.are_correct(outputs, targets)

    def error(self, outputs: Tensor, targets: Tensor) -> Tensor | None:
        """Return each sample's mean absolute error, (N,). None if targets are not numbers."""
        return None

    def tokens(self, targets: Tensor) -> Tensor | None:
        """Return the number of predicted tokens of each text, (N,), for perplexity. None for other losses."""
        return None

    def overlap(self, outputs: Tensor, targets: Tensor) -> Tensor | None:
        """Return each class's intersection and union in pixels (for the IoU), summed over the samples, (2, K).

        None if targets are not masks.
        """
        return None

    def presented(
        self, inputs: Tensor, targets: Tensor, sample: SampleSpec, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Return the inputs and targets that the model sees in a round, such as masked texts. Default: unchanged."""
        return inputs, targets

    def original(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the original samples, given the inputs and targets that `presented` returned."""
        return inputs

    def residuals(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the derivative of each sample's loss with respect to its outputs, (N, K) float64."""
        moving = outputs.detach().double().requires_grad_()
        with torch.enable_grad():
            slopes: Tensor = torch.autograd.grad(self(moving, targets, "sum"), moving)[0]
        return slopes.nan_to_num()


@component
class CrossEntropy(Loss):
    """Cross entropy of classes in nats, or connectionist temporal classification (CTC) if labels are words."""

    takes: ClassVar[Literal["classes"]] = "classes"

    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of each label that is spread evenly over all classes (Szegedy et al. 2016, section 7)."""

    def per_sample(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Compute each sample's loss (N,), with targets that are classes (N,), probabilities (N, K) or words (N, L)."""
        return self(outputs, targets, "none")

    def __call__(self, outputs: Tensor, targets: Tensor, reduction: Reduction = "mean") -> Tensor:
        """Return a batch's mean loss, a scalar. With the reduction `none`, return the loss of each sample, (N,)."""
        return objective.loss(outputs, targets, reduction, self.label_smoothing)

    def predicted(self, outputs: Tensor) -> Tensor:
        """Convert outputs to the probabilities of the classes, (..., K)."""
        return outputs.softmax(-1)

    def residuals(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return each loss's derivative with respect to the outputs (probabilities minus labels), (N, K) float64."""
        labels = F.one_hot(targets, outputs.shape[1]).double()
        if self.label_smoothing:
            labels = torch.lerp(labels, torch.full_like(labels, 1 / labels.shape[1]), self.label_smoothing)
        return outputs.double().softmax(1).nan_to_num() - labels


@component
class BinaryCrossEntropy(Loss):
    """Binary cross entropy of the outputs' sigmoids in nats, averaged over the outputs.

    With two classes, the model has one output for the second class. With more classes or labels, it has one output
    each.
    """

    takes: ClassVar[Literal["numbers"]] = "numbers"

    def per_sample(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Compute each sample's loss (N,) from outputs (N, k) and targets (N, k) in [0, 1]."""
        return F.binary_cross_entropy_with_logits(outputs, targets.to(outputs), reduction="none").mean(1)

    def predicted(self, outputs: Tensor) -> Tensor:
        """Return the probability of each output, its sigmoid."""
        return outputs.sigmoid()

    def right(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return each sample's share of correctly predicted labels at a threshold of 0.5, (N,)."""
        return ((outputs > 0) == (targets > 0.5)).double().mean(1)


@component
class MeanSquaredError(Loss):
    """Squared error, averaged over the outputs, for regression."""

    takes: ClassVar[Literal["numbers"]] = "numbers"

    def per_sample(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Compute each sample's loss (N,) from outputs (N, k) and targets (N, k)."""
        return (outputs - targets.to(outputs)).square().mean(1)

    def error(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return each sample's mean absolute error, (N,)."""
        return (outputs - targets.to(outputs)).abs().mean(1)


@component
class PlaceCrossEntropy(Loss):
    """Cross entropy in nats of a class per position (a token's tag, a pixel's class), averaged over positions.

    All samples have the same weight. Places with target -100 are ignored. Attacks that reconstruct masks may give
    targets as class probabilities at each pixel, (N, K, H, W).
    """

    takes: ClassVar[Literal["places", "tokens"]] = "places"

    def per_sample(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Compute each sample's loss (N,) from outputs (N, L, K) or (N, K, H, W), with targets (N, L) or (N, H, W)."""
        if targets.is_floating_point():
            return F.cross_entropy(outputs, targets, reduction="none").flatten(1).mean(1)
        scores, targets = objective.reshape_by_place(*self.aligned(outputs, targets))
        flat = F.cross_entropy(scores.flatten(0, 1), targets.flatten(), ignore_index=NO_TARGET, reduction="none")
        return flat.view_as(targets).sum(1) / (targets != NO_TARGET).sum(1).clamp(min=1)

    def aligned(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return outputs and targets aligned by position: each output predicts the target at the same position."""
        return outputs, targets

    def predicted(self, outputs: Tensor) -> Tensor:
        """Convert outputs to the probabilities of the classes, (..., K)."""
        return outputs.softmax(-1)

    def right(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return each sample's share of correctly predicted positions, (N,)."""
        return objective.correct_places(*self.aligned(outputs, targets))

    def overlap(self, outputs: Tensor, targets: Tensor) -> Tensor | None:
        """Return each class's intersection and union in pixels, (2, K). None for texts."""
        return objective.count_overlap(outputs, targets) if targets.ndim == 3 else None


@component
class CausalLM(PlaceCrossEntropy):
    """Causal language modelling: cross entropy in nats of each token given the tokens before it, averaged over a text.

    Needs no labels. Padding is ignored. All texts have the same weight, whatever their length.
    """

    takes: ClassVar[Literal["tokens"]] = "tokens"

    def aligned(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs (N, L - 1, K) without the last position, and the token after each position (N, L - 1)."""
        return outputs[:, :-1], targets[:, 1:]

    def tokens(self, targets: Tensor) -> Tensor:
        """Return the number of predicted tokens of each text, (N,)."""
        return (targets[:, 1:] != NO_TARGET).sum(1)


@component
class MaskedLM(PlaceCrossEntropy):
    """Masked language modelling: cross entropy in nats of the selected tokens, averaged over a text.

    Every client selects new tokens in each round. Selected tokens become the mask (80 %), a random token (10 %) or stay
    (10 %). At least one token per text is selected, unlike in the paper, so that every text has a loss.
    Source: Devlin et al. 2019, "BERT", section 3.1.
    """

    takes: ClassVar[Literal["tokens"]] = "tokens"

    share: Annotated[float, Field(gt=0, lt=1)] = 0.15
    """Probability that a token is selected; special tokens never are."""

    def tokens(self, targets: Tensor) -> Tensor:
        """Return the number of predicted tokens of each text, (N,)."""
        return (targets != NO_TARGET).sum(1)

    def presented(
        self, inputs: Tensor, targets: Tensor, sample: SampleSpec, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Return texts with randomly selected tokens masked, and the selected tokens as targets."""
        assert isinstance(sample, Tokens)
        assert sample.mask is not None
        order = torch.rand(inputs.shape, generator=generator)
        kind = torch.rand(inputs.shape, generator=generator)
        other = torch.randint(sample.largest + 1, inputs.shape, generator=generator)
        order, kind, other = (drawn.to(inputs.device) for drawn in (order, kind, other))
        order = order.masked_fill(torch.isin(inputs, inputs.new_tensor(sample.unmasked)), torch.inf)
        drawn = ((order < self.share) | (order == order.amin(1, keepdim=True))) & order.isfinite()
        shown = torch.where(kind < 0.8, sample.mask, torch.where(kind < 0.9, other, inputs))
        return torch.where(drawn, shown, inputs), targets.masked_fill(~drawn, NO_TARGET)

    def original(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the texts with the masks replaced by the original tokens, which are the targets."""
        return torch.where(targets == NO_TARGET, inputs, targets)


@dataclass(frozen=True)
class OwnLoss(Loss):
    """A user's loss function of outputs (N, ...) and targets, which returns one loss per sample or the mean loss."""

    takes: ClassVar[Literal["either"]] = "either"

    name: str
    function: Callable[[Tensor, Tensor], Tensor]
    parameters: Mapping[str, Any]

    def per_sample(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return each sample's loss (N,). Functions that return only the mean are called once per sample."""
        losses = self._value(outputs, targets)
        if losses.ndim:
            return losses.flatten(1).mean(1) if losses.ndim > 1 else losses
        return torch.stack([self._value(outputs[i : i + 1], targets[i : i + 1]) for i in range(len(outputs))])

    def __call__(self, outputs: Tensor, targets: Tensor, reduction: Reduction = "mean") -> Tensor:
        """Return a batch's mean loss, a scalar. With the reduction `none`, return the loss of each sample, (N,)."""
        if reduction == "mean":
            return self._value(outputs, targets).mean()
        return super().__call__(outputs, targets, reduction)

    def right(self, outputs: Tensor, targets: Tensor) -> Tensor | None:
        """Return each sample's share of correctly predicted labels, (N,). None if targets are numbers."""
        return (
            objective.correct_places(outputs, targets)
            if targets.ndim > 1 and not targets.is_floating_point()
            else (super().right(outputs, targets))
        )

    def overlap(self, outputs: Tensor, targets: Tensor) -> Tensor | None:
        """Return each class's intersection and union in pixels, (2, K). None if targets are not masks."""
        masks = targets.ndim == 3 and not targets.is_floating_point() and outputs.ndim == 4
        return objective.count_overlap(outputs, targets) if masks else None

    def error(self, outputs: Tensor, targets: Tensor) -> Tensor | None:
        """Return each sample's mean absolute error (N,) of the outputs. None if targets are not numbers."""
        return (outputs - targets).abs().mean(1) if targets.is_floating_point() else None

    def _value(self, outputs: Tensor, targets: Tensor) -> Tensor:
        targets = targets.to(outputs.dtype) if targets.is_floating_point() else targets
        return self.function(outputs, targets, **self.parameters)

    def _slope(self, outputs: Tensor, targets: Tensor, shares: Tensor) -> Tensor:
        """Return the gradient of the losses (N,), weighted by `shares` (N,), with respect to the outputs.

        Unequal shares reveal functions that mix samples but keep their mean.
        """
        moving = outputs.detach().requires_grad_()
        losses = self._value(moving, targets)
        loss = losses.reshape(len(shares), -1).mean(1) @ shares if losses.ndim else losses * shares.sum()
        return torch.autograd.grad(loss, moving, materialize_grads=True)[0] if loss.requires_grad else moving * 0

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Test the user's function on some samples. Raises `UserError` if a batch's loss is not its samples' mean loss.

        Functions that behave differently on other samples are not detected.
        """
        try:
            value = self._value(outputs, targets)
            if not isinstance(value, Tensor) or (value.ndim and len(value) != len(outputs)):
                raise UserError(
                    f"loss '{self.name}' returns {_described(value)} for {len(outputs)} samples: return their mean "
                    f"loss (a scalar) or one loss per sample"
                )
            shares = outputs.new_full((len(outputs),), 1 / len(outputs))
            shares = shares * torch.linspace(0.5, 1.5, len(outputs)) if value.ndim else shares
            slope = self._slope(outputs, targets, shares)
            parts = [(outputs[i : i + 1], targets[i : i + 1]) for i in range(len(outputs))]
            alone = torch.stack([self(*part).detach() for part in parts])
            slopes = [self._slope(*part, share) for part, share in zip(parts, shares.split(1), strict=True)]
            again = self._slope(outputs, targets, shares)
        except UserError:
            raise
        except Exception as error:  # the user's code may raise anything
            raise UserError(
                f"loss '{self.name}' fails on outputs {tuple(outputs.shape)} and targets {tuple(targets.shape)} "
                f"{str(targets.dtype).removeprefix('torch.')}: {type(error).__name__}: {error}"
            ) from error
        if not slope.any():
            raise UserError(
                f"loss '{self.name}' has a zero gradient, so the model cannot learn: use the outputs in "
                f"a differentiable way"
            )
        if not torch.equal(slope, again):
            raise UserError(
                f"loss '{self.name}' gives different gradients for the same outputs and targets: the function must not "
                f"use random numbers or remember earlier calls"
            )
        together, apart = float(value.detach().mean()), float(alone.mean())
        coupled = vector_norm(slope - torch.cat(slopes)) > 1e-3 * vector_norm(slope)
        if coupled or not isclose(together, apart, rel_tol=1e-3, abs_tol=1e-6):
            raise UserError(
                f"loss '{self.name}' returns {together:g} for a batch of {len(outputs)} samples, but {apart:g} as the "
                f"mean over single samples: return the mean loss of the batch's samples"
            )


def _described(value: Any) -> str:
    return f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def make_loss(name: str, parameters: Mapping[str, Any]) -> Loss:
    """Build a loss from a built-in name or the dotted path of a component, a function or a class of functions.

    Raises `UserError` for an unknown name, and if the class cannot be called with the parameters.
    """
    target = registry.find("losses", name)
    if isinstance(target, type) and issubclass(target, Loss):
        found: Loss = registry.build("losses", name, parameters)
        return found
    if not callable(target):
        raise UserError(f"loss '{name}' is a {type(target).__name__}; expected a function of outputs and targets")
    if not isinstance(target, type):
        return OwnLoss(name, target, dict(parameters))
    try:  # such as torch.nn:HuberLoss
        return OwnLoss(name, target(**parameters), {})
    except Exception as error:
        raise UserError(f"loss '{name}' cannot use the parameters {dict(parameters)}: {error}; correct them") from error


DEFAULT = CrossEntropy()


def attach_loss(model: nn.Module, loss: Loss) -> None:
    """Set the loss that a model is trained with, in place. Copies of the model keep the loss."""
    model.rayfed_loss = loss  # type: ignore[assignment]  # not a tensor or module, so it is not sent


def get_loss(model: nn.Module) -> Loss:
    """Return the loss that was set on a model by `attach_loss`. Default: cross entropy."""
    found: Loss = getattr(model, "rayfed_loss", DEFAULT)
    return found
