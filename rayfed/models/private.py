"""Parts of a model that stay with the client: keys and locks, passports, private layers.

A module with an attribute `private = True` keeps all of its parameters and buffers at home. Its parameters are trained
by their client alone (locks, private layers); its buffers are drawn once for each client and never change (keys,
passports).
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import chain

from torch import nn

from rayfed.update import Named


def private_names(model: nn.Module) -> frozenset[str]:
    """The parameters and buffers of a model that never leave a client."""
    return frozenset(
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        if getattr(module, "private", False)
        for name, _ in chain(module.named_parameters(), module.named_buffers())
    )


def without(tensors: Named, names: Collection[str]) -> Named:
    """The tensors that do not bear one of the names, in their order."""
    return {name: t for name, t in tensors.items() if name not in names}


def only(tensors: Named, names: Collection[str]) -> Named:
    """The tensors that bear one of the names, in their order."""
    return {name: t for name, t in tensors.items() if name in names}


def freeze(model: nn.Module, names: Collection[str]) -> None:
    """Let the parameters of these names count as fixed, as an attacker sees what he does not get a gradient of."""
    for name, parameter in model.named_parameters():
        if name in names:
            parameter.requires_grad_(False)
