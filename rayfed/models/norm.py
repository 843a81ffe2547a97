"""The normalisation layers that a model can be built with."""

from __future__ import annotations

from math import gcd
from typing import Literal

from torch import nn

Norm = Literal["batch", "group", "none"]

_GROUPS = 8
"""At most: with the narrowest of our models' layers a group still has several channels."""


def norm(name: Norm, channels: int) -> nn.Module:
    """A layer for activations (N, channels, H, W).

    `group` (Wu and He 2018) sees one sample at a time, so that single samples' gradients exist, as `dp_sgd` needs them.
    """
    if name == "batch":
        return nn.BatchNorm2d(channels)
    return nn.GroupNorm(gcd(_GROUPS, channels), channels) if name == "group" else nn.Identity()
