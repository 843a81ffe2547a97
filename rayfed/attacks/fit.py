"""Whether what an attack found explains what it saw: the samples behind a gradient have that gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rayfed import gradients
from rayfed.attacks.base import Reconstruction
from rayfed.attacks.forward_probe import buffers_for, without_tracking
from rayfed.update import Named, Observation

_OWN = 0.05
"""Fit of the samples themselves up to which the values that were left are told rightly."""
_EVEN = 1 / 8
"""Power of a part's values, with their signs, that are compared: small ones then count nearly as much as large."""
_PART, _MOST_PARTS = 64, 2**16
"""Fewest values of a part, and about how many parts a large gradient has."""
_ROUNDING = 1e-12
"""Square of a sine that rounding leaves."""
_LIKELY = 10.0
"""Nats by which the samples may explain an update better than an answer that explains it."""


def with_fit(
    found: Sequence[Reconstruction], observations: Sequence[Observation], model: nn.Module
) -> list[Reconstruction]:
    """Return reconstructions with their `fit` and `fits`, how far their gradient is from the observed one, and `nats`.

    The fit is the sine of an angle over that of a grey sample: 0 of the samples themselves and of others that the
    gradient does not tell from them, 1 and more of what explains no more than nothing. The fits are the same of each
    part of the gradient, with values to the power `_EVEN`: what a sample moves little may still tell it apart. Who
    knows the defences' code compares the values that these leave as they are, and by the nats those with noise of which
    no value tells of another (`rayfed.client.grants.understood`). All are None where there is nothing to compare: after
    several local steps, without samples or an update, where values of the update are not finite, where defences leave
    none, or where the model does not take what was found.
    """
    network = without_tracking(model)

    def explaining(one: Reconstruction, seen: Observation) -> Reconstruction:
        fit, fits, nats = fit_of(one.images, one.labels, seen, network)
        return replace(one, fit=fit, fits=fits, nats=nats)

    answers = zip(found, observations, strict=True)
    return [explaining(one, seen) if one.status == "ok" else one for one, seen in answers]


def fit_of(
    images: Tensor, labels: Tensor, observation: Observation, network: nn.Module
) -> tuple[float | None, Tensor | None, float | None]:
    """Return the `fit` of samples (N, *shape), their `fits` and their `nats`."""
    if not observation.update or observation.local.steps > 1:
        return None, None, None
    blank = observation.sample.blank(len(images))
    grey = blank + 0.5 if blank.is_floating_point() else blank
    try:
        own, other = (_gradient(samples, labels, observation, network) for samples in (images, grey))
    except (torch.OutOfMemoryError, MemoryError):  # which the caller answers by a smaller group
        raise
    except Exception:  # whatever a user's model, or one that lacks a private part, raises: then nothing is compared
        return None, None, None
    seen = {name: tensor.double().cpu() for name, tensor in observation.gradient.items() if name in own}
    as_sent = observation.scale == 1 and not observation.local.weight_decay
    noise = observation.extra.get("noise") if as_sent else None
    nats = None if noise is None else noise.nats(seen, own)
    fit = _beside(own, other, seen, observation)
    return fit, None if fit is None else _parts(own, other, seen, observation), nats


def judged(found: Reconstruction, fit: float | None, fits: Tensor | None, nats: float | None) -> float | None:
    """Return how far an answer is from explaining what was seen, beside `fit`, `fits` and `nats` of the samples.

    It is the largest of its own fit and of its fits, without those by which the samples themselves explain nothing, and
    of what noise leaves: 1 where it lacks more nats to the samples than `_LIKELY`.
    """
    own = None if fit is not None and fit > _OWN else found.fit
    if own is not None and fits is not None and found.fits is not None:
        own = max([own, *found.fits[fits <= _OWN].tolist()])
    if found.nats is None or nats is None:
        return own
    beyond = float(found.nats - nats > _LIKELY)
    return beyond if own is None else max(own, beyond)


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
    """Return of each part of a gradient, (P,), the sine of its angle with what was seen, over another gradient's.

    Parts are neighbouring values, and compared are powers of them (`_EVEN`). NaN is what another's explains as well.
    """

    def cut(tensors: Named) -> Tensor:
        values = _known(tensors, seen, observation)
        size = max(_PART, len(values) // _MOST_PARTS)
        parts = F.pad(values, (0, -len(values) % size)).view(-1, size)
        return F.normalize(parts.sign() * parts.abs() ** _EVEN, dim=1, eps=0)

    made, grey, true = map(cut, (own, other, seen))
    near, far = (1 - (one * true).sum(1).nan_to_num(0).clamp(0, 1).square() for one in (made, grey))
    return (near / far).sqrt().where(far > _ROUNDING, torch.nan)


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
