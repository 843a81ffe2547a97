"""Fit of a reconstruction: the distance between its gradient and the observed one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rayfed import gradients
from rayfed.attacks.base import Reconstruction
from rayfed.attacks.forward_probe import buffers_for, returned, without_tracking
from rayfed.update import Named, Observation

_OWN = 0.05
"""Maximum fit of the true samples for which the comparison is considered valid."""
_EVEN = 1 / 8
"""Power to which a part's absolute values are raised, so that small ones count nearly as much as large ones."""
_PART, _MOST_PARTS = 64, 2**16
"""Minimum number of values per part, and approximate maximum number of parts per gradient."""
_ROUNDING = 1e-6
"""Relative distance due to rounding."""
_LIKELY = 10.0
"""Maximum difference in nats between the true samples and a reconstruction that explains the update."""


def with_fit(
    found: Sequence[Reconstruction], observations: Sequence[Observation], model: nn.Module
) -> list[Reconstruction]:
    """Return reconstructions with `fit`, `fits` and `nats`: how well each gradient matches the observed gradient.

    `fit` is the sine of the angle between the two gradients, divided by that of a grey sample. It is 0 for the true
    samples and any with the same gradient, and about 1 for a reconstruction that is as far as grey. `fits` are
    distances for each part of the gradient and of the returned buffers, relative to grey. Their values are raised to
    the power `_EVEN`.

    An attacker that knows the defences' code compares the update with the defended update of the samples
    (`rayfed.threat_model.observation_model`). With noise, only `nats` are known: minus the log-likelihood of the
    update. All are None if a comparison is impossible: several local steps, no update, non-finite values, a failing
    model, or defences whose declarations do not determine the likelihood.
    """

    def explaining(one: Reconstruction, seen: Observation) -> Reconstruction:
        fit, fits, nats = fit_of(one.images, one.labels, seen, model)
        return replace(one, fit=fit, fits=fits, nats=nats)

    answers = zip(found, observations, strict=True)
    return [explaining(one, seen) if one.status == "ok" else one for one, seen in answers]


def fit_of(
    images: Tensor, labels: Tensor, observation: Observation, model: nn.Module
) -> tuple[float | None, Tensor | None, float | None]:
    """Return `fit`, `fits` and `nats`: how well the gradient at samples (N, *shape) matches the observed gradient."""
    declared = observation.extra.get("observation_model")
    if not observation.update or observation.local.steps > 1 or not (declared is None or declared.is_exact):
        return None, None, None
    blank = observation.sample.blank(len(images))
    grey = blank + 0.5 if blank.is_floating_point() else blank
    network = without_tracking(model)
    try:
        own, own_nats = _sent(images, labels, observation, network)
        other, _ = _sent(grey, labels, observation, network)
        kept = _kept(images, grey, observation, model)
    except (torch.OutOfMemoryError, MemoryError):  # the caller retries with a smaller group
        raise
    except Exception:  # a user's model, or one without its private part, can raise anything
        return None, None, None
    if own_nats is not None:
        return None, kept, own_nats
    sent = observation.gradient if declared is None else observation.update
    seen = {name: tensor.double().cpu() for name, tensor in sent.items() if name in own}
    fit = _beside(own, other, seen, observation)
    return fit, torch.cat([_parts(own, other, seen, observation), kept]), None


def judged(found: Reconstruction, fit: float | None, fits: Tensor | None, nats: float | None) -> float | None:
    """Return how much worse a reconstruction explains the update than the true samples do; None if not comparable.

    `fit`, `fits` and `nats` are those of the true samples. The result is the largest excess of the reconstruction's fit
    or fits over theirs, ignoring parts that the true samples do not fit either. It is 1 if the reconstruction is more
    than `_LIKELY` nats less likely. An excess of NaN counts as infinite.
    """
    told = []
    if found.fit is not None and (fit is None or fit <= _OWN):
        told.append(max(0.0, found.fit - (fit or 0.0)))
    if found.nats is not None and nats is not None:
        told.append(float(not found.nats - nats <= _LIKELY))
    if told and fits is not None and found.fits is not None:
        told += (found.fits - fits)[fits <= _OWN].nan_to_num(torch.inf).clamp(min=0).tolist()
    return max(told, default=None)


def _sent(images: Tensor, labels: Tensor, observation: Observation, network: nn.Module) -> tuple[Named, float | None]:
    """Return the update of a client with the samples, in double precision on the CPU, and minus the log-likelihood.

    Without an observation model, this is the gradient. The log-likelihood is None without noise.
    """
    device = next(iter(observation.weights.values())).device
    network, images, labels = network.to(device), images.to(device), labels.to(device)
    buffers = buffers_for(network, observation)
    declared = observation.extra.get("observation_model")
    if declared is None:
        found, _ = gradients.gradient(network, observation.weights, buffers, images, labels)
        return {name: tensor.double().cpu() for name, tensor in found.items()}, None
    task = declared.task(observation, network, images, labels)
    batch = declared.train_on(task)
    if declared.samplewise:
        weights, inputs = observation.weights, batch.inputs
        found = gradients.per_sample_gradients(network, weights, buffers, inputs, batch.labels)
    else:
        found, _ = gradients.gradient(network, observation.weights, buffers, batch.inputs, batch.labels)
    double = {name: tensor.double() for name, tensor in found.items()}
    expected = declared.expect(declared.fresh(task.replace(data=batch)), double, observation)
    update = {name: tensor.double() for name, tensor in observation.update.items()}
    likelihood = declared.log_likelihood(task, update, expected, observation)
    nats = None if likelihood is None else -likelihood
    return {name: tensor.cpu() for name, tensor in expected.items()}, nats


def _beside(own: Named, other: Named, seen: Named, observation: Observation) -> float | None:
    """Return the sine of the angle between `own` and `seen`, divided by that of `other`, or None if undefined."""
    sines = [_sine(_known(found, seen, observation), _known(seen, seen, observation)) for found in (own, other)]
    if sines[0] is None or not sines[1]:
        return None
    return sines[0] / sines[1]


def _parts(own: Named, other: Named, seen: Named, observation: Observation) -> Tensor:
    """Return the distance between `own` and `seen` for each part of a gradient, (P,), divided by that of `other`.

    Each gradient is first multiplied by the factor that fits best.
    """
    true = _known(seen, seen, observation)

    def scaled(tensors: Named) -> Tensor:
        values = _known(tensors, seen, observation)
        return values * (values @ true / values.square().sum()).nan_to_num(0).clamp(min=0)

    return _apart(scaled(own), scaled(other), scaled(seen))


def _apart(made: Tensor, grey: Tensor, true: Tensor) -> Tensor:
    """Return the distance between `made` and `true` (n,) for each part, (P,), divided by that of `grey`.

    Values are compared after the power `_EVEN`. The result is NaN if grey samples match exactly, up to rounding.
    """
    size = max(_PART, len(true) // _MOST_PARTS)
    made, grey, true = (
        F.pad(values.sign() * values.abs() ** _EVEN, (0, -len(values) % size)).view(-1, size)
        for values in (made, grey, true)
    )
    whole = true.nan_to_num(0, 0, 0).norm(dim=1)

    def gap(values: Tensor) -> Tensor:
        same = (values == true) | (values.isnan() & true.isnan())
        apart: Tensor = torch.where(same, 0, values - true).norm(dim=1)
        return apart

    near, far = gap(made), gap(grey)
    far = far.where(far.isfinite(), whole.clamp(min=_ROUNDING))  # non-finite grey values explain nothing
    return torch.where(far > _ROUNDING * whole, near / far, torch.nan)


def _kept(images: Tensor, grey: Tensor, observation: Observation, model: nn.Module) -> Tensor:
    """Return the distance between computed and returned buffers for each part, (P,), divided by that of grey samples.

    The result is NaN if grey samples match exactly, up to rounding.
    """
    if not observation.returned_buffers:
        return torch.empty(0, dtype=torch.float64)
    true = {name: tensor.double().cpu() for name, tensor in observation.returned_buffers.items()}
    sets = [returned(model, observation, samples) for samples in (images, grey)]
    own, other = ({name: found[name].double().cpu() for name in true} for found in sets)
    return torch.cat([_apart(own[name].flatten(), other[name].flatten(), true[name].flatten()) for name in true])


def _known(tensors: Named, seen: Named, observation: Observation) -> Tensor:
    """Return the values of a gradient, (n,), that were sent as far as the attacker knows."""
    values = gradients.flatten({name: tensors[name] for name in seen})
    declared = observation.extra.get("observation_model")
    if declared is None:
        return values
    masks = declared.sent_values(observation.update, observation)
    return values[gradients.flatten({name: masks[name].cpu() for name in seen})]


def _sine(one: Tensor, other: Tensor) -> float | None:
    """Return the sine of the angle between two vectors, or None if one is zero or not finite."""
    lengths = float(one.norm() * other.norm())
    if not lengths or lengths != lengths or lengths == float("inf"):
        return None
    cosine = float(one @ other) / lengths
    return max(0.0, 1 - cosine * cosine) ** 0.5 if cosine > 0 else 1.0
