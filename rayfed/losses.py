"""Losses that clients minimise: built-in ones, the user's own components, and functions of outputs and targets.

A model carries its loss (`attach`, `of`), so whatever trains, evaluates or matches gradients of it takes the same one.
Targets are classes (N,) int64, or their probabilities (N, K), or words (N, L) int64; or numbers (N, k) float, one for
each output of the model: 0 and 1 for several labels, anything else for regression.
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

from rayfed import objective, registry
from rayfed.errors import UserError
from rayfed.registry import component

TABLE = {
    "cross_entropy": "rayfed.losses:CrossEntropy",
    "binary_cross_entropy": "rayfed.losses:BinaryCrossEntropy",
    "mean_squared_error": "rayfed.losses:MeanSquaredError",
}

Reduction = Literal["mean", "sum", "none"]


@component
class Loss(ABC):
    """Base of all losses; the loss of a batch is the mean of its samples'."""

    takes: ClassVar[Literal["classes", "numbers", "either"]]
    """Targets that it takes; labels that are classes are made numbers where it takes nothing else."""

    @abstractmethod
    def per_sample(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return each sample's loss (N,) from outputs (N, K) and targets."""

    def __call__(self, outputs: Tensor, targets: Tensor, reduction: Reduction = "mean") -> Tensor:
        """Return the batch's loss, a scalar, or with `none` each sample's (N,)."""
        losses = self.per_sample(outputs, targets)
        return losses if reduction == "none" else losses.sum() if reduction == "sum" else losses.mean()

    def predicted(self, outputs: Tensor) -> Tensor:
        """Return the numbers that outputs (..., K) predict; by default the outputs themselves."""
        return outputs

    def right(self, outputs: Tensor, targets: Tensor) -> Tensor | None:
        """Return the share of each sample's labels that is predicted right, (N,); None if targets are numbers."""
        return None if targets.is_floating_point() else objective.correct(outputs, targets)

    def error(self, outputs: Tensor, targets: Tensor) -> Tensor | None:
        """Return each sample's mean absolute error (N,); None if targets are not numbers."""
        return None

    def residuals(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the derivative of each sample's loss with respect to its outputs, (N, K) float64."""
        moving = outputs.detach().double().requires_grad_()
        with torch.enable_grad():
            slopes: Tensor = torch.autograd.grad(self(moving, targets, "sum"), moving)[0]
        return slopes.nan_to_num()


@component
class CrossEntropy(Loss):
    """Cross entropy of classes in nats, or connectionist temporal classification where labels are words."""

    takes: ClassVar[Literal["classes"]] = "classes"

    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of each label that is spread evenly over all classes (Szegedy et al. 2016, section 7)."""

    def per_sample(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return each sample's loss (N,); targets are classes (N,), probabilities (N, K) or words (N, L)."""
        return self(outputs, targets, "none")

    def __call__(self, outputs: Tensor, targets: Tensor, reduction: Reduction = "mean") -> Tensor:
        """Return the batch's loss, a scalar, or with `none` each sample's (N,)."""
        return objective.loss(outputs, targets, reduction, self.label_smoothing)

    def predicted(self, outputs: Tensor) -> Tensor:
        """Return the probabilities of the classes, (..., K)."""
        return outputs.softmax(-1)

    def residuals(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the probabilities minus the smoothed labels, (N, K) float64."""
        labels = F.one_hot(targets, outputs.shape[1]).double()
        if self.label_smoothing:
            labels = torch.lerp(labels, torch.full_like(labels, 1 / labels.shape[1]), self.label_smoothing)
        return outputs.double().softmax(1).nan_to_num() - labels


@component
class BinaryCrossEntropy(Loss):
    """Binary cross entropy of the outputs' sigmoids in nats, mean over the outputs: one label, or several at a time.

    Of two classes one output is the probability of the second; of more classes each has an output.
    """

    takes: ClassVar[Literal["numbers"]] = "numbers"

    def per_sample(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return each sample's loss (N,); targets (N, k) are 0 and 1, or between."""
        return F.binary_cross_entropy_with_logits(outputs, targets.to(outputs), reduction="none").mean(1)

    def predicted(self, outputs: Tensor) -> Tensor:
        """Return the outputs' probabilities."""
        return outputs.sigmoid()

    def right(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the share of each sample's labels that is right at a threshold of one half, (N,)."""
        return ((outputs > 0) == (targets > 0.5)).double().mean(1)


@component
class MeanSquaredError(Loss):
    """Squared error, averaged over the outputs, for regression."""

    takes: ClassVar[Literal["numbers"]] = "numbers"

    def per_sample(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return each sample's loss (N,) from targets (N, k)."""
        return (outputs - targets.to(outputs)).square().mean(1)

    def error(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return each sample's mean absolute error (N,)."""
        return (outputs - targets.to(outputs)).abs().mean(1)


@dataclass(frozen=True)
class OwnLoss(Loss):
    """The user's own function of outputs (N, K) and targets: one loss a sample, or their mean."""

    takes: ClassVar[Literal["either"]] = "either"

    name: str
    function: Callable[[Tensor, Tensor], Tensor]
    parameters: Mapping[str, Any]

    def per_sample(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return each sample's loss (N,); a function that gives the mean alone is asked sample by sample."""
        losses = self._value(outputs, targets)
        if losses.ndim:
            return losses.flatten(1).mean(1) if losses.ndim > 1 else losses
        return torch.stack([self._value(outputs[i : i + 1], targets[i : i + 1]) for i in range(len(outputs))])

    def __call__(self, outputs: Tensor, targets: Tensor, reduction: Reduction = "mean") -> Tensor:
        """Return the batch's loss, a scalar, or with `none` each sample's (N,)."""
        if reduction == "mean":
            return self._value(outputs, targets).mean()
        return super().__call__(outputs, targets, reduction)

    def error(self, outputs: Tensor, targets: Tensor) -> Tensor | None:
        """Return each sample's mean absolute error (N,) where targets are numbers, as if outputs were predictions."""
        return (outputs - targets).abs().mean(1) if targets.is_floating_point() else None

    def _value(self, outputs: Tensor, targets: Tensor) -> Tensor:
        targets = targets.to(outputs.dtype) if targets.is_floating_point() else targets
        return self.function(outputs, targets, **self.parameters)

    def _slope(self, outputs: Tensor, targets: Tensor, shares: Tensor) -> Tensor:
        """Return the gradient in the outputs of the losses (N,), weighted by `shares` (N,) or averaged.

        Shares that differ show what couples samples and leaves their mean as it is.
        """
        moving = outputs.detach().requires_grad_()
        losses = self._value(moving, targets)
        loss = losses.reshape(len(shares), -1).mean(1) @ shares if losses.ndim else losses * shares.sum()
        return torch.autograd.grad(loss, moving, materialize_grads=True)[0] if loss.requires_grad else moving * 0

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Try the function on some samples; raises `UserError` unless a batch's loss is the mean of its samples'.

        What is otherwise on other samples than these is not found.
        """
        try:
            value = self._value(outputs, targets)
            if not isinstance(value, Tensor) or (value.ndim and len(value) != len(outputs)):
                raise UserError(
                    f"loss '{self.name}' gives {_described(value)} for {len(outputs)} samples: return a scalar, "
                    f"their mean, or a loss for each of them"
                )
            shares = torch.full_like(outputs[:, 0], 1 / len(outputs))
            shares = shares * torch.linspace(0.5, 1.5, len(outputs)) if value.ndim else shares
            slope = self._slope(outputs, targets, shares)
            parts = [(outputs[i : i + 1], targets[i : i + 1]) for i in range(len(outputs))]
            alone = torch.stack([self(*part).detach() for part in parts])
            slopes = [self._slope(*part, share) for part, share in zip(parts, shares.split(1), strict=True)]
            again = self._slope(outputs, targets, shares)
        except UserError:
            raise
        except Exception as error:  # whatever the user's own code raises
            raise UserError(
                f"loss '{self.name}' fails on outputs {tuple(outputs.shape)} and targets {tuple(targets.shape)} "
                f"{str(targets.dtype).removeprefix('torch.')}: {type(error).__name__}: {error}"
            ) from error
        if not slope.any():
            raise UserError(f"loss '{self.name}' has no slope in the outputs, so nothing would be learnt")
        if not torch.equal(slope, again):
            raise UserError(
                f"loss '{self.name}' gives another slope for the same outputs when it is called again: it must not "
                f"draw numbers nor remember earlier calls"
            )
        together, apart = float(value.detach().mean()), float(alone.mean())
        coupled = vector_norm(slope - torch.cat(slopes)) > 1e-3 * vector_norm(slope)
        if coupled or not isclose(together, apart, rel_tol=1e-3, abs_tol=1e-6):
            raise UserError(
                f"loss '{self.name}' gives {together:g} for {len(outputs)} samples together and {apart:g} in the mean "
                f"alone: a batch's loss has to be the mean of its samples'"
            )


def _described(value: Any) -> str:
    return f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def build(name: str, parameters: Mapping[str, Any]) -> Loss:
    """Return the loss of a name: a built-in one, or the dotted path of a component, function or class of functions.

    Raises `UserError` for the name, and for what cannot be called with its parameters.
    """
    target = registry.find("losses", name)
    if isinstance(target, type) and issubclass(target, Loss):
        found: Loss = registry.build("losses", name, parameters)
        return found
    if not callable(target):
        raise UserError(f"loss '{name}' is a {type(target).__name__}: name a function of outputs and targets")
    if not isinstance(target, type):
        return OwnLoss(name, target, dict(parameters))
    try:  # such as torch.nn:HuberLoss
        return OwnLoss(name, target(**parameters), {})
    except Exception as error:
        raise UserError(f"loss '{name}' failed when called with {dict(parameters)}: {error}") from error


DEFAULT = CrossEntropy()


def attach(model: nn.Module, loss: Loss) -> None:
    """Set the loss of a model, in place; copies of the model have it, too."""
    model.rayfed_loss = loss  # type: ignore[assignment]  # no tensor and no module: nothing of it is sent


def of(model: nn.Module) -> Loss:
    """Return the loss of a model; cross entropy unless another one was attached."""
    found: Loss = getattr(model, "rayfed_loss", DEFAULT)
    return found
