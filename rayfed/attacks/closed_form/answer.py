"""The frame of a closed form: the model's probe and labels in, images and their distance from the gradient out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from rayfed.attacks.base import NotApplicable, Reconstruction, not_applicable
from rayfed.attacks.closed_form.probe import Probe, probe
from rayfed.attacks.closed_form.weight_norm import without_weight_norm
from rayfed.attacks.groups import in_groups
from rayfed.attacks.labels import filled, with_labels
from rayfed.attacks.remembered import once
from rayfed.gradients import flatten
from rayfed.losses import BinaryCrossEntropy, OwnLoss
from rayfed.update import Named, Observation

_NEWTON_STEPS, _WAY = 5, 1e-3
"""Steps to numbers under a loss whose gradient is not affine in them, and the difference by which slopes are taken."""
_MOST_CLASSES = 100
"""Number of classes up to which the label of a single sample is found by trying them all."""
_SAME, _TINY = 1e-3, 1e-6
"""Relative difference up to which two values are the same, and size beside the largest from which on they count."""


Find = Callable[[Probe, Observation, torch.Generator], Reconstruction]
"""A closed form on one observation."""


def studied(
    find: Find, observations: Sequence[Observation], model: nn.Module, generators: Sequence[torch.Generator]
) -> list[Reconstruction]:
    """Return what a closed form finds in each observation, on one probe of the model for all of a kind.

    The probe is kept for the attacker's other closed forms on such batches. Where labels that this one asks for
    (`labelled`) cannot be read, the results say why. A model with weight norm is studied without it.
    """
    model, observations = without_weight_norm(model, observations)

    def attack(group: Sequence[Observation], own: Sequence[torch.Generator]) -> list[Reconstruction]:
        one = group[0]
        kind = one.sample, one.classes, one.has_numbers, one.has_places, one.batch_size
        probed = once("probe", kind, one, partial(probe, model, one), most=1)
        with probed.reading(partial(_labelled, group, model)):
            return [_found(find, probed, *one) for one in zip(group, own, strict=True)]

    return in_groups(attack, observations, generators)


def _found(find: Find, probed: Probe, observation: Observation, generator: torch.Generator) -> Reconstruction:
    """Return the result of a closed form on one observation, independent of the other observations."""
    if not observation.update:
        return not_applicable(observation, "the update is empty")
    try:
        return find(probed, observation, generator)
    except NotApplicable as reason:
        return not_applicable(observation, str(reason), reason.inherent)


def labelled(
    find: Callable[[Probe, Observation], Reconstruction], probed: Probe, observation: Observation
) -> Reconstruction:
    """Return what a closed form finds with labels, which are read off the gradient where they are not given.

    The observation is the one that `studied` gave. Where labels cannot be read, the message says why. To read a batch's
    takes many passes of the model, so a closed form asks for them where it is known to apply.
    """
    read: Mapping[int, tuple[Observation, str]] = probed.read_labels()
    own, unread = read[id(observation)]
    try:
        found = find(probed, own)
    except NotApplicable as reason:
        found = not_applicable(observation, str(reason), reason.inherent)
    return replace(found, message="; ".join(filter(None, (found.message, unread))))


def _labelled(group: Sequence[Observation], model: nn.Module) -> dict[int, tuple[Observation, str]]:
    """Return, by identity, observations with labels, and the reason why they could not be read, empty if they were."""
    try:
        return {id(one): (read, "") for one, read in zip(group, with_labels(group, model), strict=True)}
    except Exception as error:  # whatever a user's own model raises on samples it was not made for
        if len(group) > 1:
            return {name: read for one in group for name, read in _labelled([one], model).items()}
        return {
            id(group[0]): (
                group[0],
                f"labels could not be read ({type(error).__name__}: {str(error).partition(chr(10))[0]})",
            )
        }


def distance(probe: Probe, observation: Observation, images: Tensor, labels: Tensor, scaled: bool = True) -> float:
    """Return how far the gradient at some samples is from the observed one, relatively: 0 for the true samples.

    Observed values that are not finite are left out. Not `scaled`, both count by their direction alone, as of a loss
    that may be a sum or a mean: the sine of the angle.
    """
    found = probe.gradient(images, labels)
    own_square = both = observed_square = torch.zeros((), dtype=torch.float64, device=probe.device)
    for own, observed in _pairs(found, observation, probe):
        own_square, both = own_square + own @ own, both + own @ observed
        observed_square = observed_square + observed @ observed
    factor = torch.ones_like(both) if scaled else (both / own_square).clamp(min=0)
    left = sum((factor * own - observed).square().sum() for own, observed in _pairs(found, observation, probe))
    return float((left / observed_square).sqrt())


def _pairs(found: Named, observation: Observation, probe: Probe) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the values of each tensor of a gradient beside those observed ones that are finite."""
    for name, tensor in observation.gradient.items():
        observed = tensor.to(probe.dtype).flatten()
        finite = observed.isfinite()
        yield found[name].flatten()[finite], observed[finite]


def agreement(probe: Probe, observation: Observation, images: Tensor, labels: Tensor) -> tuple[float, float]:
    """Return how far the values that were sent are those of the gradient at some samples: a share and a distance.

    The share is that of its values that were sent as they are, 0 where the gradient is not finite. The distance is the
    sum of the absolute differences from the gradient, times the best factor, over that of the values: noise on some of
    them, however large, hides little of how well the others fit. Values that are 0 or not finite were left out.
    """
    found = probe.gradient(images, labels)
    sent: Named = {name: tensor.to(probe.dtype) for name, tensor in observation.gradient.items()}
    own, observed = flatten({name: found[name] for name in sent}), flatten(sent)
    kept = observed.isfinite() & (observed != 0)
    own, observed = own[kept], observed[kept]
    ratios, order = (observed / own)[own != 0].sort()
    if not len(ratios) or not own.isfinite().all():
        return 0.0, 1.0
    counted = own.abs() > _TINY * own.abs().max()
    same = ((own - observed).abs() <= _SAME * own.abs())[counted].double().mean()
    shares = own[own != 0].abs()[order].cumsum(0)
    factor = ratios[torch.searchsorted(shares, shares[-1] / 2)].clamp(min=0)
    return float(same), float((factor * own - observed).abs().sum() / observed.abs().sum())


def fitted_numbers(probe: Probe, observation: Observation, images: Tensor) -> Tensor:
    """Return the labels (N, K) at which images have the observed gradient, in least squares.

    A gradient is affine in labels under binary cross entropy and squared error, and one step is exact; of a loss of the
    user's own more are made.
    """
    sent = {name: tensor.to(probe.dtype) for name, tensor in observation.gradient.items()}
    observed = flatten(sent)
    finite = observed.isfinite()

    def at(labels: Tensor) -> Tensor:
        found = probe.gradient(images, labels)
        return flatten({name: found[name] for name in sent})[finite]

    labels = probe.blank(observation.batch_size).to(probe.device)
    for _ in range(_NEWTON_STEPS if isinstance(probe.loss, OwnLoss) else 1):
        origin = at(labels)
        ways = _WAY * torch.eye(labels.numel()).to(labels).reshape(-1, *labels.shape)
        slopes = torch.stack([(at(labels + way) - origin) / _WAY for way in ways], 1)
        labels = labels + (torch.linalg.pinv(slopes) @ (observed[finite] - origin)).view_as(labels)
    return (labels.clamp(0, 1) if isinstance(probe.loss, BinaryCrossEntropy) else labels).float().cpu()


def answer(probe: Probe, observation: Observation, images: Tensor, aligned: bool) -> Reconstruction:
    """Return images (N, *shape) as a reconstruction, whose `loss` is the `distance` of its gradient, not scaled.

    Unless the labels are `aligned` with the images, as that of a single sample is, the loss stays NaN; so it does where
    they are of each place and were not given.
    """
    images = images.reshape(observation.batch_size, *observation.sample.shape)
    if (
        images.is_floating_point() and observation.extra.get("as_trained") is None
    ):  # of which the samples themselves are made later
        images = images.clamp(0, 1)
    if observation.labels is None and observation.has_numbers:
        observation, aligned = replace(observation, labels=fitted_numbers(probe, observation, images)), True
    few = observation.classes <= _MOST_CLASSES and not observation.has_places
    if observation.labels is None and observation.batch_size == 1 and few:
        classes = torch.arange(observation.classes)
        nearest = min(classes, key=lambda c: distance(probe, observation, images, c.reshape(1), scaled=False))
        observation = replace(observation, labels=nearest.reshape(1))
    labels = observation.labels
    if labels is None:
        labels, aligned = torch.zeros(observation.batch_size, dtype=torch.int64), False
    loss = distance(probe, observation, images, labels, scaled=False) if aligned else float("nan")
    images = images.float() if images.is_floating_point() else images
    return Reconstruction(images=images.cpu(), labels=labels.cpu(), loss=loss)


def nothing_found(observation: Observation, message: str) -> Reconstruction:
    """Return grey samples, for a closed form that applies but finds nothing in this observation.

    It has diverged where it looked and nothing fits, and failed where the gradient is not finite: that hides nothing
    from an attacker who leaves out what is no number.
    """
    labels = filled(observation).labels if observation.has_numbers else observation.labels
    finite = all(tensor.isfinite().all() for tensor in observation.gradient.values())
    return Reconstruction(
        images=observation.sample.blank(observation.batch_size) + 0.5,
        labels=torch.zeros(observation.batch_size, dtype=torch.int64) if labels is None else labels.cpu(),
        status="diverged" if finite else "failed",
        message=message,
    )
