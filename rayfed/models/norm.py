"""Normalisation layers of models."""

from __future__ import annotations

from math import gcd
from typing import Literal

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

Norm = Literal["batch", "group", "none"]

_GROUPS = 8
"""Maximum number of groups, so that each group has several channels even in the models' narrowest layers."""


def norm(name: Norm, channels: int) -> nn.Module:
    """Return a normalisation layer for activations (N, channels, H, W).

    `group` (Wu and He 2018) normalises each sample separately, so that per-sample gradients exist, which `dp_sgd`
    needs.
    """
    if name == "batch":
        return nn.BatchNorm2d(channels)
    return nn.GroupNorm(gcd(_GROUPS, channels), channels) if name == "group" else nn.Identity()


def is_norm(module: nn.Module) -> bool:
    """Return whether a module is a batch or group normalisation, with a scale and a shift per channel."""
    return isinstance(module, (_BatchNorm, nn.GroupNorm))


def channels_of(norm: nn.Module) -> int:
    """Return the number of channels of a normalisation layer."""
    assert isinstance(norm, (_BatchNorm, nn.GroupNorm))
    return norm.num_channels if isinstance(norm, nn.GroupNorm) else norm.num_features


def without_affine(norm: nn.Module) -> nn.Module:
    """Return a new normalisation layer like `norm`, without scale and shift."""
    channels = channels_of(norm)
    if isinstance(norm, nn.GroupNorm):
        return nn.GroupNorm(norm.num_groups, channels, norm.eps, affine=False)
    assert isinstance(norm, _BatchNorm)
    return nn.BatchNorm2d(channels, norm.eps, norm.momentum, False, norm.track_running_stats)
