"""Whether what an attack found explains what it saw: the samples behind a gradient have that gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from rayfed import gradients
from rayfed.attacks.base import Reconstruction
from rayfed.attacks.forward_probe import buffers_for, without_tracking
from rayfed.update import Observation


def with_fit(
    found: Sequence[Reconstruction], observations: Sequence[Observation], model: nn.Module
) -> list[Reconstruction]:
    """Return reconstructions with their `fit`: the sine of the angle between their gradient and the observed one.

    It is near 0 for the samples themselves, and for others that the gradient does not tell from them; 1 at most. It is
    None where there is nothing to compare: after several local steps, without samples or an update, or where the model
    does not take what was found.
    """
    network = without_tracking(model)
    return [replace(one, fit=_sine(one, seen, network)) for one, seen in zip(found, observations, strict=True)]


def _sine(found: Reconstruction, observation: Observation, network: nn.Module) -> float | None:
    if found.status != "ok" or not observation.update or observation.local.steps > 1:
        return None
    device = next(iter(observation.weights.values())).device
    network = network.to(device)
    images, labels = found.images.to(device), found.labels.to(device)
    try:
        own, _ = gradients.gradient(network, observation.weights, buffers_for(network, observation), images, labels)
    except Exception:  # whatever a user's model, or one that lacks a private part, raises: then nothing is compared
        return None
    names = [name for name in observation.update if name in own]
    one, other = (
        gradients.flatten({name: tensors[name].double() for name in names}) for tensors in (own, observation.update)
    )
    known = one.isfinite() & other.isfinite()
    one, other = one[known], other[known]
    lengths = float(one.norm() * other.norm())
    if not lengths:
        return None
    cosine = float(one @ other) / lengths
    return max(0.0, 1 - cosine * cosine) ** 0.5 if cosine > 0 else 1.0
