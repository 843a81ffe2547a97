"""Whether what an attack found explains what it saw: the samples behind a gradient have that gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from rayfed import gradients
from rayfed.attacks.base import Reconstruction
from rayfed.attacks.forward_probe import buffers_for, without_tracking
from rayfed.update import Observation


def with_fit(
    found: Sequence[Reconstruction], observations: Sequence[Observation], model: nn.Module
) -> list[Reconstruction]:
    """Return reconstructions with their `fit`: how far their gradient is from the observed one, beside a grey sample's.

    Both are sines of angles, with the labels that were found: 0 of the samples themselves and of others that the
    gradient does not tell from them, 1 and more of what explains no more than nothing. Who knows the defences' code
    compares the values that these leave as they are (`rayfed.client.grants.code`). It is None where there is nothing to
    compare: after several local steps, without samples or an update, where values of the update are not finite, where
    defences leave none, or where the model does not take what was found.
    """
    network = without_tracking(model)
    return [replace(one, fit=_fit(one, seen, network)) for one, seen in zip(found, observations, strict=True)]


def _fit(found: Reconstruction, observation: Observation, network: nn.Module) -> float | None:
    if found.status != "ok" or not observation.update or observation.local.steps > 1:
        return None
    blank = observation.sample.blank(len(found.images))
    grey = blank + 0.5 if blank.is_floating_point() else blank
    try:
        own, other = (_sine(images, found.labels, observation, network) for images in (found.images, grey))
    except (torch.OutOfMemoryError, MemoryError):  # which the caller answers by a smaller group
        raise
    except Exception:  # whatever a user's model, or one that lacks a private part, raises: then nothing is compared
        return None
    if own is None or other is None:
        return None
    return own / other if other else 1.0


def _sine(images: Tensor, labels: Tensor, observation: Observation, network: nn.Module) -> float | None:
    """Return the sine of the angle between the gradient at samples and the observed one; None where there is none."""
    device = next(iter(observation.weights.values())).device
    network = network.to(device)
    buffers = buffers_for(network, observation)
    found, _ = gradients.gradient(network, observation.weights, buffers, images.to(device), labels.to(device))
    seen = {name: tensor.double() for name, tensor in observation.gradient.items() if name in found}
    one, other = gradients.flatten({name: found[name].double() for name in seen}), gradients.flatten(seen)
    if "left" in observation.extra:
        left = observation.extra["left"] or {}
        none = {name: torch.zeros_like(tensor, dtype=torch.bool) for name, tensor in seen.items()}
        kept = gradients.flatten({name: left.get(name, none[name]).to(device) for name in seen})
        one, other = one[kept], other[kept]
    lengths = float(one.norm() * other.norm())
    if not lengths or lengths != lengths or lengths == float("inf"):
        return None
    cosine = float(one @ other) / lengths
    return max(0.0, 1 - cosine * cosine) ** 0.5 if cosine > 0 else 1.0
