"""Samples for an attacker's experiments: public ones if granted, otherwise samples made from the model.

Made samples start as noise and descend towards each class. Samples are kept at several stages, because it is unknown
which stage resembles real samples most. The spread between stages shows how far a made sample may be from a real one.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from rayfed.attacks.closed_form.head import Head
from rayfed.core import losses
from rayfed.update import Observation

_PUBLIC = 1000
"""Maximum number of public samples."""
_MADE = 60
"""Number of samples to make, at least one for each class."""
_MOST = 250
"""Maximum number of classes for which samples descend. With more classes, the samples are noise."""
_AT_ONCE = 20
"""Number of inputs in one pass with its graph."""
_KEPT = (0, 1, 3, 6, 12)
"""Steps at which the samples are kept."""
_STEP = 0.025
"""Root mean square of a step, as a share of the pixel range."""
_DRAWN = 20
"""Random candidates per sample, for inputs such as tokens that have no gradient."""


def own_samples(head: Head, observation: Observation) -> tuple[Tensor, Tensor]:
    """Return an attacker's own samples: inputs (S, n, *shape) in S stages of descent, and labels (n,) int64.

    The samples depend only on the weights and on the granted public samples.
    """
    generator = torch.Generator().manual_seed(0)
    if "public" in observation.extra:
        inputs, labels = observation.extra["public"]
        chosen = torch.randperm(len(labels), generator=generator)[:_PUBLIC]
        return inputs[chosen][None].to(head.device), labels[chosen].to(head.device)
    labels = torch.arange(max(_MADE, observation.classes), device=head.device) % observation.classes
    noise = observation.sample.noise(len(labels), generator)
    if not noise.is_floating_point():
        noise = observation.sample.noise(_DRAWN * len(labels), generator).to(head.device)
        return torch.stack([noise[: len(labels)], _chosen(head, noise, labels)]), labels
    if noise.ndim == 4 and min(noise.shape[2:]) > 1:  # images are smooth
        coarse = torch.randn(*noise.shape[:2], *(-(-side // 4) for side in noise.shape[2:]), generator=generator)
        noise = (0.5 + 0.3 * F.interpolate(coarse, noise.shape[2:], mode="bilinear")).clamp(0, 1)
    noise = noise.to(head.device)
    return (noise[None] if observation.classes > _MOST else _followed(head, noise, labels)), labels


def _followed(head: Head, inputs: Tensor, labels: Tensor) -> Tensor:
    """Descend from inputs towards labels; return the inputs of all stages (S, n, *shape)."""
    kept = []
    for step in range(_KEPT[-1] + 1):
        if step in _KEPT:
            kept.append(inputs)
        parts = zip(inputs.split(_AT_ONCE), labels.split(_AT_ONCE), strict=True)
        slope = torch.cat([_slope(head, *part) for part in parts])
        length = slope.flatten(1).norm(dim=1).clamp(min=torch.finfo(slope.dtype).tiny)
        size = _STEP * inputs[0].numel() ** 0.5
        inputs = (inputs - size * slope / length.reshape(-1, *[1] * (slope.ndim - 1))).clamp(0, 1)
    return torch.stack(kept)


def _slope(head: Head, inputs: Tensor, labels: Tensor) -> Tensor:
    moving = inputs.detach().requires_grad_()
    slope: Tensor = torch.autograd.grad(losses.get_loss(head.model)(head.logits(moving), labels, "sum"), moving)[0]
    return slope


def _chosen(head: Head, inputs: Tensor, labels: Tensor) -> Tensor:
    """Return for each label the candidate input with the highest probability of this label, relative to the mean."""
    with torch.no_grad():
        shares = torch.cat([head.logits(part).log_softmax(1) for part in inputs.split(_AT_ONCE)])
    best = (shares - shares.mean(0)).argsort(0, descending=True)
    rank = [int((labels[:i] == label).sum()) for i, label in enumerate(labels)]
    return inputs[best[rank, labels]]
