"""Whether what an attack found explains what it saw: the samples behind a gradient have that gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from rayfed import gradients
from rayfed.attacks.base import Reconstruction
from rayfed.attacks.forward_probe import buffers_for, without_tracking
from rayfed.update import Named, Observation

_OWN = 0.05
"""Fit of the samples themselves up to which the values that were left are told rightly."""
_LIKELY = 10.0
"""Nats by which the samples may explain an update better than an answer that explains it."""


def with_fit(
    found: Sequence[Reconstruction], observations: Sequence[Observation], model: nn.Module
) -> list[Reconstruction]:
    """Return reconstructions with their `fit`, how far their gradient is from the observed one, and their `nats`.

    The fit is the sine of an angle over that of a grey sample: 0 of the samples themselves and of others that the
    gradient does not tell from them, 1 and more of what explains no more than nothing. Who knows the defences' code
    compares the values that these leave as they are, and by the nats those with noise of which no value tells of
    another (`rayfed.client.grants.understood`). Both are None where there is nothing to compare: after several local
    steps, without samples or an update, where values of the update are not finite, where defences leave none, or where
    the model does not take what was found.
    """
    network = without_tracking(model)

    def explaining(one: Reconstruction, seen: Observation) -> Reconstruction:
        fit, nats = fit_of(one.images, one.labels, seen, network)
        return replace(one, fit=fit, nats=nats)

    answers = zip(found, observations, strict=True)
    return [explaining(one, seen) if one.status == "ok" else one for one, seen in answers]


def fit_of(
    images: Tensor, labels: Tensor, observation: Observation, network: nn.Module
) -> tuple[float | None, tuple[float, float] | None]:
    """Return the `fit` of samples (N, *shape), and the `nats` of their gradient and of grey samples'."""
    if not observation.update or observation.local.steps > 1:
        return None, None
    blank = observation.sample.blank(len(images))
    grey = blank + 0.5 if blank.is_floating_point() else blank
    try:
        own, other = (_gradient(samples, labels, observation, network) for samples in (images, grey))
    except (torch.OutOfMemoryError, MemoryError):  # which the caller answers by a smaller group
        raise
    except Exception:  # whatever a user's model, or one that lacks a private part, raises: then nothing is compared
        return None, None
    seen = {name: tensor.double().cpu() for name, tensor in observation.gradient.items() if name in own}
    as_sent = observation.scale == 1 and not observation.local.weight_decay
    noise = observation.extra.get("noise") if as_sent else None
    nats = None if noise is None else (noise.nats(seen, own), noise.nats(seen, other))
    return _beside(own, other, seen, observation), nats


def judged(found: Reconstruction, fit: float | None, nats: float | None) -> float | None:
    """Return how far an answer is from explaining what was seen, beside `fit` and `nats` of the samples themselves.

    It is the larger of its own fit, unless the samples have none that explains anything, and of what noise leaves: the
    root of the nats that it lacks to the samples, over those that a grey sample lacks; none up to `_LIKELY`.
    """
    own = None if fit is not None and fit > _OWN else found.fit
    if found.nats is None or nats is None:
        return own
    lacking, grey = (one - nats for one in found.nats)
    beyond = 0.0 if lacking <= _LIKELY else (lacking / grey) ** 0.5 if grey > lacking else 1.0
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
