"""Private front convolutions of a model, with the normalisations after them.

Source: Gu et al. 2021, "Federated Deep Learning with Bayesian Privacy", section 5.1 (SplitFed); after Thapa et al.
2020, "SplitFed: When Federated Learning Meets Split Learning".
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from rayfed.errors import UserError
from rayfed.models.norm import channels_of, is_norm


class PrivateConv(nn.Module):
    """Private convolution with its normalisation, from (N, C, H, W) to (N, C', H', W')."""

    private = True

    def __init__(self, conv: nn.Conv2d, norm: nn.Module | None, common_start: bool) -> None:
        """Create a block with an optional normalisation `norm`; with `common_start`, all clients begin alike."""
        super().__init__()
        self.conv = conv
        self.norm = nn.Identity() if norm is None else norm
        self.common_start = common_start

    def forward(self, images: Tensor) -> Tensor:
        """Return the normalised activations of the private convolution, (N, C', H', W')."""
        features: Tensor = self.norm(self.conv(images))
        return features

    def scale(self) -> Tensor:
        """Return the normalisation's factor for each output channel, (C',), or ones without a normalisation."""
        own = getattr(self.norm, "weight", None)
        return torch.ones_like(self.conv.weight[:, 0, 0, 0]) if own is None else own

    def matrix(self) -> Tensor:
        """Return the scaled kernels, (C', C k k): the private layer of definitions 4 and 5 of the paper."""
        return self.scale()[:, None] * self.conv.weight.flatten(1)


Block = Callable[[nn.Conv2d, nn.Module | None], PrivateConv]
"""Function that creates a private block from a convolution and the normalisation after it."""


def keep_front(model: nn.Module, count: int, block: Block) -> nn.Module:
    """Replace the first convolutions of a model by private blocks, in place, and return the model.

    `conv1` becomes a block with `conv1.conv`, and `conv1.norm` if a normalisation follows it. Raises `UserError` for a
    model that does not begin with so many convolutions.
    """
    found = _front(model)
    if len(found) < count:
        raise UserError(
            f"layers: the first {count} layers of the model must be convolutions to become private, but only "
            f"{len(found)} "
            "are convolutions: set fewer `layers`, or choose a model that begins with convolutions (lenet, lenet5, "
            "alexnet, resnet)"
        )
    for path, norm in found[:count]:
        conv = model.get_submodule(path)
        assert isinstance(conv, nn.Conv2d)
        model.set_submodule(path, block(conv, model.get_submodule(norm) if norm else None))
        if norm:
            model.set_submodule(norm, nn.Identity())
    return model


def private_convs(model: nn.Module) -> dict[str, PrivateConv]:
    """Return the private convolutions of a model, by the names of the layers that they replace."""
    return {path: module for path, module in model.named_modules() if isinstance(module, PrivateConv)}


def sent_out_names(model: nn.Module) -> frozenset[str]:
    """Return the names of the tensors of blocks that are sent to the server, but whose clients are compared."""
    names: set[str] = set()
    for path, block in private_convs(model).items():
        if not block.private:
            names |= {f"{path}.{name}" for name in block.state_dict()}
    return frozenset(names)


def _front(model: nn.Module) -> list[tuple[str, str | None]]:
    """Return the convolutions before any other layer with weights, each with its normalisation, if any."""
    found: list[tuple[str, str | None]] = []
    for path, module in model.named_modules():
        if isinstance(module, nn.Conv2d):
            found.append((path, None))
        elif found and is_norm(module) and not found[-1][1] and _follows(model.get_submodule(found[-1][0]), module):
            found[-1] = found[-1][0], path
        elif next(module.children(), None) is None and next(module.parameters(), None) is not None:
            break
    return found


def _follows(conv: nn.Module, norm: nn.Module) -> bool:
    assert isinstance(conv, nn.Conv2d)
    return channels_of(norm) == conv.out_channels
