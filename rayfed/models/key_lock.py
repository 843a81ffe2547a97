"""Key-lock module: a normalisation's scale and shift, computed from a client's private key.

Source: Ren 2023 (thesis), section 5.2.3 and figure 5.2; Ren et al. 2022, "FedKL: Gradient Leakage Defence with Key-Lock
Module for Federated Learning".
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from rayfed.errors import UserError
from rayfed.models.activation import Activation, activation
from rayfed.models.norm import channels_of, is_norm, without_affine


class KeyLock(nn.Module):
    """Scale and shift per channel, computed from a private key: `gamma * x + beta`.

    `gamma = key @ W_gamma + b_gamma` and `beta = key @ W_beta + b_beta`. The key is uniform in [0, 1).
    """

    private = True

    def __init__(self, length: int, channels: int, behind: Activation | None, common_start: bool) -> None:
        """Create a lock with an activation (`behind`) after both linear maps; None as in the equations."""
        super().__init__()
        self.common_start = common_start
        self.register_buffer("key", torch.rand(length))
        self.gamma = nn.Linear(length, channels)
        self.beta = nn.Linear(length, channels)
        self.behind = nn.Identity() if behind is None else activation(behind)

    def forward(self, features: Tensor) -> Tensor:
        """Scale and shift features (N, C, H, W) per channel."""
        gamma, beta = (self.behind(linear(self.key)).view(-1, 1, 1) for linear in (self.gamma, self.beta))
        return torch.addcmul(beta, gamma, features)


class LockedNorm(nn.Module):
    """Normalisation without own scale and shift, followed by a key-lock module."""

    def __init__(self, norm: nn.Module, lock: KeyLock) -> None:
        super().__init__()
        self.norm, self.lock = norm, lock

    def forward(self, features: Tensor) -> Tensor:
        """Normalise features (N, C, H, W), then scale and shift them by the key-lock module."""
        locked: Tensor = self.lock(self.norm(features))
        return locked


def lock_norms(
    model: nn.Module, blocks: Sequence[int], length: int, behind: Activation | None, common_start: bool = False
) -> nn.Module:
    """Add key-lock modules to convolution-normalisation blocks of a model, in place; blocks are counted from 0.

    The layer `bn1` becomes a pair of `bn1.norm` and `bn1.lock`. Raises `UserError` for a missing block.
    """
    found = conv_norm_blocks(model)
    for block in blocks:
        if block >= len(found):
            raise UserError(
                f"key_lock: the model has no block {block}: found {len(found)} convolutions followed by a "
                "normalisation; choose other `blocks`, or a model with norms (such as lenet with `norm: batch`)"
            )
        norm = model.get_submodule(found[block])
        lock = KeyLock(length, channels_of(norm), behind, common_start)
        model.set_submodule(found[block], LockedNorm(without_affine(norm), lock))
    return model


def conv_norm_blocks(model: nn.Module) -> list[str]:
    """Return the names of the normalisations that directly follow a convolution with as many channels."""
    layers = [(path, m) for path, m in model.named_modules() if isinstance(m, nn.Conv2d) or is_norm(m)]
    return [
        path
        for (_, conv), (path, norm) in pairwise(layers)
        if isinstance(conv, nn.Conv2d) and is_norm(norm) and channels_of(norm) == conv.out_channels
    ]
