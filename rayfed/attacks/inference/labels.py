"""Recover labels from a gradient: how often each class occurs in a batch.

With mean cross entropy over N samples, the gradient gives the mean residual of class k
(`rayfed.attacks.closed_form.head`), g_k = mean_i(p_ik) - n_k / N. Here p_ik is the predicted probability of class k for
sample i, and n_k the count of the class. One sample's class follows directly. For a batch, p is unknown, and only the
few errors of a trained model contribute to the gradient. So the counts are estimated by linear regression
(`label_shares`), trained on the attacker's own samples (`own_samples`). If their gradients say nothing about labels,
the counts follow the shares in these samples.

Labels are sure if the estimated counts are close to integers. Otherwise, an attack that can fit soft labels is run
twice: with the likeliest labels and with soft labels. The smaller objective decides (`fits_labels`).

Sources: Zhao et al. 2020, "iDLG" (one sample);
Wainakh et al. 2022, "User-Level Label Leakage from Gradients in Federated Learning" (LLG, counts); Ma et al. 2023,
"Instance-wise Batch Label Restoration via Gradients in Federated Learning" (weight rows beside biases).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, wraps
from math import isfinite
from typing import NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rayfed.attacks.base import Attack, Reconstruction
from rayfed.attacks.closed_form.head import Head
from rayfed.attacks.inference.label_shares import estimated_shares
from rayfed.attacks.own_samples import own_samples
from rayfed.attacks.remembered import once
from rayfed.core import losses
from rayfed.core.objective import NO_TARGET
from rayfed.gradients import norm
from rayfed.update import Named, Observation

_SHOWN = 400
"""Maximum number of features taken from a gradient: products of residuals and features, over all classes."""
_OFF = 0.25
"""Maximum distance of a sure count from an integer, and maximum standard deviation of a count, in samples."""
_PROVEN = 3
"""Standard deviations of the noise by which a residual must be negative to prove that its class occurs."""

_LEAST = 0.05
"""Residual of an output, between -1 and 1, below which noise may have changed its sign."""

_UNSURE = "the update does not determine the labels with certainty"
_FITTED = "soft labels were fitted with the samples"
_FITTED_PLACES = "labels per position were not given: soft labels were fitted with the samples"
_TAKEN = "the likeliest labels were used, which matched better than fitted soft labels"

Reconstruct = TypeVar("Reconstruct", bound=Callable[..., list[Reconstruction]])


def last_linear(tensors: Named, classes: int) -> str | None:
    """Return the path of the module whose weight is the last matrix with `classes` rows, or None."""
    names = [
        n for n, t in tensors.items() if t.ndim == 2 and t.shape[0] == classes and n.rpartition(".")[2] == "weight"
    ]
    return names[-1].rpartition(".")[0] if names else None


class Labels(NamedTuple):
    """Labels recovered from a gradient."""

    numbers: Tensor
    """(N,) int64"""
    sure: bool
    """Whether the labels are reliable; otherwise they are a guess."""


def one_label(cross: Tensor | None, residual: Tensor | None) -> Labels:
    """Return a single sample's label from the residual r (K,), or from r h^T (K, F) with unknown features h.

    The label's entry of r is the only negative one and as large as all others together.
    """
    if residual is None:
        assert cross is not None
        column = torch.linalg.svd(cross.nan_to_num(), full_matrices=False).U[:, 0]
        residual = -column * column[column.abs().argmax()].sign()
    residual = residual.nan_to_num(0, 0, 0)
    label = residual.argmin()
    negative = -residual.clamp(max=0)
    return Labels(label.reshape(1), bool(negative.sum() < (1 + _OFF) * negative[label]))


def counted_labels(expected: Tensor, proven: Tensor, size: int) -> Tensor:
    """Return `size` labels, sorted, (N,) int64, for the expected counts (K,) of the classes.

    Samples are assigned one by one to the class with the largest remainder, to `proven` classes (K,) first.
    """
    remainders, counts = expected.clone(), torch.zeros_like(expected, dtype=torch.int64)
    for _ in range(size):
        missing = proven & (counts == 0)
        open_ = missing if missing.any() else torch.ones_like(proven)
        k = remainders.where(open_, -torch.inf).argmax()
        counts[k] += 1
        remainders[k] -= 1
    return torch.arange(len(counts), device=counts.device).repeat_interleave(counts)


@dataclass(frozen=True)
class OwnProducts:
    """Products of residuals and features for each of the attacker's own samples."""

    basis: Tensor
    """(F, m) directions of the features, with orthonormal columns."""
    unit: float
    """Mean length of the features, used as the weight of the residuals."""
    shown: Tensor
    """(S, M, K, m + 1) products by stage; the last column holds the weighted residuals."""
    labels: Tensor
    """(M, K), one-hot labels of the samples."""

    @classmethod
    def of(cls, head: Head, observation: Observation) -> OwnProducts:
        """Compute the products of residuals and features on the attacker's own samples."""
        stages, numbers = own_samples(head, observation)
        features, logits = head.forward(stages.flatten(0, 1))
        labels = F.one_hot(numbers, observation.classes).double()
        residuals = losses.get_loss(head.model).residuals(logits, numbers.repeat(len(stages)))
        features = residuals[:, :0] if features is None else features.double().nan_to_num(0, 0, 0)
        basis = torch.linalg.svd(features, full_matrices=False).Vh[: _SHOWN // observation.classes].T
        unit = float(features.norm(dim=1).mean()) or 1.0
        directions = torch.cat([features @ basis, residuals.new_full((len(residuals), 1), unit)], 1)
        shown = (residuals[:, :, None] * directions[:, None]).unflatten(0, stages.shape[:2])
        return cls(basis, unit, shown, labels)


@dataclass(frozen=True)
class LabelReader:
    """Recover labels from gradients at the weights that clients were sent."""

    head: Head
    given: Observation
    """Any observation at these weights."""

    @cached_property
    def _own(self) -> OwnProducts:
        what = self.head.layer, self.given.classes
        return once("own products", what, self.given, lambda: OwnProducts.of(self.head, self.given))

    def read(self, observation: Observation) -> Labels:
        """Recover the labels of an observation from the observed gradient."""
        cross, residual = self.head.products(observation.gradient)
        size, smoothed = observation.batch_size, residual
        if residual is not None and (smoothing := getattr(losses.get_loss(self.head.model), "label_smoothing", 0.0)):
            smoothed = residual + smoothing / len(residual)  # undo the constant of label smoothing
        if size == 1:
            return one_label(cross, smoothed)
        own = self._own
        width = own.basis.shape[1]
        parts = [] if cross is None else [cross.double() @ own.basis]
        parts += [] if residual is None else [own.unit * residual.double()[:, None]]
        seen = torch.cat(parts, 1).nan_to_num(0, 0, 0)
        shown = own.shown[..., 0 if cross is not None else width : width if residual is None else width + 1]
        # residuals sum to zero over the classes, so any remaining sum is a defence's noise
        noise = float(seen.sum(0).square().mean()) / len(seen)
        shares, deviations = estimated_shares(shown, own.labels, seen, size, noise)
        proven = torch.zeros_like(shares, dtype=torch.bool)
        if smoothed is not None:
            proven = smoothed < -_PROVEN * noise**0.5 / own.unit
        numbers = counted_labels(size * shares, proven, size)
        off = (size * shares - numbers.bincount(minlength=len(shares))).abs()
        lengths = observation.local.clip_norm is None  # counts need lengths, and clipping preserves only directions
        return Labels(numbers, lengths and bool((torch.maximum(off, size * deviations) < _OFF).all()))


def one_samples_numbers(head: Head, observation: Observation) -> Tensor | None:
    """Infer the binary labels (1, K) of a single sample from the gradient; return None if a label is uncertain.

    The residual of each output is (sigmoid - label) / K, which is negative if the label is 1.
    """
    if observation.batch_size > 1 or not isinstance(losses.get_loss(head.model), losses.BinaryCrossEntropy):
        return None
    _, residual = head.products(observation.gradient)
    if residual is None:
        return None
    sizes = residual.abs() * len(residual)
    told = (sizes > _LEAST) & (sizes <= 1 + _LEAST)  # else a defence changed the residual or its sign is uncertain
    return (residual < 0).float()[None] if bool(told.all()) else None


def filled(observation: Observation) -> Observation:
    """Return the observation with missing labels filled in: NaN for numbers, `NO_TARGET` for labels per position."""
    if observation.labels is not None:
        return observation
    if observation.has_places:
        return replace(observation, labels=torch.full((observation.batch_size,), NO_TARGET))
    return replace(observation, labels=torch.full((observation.batch_size, observation.classes), torch.nan))


def with_labels(observations: Sequence[Observation], model: nn.Module, soft: bool = False) -> list[Observation]:
    """Return the observations with missing labels inferred; all observations of a round share the weights.

    With `soft`, uncertain labels are returned as probabilities (N, K), from which a search can start. Numeric labels
    that do not follow from the gradient and labels per position stay None.
    """
    readers: list[tuple[Observation, LabelReader]] = []

    def reader(seen: Observation) -> LabelReader:
        for known, one in readers:
            buffers = known.buffers
            if known.round == seen.round and all(torch.equal(t, buffers[n]) for n, t in seen.buffers.items()):
                return one
        readers.append((seen, LabelReader(Head.of(model, seen), seen)))
        return readers[-1][1]

    labelled = []
    for observation in observations:
        if observation.has_places:
            pass
        elif observation.labels is None and observation.has_numbers:
            observation = replace(observation, labels=one_samples_numbers(reader(observation).head, observation))
        elif observation.labels is None:
            rounds = [observation, *observation.earlier]
            labels, sure = _agreed([reader(one).read(one) for one in rounds], rounds)
            if soft and not sure:
                labels = F.one_hot(labels, observation.classes).float()
            observation = replace(observation, labels=labels)
        labelled.append(observation)
    return labelled


def _agreed(read: Sequence[Labels], rounds: Sequence[Observation]) -> Labels:
    """Return the labels that agree best with all rounds of a victim, the attacked one first.

    Rounds are weighted by their squared gradient norm. Only sure labels are used if there are any, and rounds with a
    non-finite gradient are ignored.
    """
    norms = torch.stack([norm(one.gradient) for one in rounds]).double()
    sure = norms.isfinite() & torch.tensor([one.sure for one in read], device=norms.device)
    weights = norms.square().where(sure if sure.any() else norms.isfinite(), 0)
    if not weights.sum() > 0:
        return read[0]
    counts = torch.stack([torch.bincount(one.numbers, minlength=rounds[0].classes) for one in read])
    expected = (weights[:, None] * counts).sum(0) / weights.sum()
    numbers = counted_labels(expected, torch.zeros_like(expected, dtype=torch.bool), rounds[0].batch_size)
    off = (expected - numbers.bincount(minlength=len(expected))).abs()
    return Labels(numbers, bool(sure.any() and (off < _OFF).all()))


def needs_labels(reconstruct: Reconstruct) -> Reconstruct:
    """Wrap the `reconstruct` method of an attack that needs labels: infer labels that are not given."""

    @wraps(reconstruct)
    def inferring(
        attack: Attack, observations: Sequence[Observation], model: nn.Module, generators: Sequence[torch.Generator]
    ) -> list[Reconstruction]:
        return reconstruct(attack, [filled(o) for o in with_labels(observations, model)], model, generators)

    return cast(Reconstruct, inferring)


def fits_labels(reconstruct: Reconstruct) -> Reconstruct:
    """Wrap the `reconstruct` method of an attack that can fit labels: infer labels that are not given.

    If inferred labels are uncertain, run the attack with the likeliest and again with soft labels, and return the
    result with the smaller objective.
    """

    @wraps(reconstruct)
    def inferring(
        attack: Attack, observations: Sequence[Observation], model: nn.Module, generators: Sequence[torch.Generator]
    ) -> list[Reconstruction]:
        labelled = with_labels(observations, model, soft=True)
        classes = {i: o.labels for i, o in enumerate(labelled) if o.labels is not None and not o.has_numbers}
        unsure = {i: labels for i, labels in classes.items() if labels.is_floating_point()}
        likeliest = [replace(o, labels=unsure[i].argmax(-1)) if i in unsure else o for i, o in enumerate(labelled)]
        same = [generators[i].clone_state() for i in unsure]  # both runs start from the same images
        found = reconstruct(attack, likeliest, model, generators)
        if unsure:
            fitted = reconstruct(attack, [labelled[i] for i in unsure], model, same)
            for i, soft in zip(unsure, fitted, strict=True):
                found[i] = _better(found[i], soft)
        return [
            replace(one, message="; ".join(filter(None, (one.message, _FITTED_PLACES)))) if _fitted(one, o) else one
            for one, o in zip(found, labelled, strict=True)
        ]

    return cast(Reconstruct, inferring)


def _fitted(found: Reconstruction, observation: Observation) -> bool:
    """Return whether labels per position, which cannot be inferred from a gradient, were fitted."""
    return observation.has_places and observation.labels is None and found.status != "not applicable"


def _better(hard: Reconstruction, soft: Reconstruction) -> Reconstruction:
    """Return the reconstruction with the smaller objective, with a message on the source of its labels."""
    if hard.status == "not applicable":
        return hard
    fitted = isfinite(soft.loss) and not hard.loss <= soft.loss
    kept, how = (soft, _FITTED) if fitted else (hard, _TAKEN)
    message = "; ".join(filter(None, (kept.message, f"{_UNSURE}: {how}")))
    return replace(kept, seconds=hard.seconds + soft.seconds, message=message)
