"""Whether what an attack found explains what it saw: the samples behind a gradient have that gradient."""

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
"""Fit of the samples themselves up to which the values that were left are told rightly."""
_EVEN = 1 / 8
"""Power of a part's values, with their signs, that are compared: small ones then count nearly as much as large."""
_PART, _MOST_PARTS = 64, 2**16
"""Fewest values of a part, and about how many parts a large gradient has."""
_ROUNDING = 1e-6
"""Relative distance that rounding leaves."""
_LIKELY = 10.0
"""Nats by which the samples may explain an update better than an answer that explains it."""


def with_fit(
    found: Sequence[Reconstruction], observations: Sequence[Observation], model: nn.Module
) -> list[Reconstruction]:
    """Return reconstructions with their `fit` and `fits`, how far their gradient is from the observed one, and `nats`.

    The fit is the sine of an angle over that of a grey sample: 0 of the samples themselves and of others that the
    gradient does not tell from them, 1 and more of what explains no more than nothing. The fits are the distances of
    each part of the gradient over a grey sample's, with values to the power `_EVEN`: what a sample moves little may
    still tell it apart; and of the buffers that the client returned, which no defence changes. Who knows the defences'
    code compares the values that these leave as they are, and by the nats those with noise of which no value tells of
    another (`rayfed.client.grants.understood`). Fit and nats are None where there is nothing to compare: after several
    local steps, without samples or an update, where values of the update are not finite, where defences leave none, or
    where the model does not take what was found.
    """

    def explaining(one: Reconstruction, seen: Observation) -> Reconstruction:
        fit, fits, nats = fit_of(one.images, one.labels, seen, model)
        return replace(one, fit=fit, fits=fits, nats=nats)

    answers = zip(found, observations, strict=True)
    return [explaining(one, seen) if one.status == "ok" else one for one, seen in answers]


def fit_of(
    images: Tensor, labels: Tensor, observation: Observation, model: nn.Module
) -> tuple[float | None, Tensor | None, float | None]:
    """Return the `fit` of samples (N, *shape), their `fits` and their `nats`."""
    if not observation.update or observation.local.steps > 1:
        return None, None, None
    blank = observation.sample.blank(len(images))
    grey = blank + 0.5 if blank.is_floating_point() else blank
    network = without_tracking(model)
    try:
        own, other = (_gradient(samples, labels, observation, network) for samples in (images, grey))
        kept = _kept(images, grey, observation, model)
    except (torch.OutOfMemoryError, MemoryError):  # which the caller answers by a smaller group
        raise
    except Exception:  # whatever a user's model, or one that lacks a private part, raises: then nothing is compared
        return None, None, None
    seen = {name: tensor.double().cpu() for name, tensor in observation.gradient.items() if name in own}
    as_sent = observation.scale == 1 and not observation.local.weight_decay
    noise = observation.extra.get("noise") if as_sent else None
    nats = None if noise is None else noise.nats(seen, own)
    fit = _beside(own, other, seen, observation)
    return fit, torch.cat([_parts(own, other, seen, observation), kept]), nats


def judged(found: Reconstruction, fit: float | None, fits: Tensor | None, nats: float | None) -> float | None:
    """Return how far an answer is from explaining what was seen, beside `fit`, `fits` and `nats` of the samples.

    It is by how much its own fit, or one of its fits, is larger than the samples', without those by which the samples
    themselves explain nothing, or what noise leaves: 1 where it lacks more nats to the samples than `_LIKELY`. What
    cannot be compared, and can be with the samples, is not explained.
    """
    told = []
    if found.fit is not None and (fit is None or fit <= _OWN):
        told.append(max(0.0, found.fit - (fit or 0.0)))
    if found.nats is not None and nats is not None:
        told.append(float(not found.nats - nats <= _LIKELY))
    if told and fits is not None and found.fits is not None:
        told += (found.fits - fits)[fits <= _OWN].nan_to_num(torch.inf).clamp(min=0).tolist()
    return max(told, default=None)


def _gradient(images: Tensor, labels: Tensor, observation: Observation, network: nn.Module) -> Named:
    """Return the gradient at samples, in double precision on the CPU."""
    device = next(iter(observation.weights.values())).device
    network = network.to(device)
    buffers = buffers_for(network, observation)
    found, _ = gradients.gradient(network, observation.weights, buffers, images.to(device), labels.to(device))
    return {name: tensor.double().cpu() for name, tensor in found.items()}


def _beside(own: Named, other: Named, seen: Named, observation: Observation) -> float | None:
    """Return the sine of the angle of one gradient with what was seen, over another's; None where there is none."""
    sines = [_sine(_known(found, seen, observation), _known(seen, seen, observation)) for found in (own, other)]
    if sines[0] is None or not sines[1]:
        return None
    return sines[0] / sines[1]


def _parts(own: Named, other: Named, seen: Named, observation: Observation) -> Tensor:
    """Return of each part of a gradient, (P,), its distance from what was seen, over another gradient's.

    All parts of a gradient are multiplied by one factor, that fits best.
    """
    true = _known(seen, seen, observation)

    def scaled(tensors: Named) -> Tensor:
        values = _known(tensors, seen, observation)
        return values * (values @ true / values.square().sum()).nan_to_num(0).clamp(min=0)

    return _apart(scaled(own), scaled(other), scaled(seen))


def _apart(made: Tensor, grey: Tensor, true: Tensor) -> Tensor:
    """Return of each part of some values (n,) how far they are from the true ones, over how far grey ones are.

    Compared are powers (`_EVEN`). NaN is what grey ones explain as well.
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
    far = far.where(far.isfinite(), whole.clamp(min=_ROUNDING))  # grey ones that are no numbers explain nothing
    return torch.where(far > _ROUNDING * whole, near / far, torch.nan)


def _kept(images: Tensor, grey: Tensor, observation: Observation, model: nn.Module) -> Tensor:
    """Return of each part of the buffers that a client returned, (P,), how far those after samples are from them.

    It is over how far those after grey samples are; NaN is what these explain as well.
    """
    if not observation.returned_buffers:
        return torch.empty(0, dtype=torch.float64)
    true = {name: tensor.double().cpu() for name, tensor in observation.returned_buffers.items()}
    sets = [returned(model, observation, samples) for samples in (images, grey)]
    own, other = ({name: found[name].double().cpu() for name in true} for found in sets)
    return torch.cat([_apart(own[name].flatten(), other[name].flatten(), true[name].flatten()) for name in true])


def _known(tensors: Named, seen: Named, observation: Observation) -> Tensor:
    """Return the values of a gradient, (n,), that were sent as they are, as far as the attacker knows."""
    values = gradients.flatten({name: tensors[name] for name in seen})
    if "left" not in observation.extra:
        return values
    left = observation.extra["left"] or {}
    none = {name: torch.zeros_like(tensor, dtype=torch.bool) for name, tensor in seen.items()}
    return values[gradients.flatten({name: left.get(name, none[name]).cpu() for name in seen})]


def _sine(one: Tensor, other: Tensor) -> float | None:
    """Return the sine of the angle between two vectors; None where there is none."""
    lengths = float(one.norm() * other.norm())
    if not lengths or lengths != lengths or lengths == float("inf"):
        return None
    cosine = float(one @ other) / lengths
    return max(0.0, 1 - cosine * cosine) ** 0.5 if cosine > 0 else 1.0
