"""Private parts of a model, which stay with the client: keys, locks, passports, private layers.

A module with an attribute `private = True` keeps all of its parameters and buffers on the client. Only that client
trains its parameters (locks, private layers). Its buffers (keys, passports) are sampled once per client and never
change, except batch-norm statistics. If it also has a true attribute `common_start`, all clients begin with the same
parameters, sampled by the server. Otherwise each client samples its own.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import chain

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from rayfed.update import Named


def private_names(model: nn.Module) -> frozenset[str]:
    """Return the names of a model's private parameters and buffers, which stay with the client."""
    return frozenset(
        name
        for prefix, module in model.named_modules()
        if getattr(module, "private", False)
        for name, _ in chain(module.named_parameters(prefix), module.named_buffers(prefix))
    )


def key_names(model: nn.Module) -> frozenset[str]:
    """Return the names of a model's private, never trained tensors: buffers except batch-norm statistics."""
    return private_names(model) & {
        name
        for prefix, module in model.named_modules()
        if not isinstance(module, _NormBase)
        for name, _ in module.named_buffers(prefix, recurse=False)
    }


def common_names(model: nn.Module) -> frozenset[str]:
    """Return the names of the private parameters that start with equal values at all clients."""
    return frozenset(
        name
        for prefix, module in model.named_modules()
        if getattr(module, "private", False) and getattr(module, "common_start", False)
        for name, _ in module.named_parameters(prefix)
    )


def without(tensors: Named, names: Collection[str]) -> Named:
    """Return all tensors except those whose names are in `names`, in the original order."""
    return {name: t for name, t in tensors.items() if name not in names}


def only(tensors: Named, names: Collection[str]) -> Named:
    """Return the tensors whose names are in `names`, in the original order."""
    return {name: t for name, t in tensors.items() if name in names}


def freeze(model: nn.Module, names: Collection[str]) -> None:
    """Freeze the parameters whose names are in `names`, as for an attacker that lacks their gradient."""
    for name, parameter in model.named_parameters():
        if name in names:
            parameter.requires_grad_(False)
