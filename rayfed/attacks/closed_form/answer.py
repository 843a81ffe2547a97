"""Run closed-form attacks: infer missing labels, and convert the solutions of equations to reconstructions."""

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
from rayfed.attacks.inference.labels import filled, with_labels
from rayfed.attacks.remembered import once
from rayfed.core.losses import BinaryCrossEntropy, OwnLoss
from rayfed.gradients import flatten
from rayfed.update import Named, Observation

_NEWTON_STEPS, _WAY = 5, 1e-3
"""Newton steps to numeric labels if the gradient is not affine in them, and the step of finite differences."""
_MOST_CLASSES = 100
"""Maximum number of classes for which the label of a single sample is found by trying all classes."""
_SAME, _TINY = 1e-3, 1e-6
"""Relative difference up to which two values are equal, and minimum size of compared values relative to the largest."""


Find = Callable[[Probe, Observation, torch.Generator], Reconstruction]
"""A closed form for one observation."""


def studied(
    find: Find, observations: Sequence[Observation], model: nn.Module, generators: Sequence[torch.Generator]
) -> list[Reconstruction]:
    """Return a closed form's reconstructions for all observations, with one probe of the model per kind of batch.

    The probe is cached for the attacker's other closed forms. If required labels (`labelled`) cannot be inferred, the
    results' messages give the reason. Weight norm is removed from the model first.
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
        return not_applicable(observation, "the update contains no parameters")
    try:
        return find(probed, observation, generator)
    except NotApplicable as reason:
        return not_applicable(observation, str(reason), reason.inherent)


def labelled(
    find: Callable[[Probe, Observation], Reconstruction], probed: Probe, observation: Observation
) -> Reconstruction:
    """Return a closed form's reconstruction, with labels that are inferred from the gradient if they are not given.

    `observation` must be the object passed by `studied`. If labels cannot be inferred, the message gives the reason.
    Inferring the labels of a batch takes many passes, so call this only after the closed form is known to apply.
    """
    read: Mapping[int, tuple[Observation, str]] = probed.read_labels()
    own, unread = read[id(observation)]
    try:
        found = find(probed, own)
    except NotApplicable as reason:
        found = not_applicable(observation, str(reason), reason.inherent)
    return replace(found, message="; ".join(filter(None, (found.message, unread))))


def _labelled(group: Sequence[Observation], model: nn.Module) -> dict[int, tuple[Observation, str]]:
    """Return the observations with inferred labels by `id`, each with the reason if inference failed, else ""."""
    try:
        return {id(one): (read, "") for one, read in zip(group, with_labels(group, model), strict=True)}
    except Exception as error:  # a user's model can raise anything on samples it was not made for
        if len(group) > 1:
            return {name: read for one in group for name, read in _labelled([one], model).items()}
        return {
            id(group[0]): (
                group[0],
                f"labels could not be inferred ({type(error).__name__}: {str(error).partition(chr(10))[0]})",
            )
        }


def distance(probe: Probe, observation: Observation, images: Tensor, labels: Tensor, scaled: bool = True) -> float:
    """Return the relative distance between a batch's gradient and the observed gradient; 0 for the true samples.

    Observed values that are not finite are ignored. Without `scaled`, only directions count, because the loss may be a
    sum or a mean: the result is then the sine of the angle.
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
    """Yield the computed and observed values of each tensor of a gradient, where the observed ones are finite."""
    for name, tensor in observation.gradient.items():
        observed = tensor.to(probe.dtype).flatten()
        finite = observed.isfinite()
        yield found[name].flatten()[finite], observed[finite]


def agreement(probe: Probe, observation: Observation, images: Tensor, labels: Tensor) -> tuple[float, float]:
    """Return the share of observed gradient values that equal a batch's gradient, and the relative L1 distance.

    The share is 0 if the gradient is not finite. The distance is taken after multiplying the gradient by the best
    factor; it is robust to large noise on some values. Sent values that are 0 or not finite are ignored.
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
    """Return the numeric labels (N, K) for which the images' gradient fits the observed gradient, by least squares.

    One step is exact for binary cross entropy and squared error, whose gradients are affine in the labels. A user's own
    loss takes several steps.
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
    """Return images (N, *shape) as a reconstruction whose `loss` is the sine of the angle between gradients.

    The loss is NaN unless the labels are `aligned` with the images, as for a single sample. It is also NaN if labels
    per position were not given.
    """
    images = images.reshape(observation.batch_size, *observation.sample.shape)
    declared = observation.extra.get("observation_model")
    if images.is_floating_point() and not (declared is not None and declared.changes_data):  # else inverted later
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
    """Return grey samples as the reconstruction of a closed form that applies but found no solution.

    The status is "diverged", or "failed" if the gradient is not finite, because a better attack could ignore values
    that are not finite.
    """
    labels = filled(observation).labels if observation.has_numbers else observation.labels
    finite = all(tensor.isfinite().all() for tensor in observation.gradient.values())
    return Reconstruction(
        images=observation.sample.blank(observation.batch_size) + 0.5,
        labels=torch.zeros(observation.batch_size, dtype=torch.int64) if labels is None else labels.cpu(),
        status="diverged" if finite else "failed",
        message=message,
    )
