"""Removal of wrappers from modules: `nn.DataParallel`, `DistributedDataParallel` and `torch.compile`.

rayfed copies models, replaces their tensors and differentiates twice. Compiled modules do not support that, and a
wrapper adds a prefix to every name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from types import MethodType
from typing import Any

from torch import nn

from rayfed.core import losses
from rayfed.errors import UserError

PREFIXES = {"module.": "nn.DataParallel", "_orig_mod.": "torch.compile"}
"""Prefix of tensors' names -> the wrapper that adds the prefix."""
_ORIGINAL = "_torchdynamo_orig_callable"
"""Attribute of a compiled function that holds the original function."""


def unwrap(model: nn.Module) -> nn.Module:
    """Return a model without wrappers; wrapped or compiled submodules are replaced inside the model, in place.

    Parameters and buffers stay the same objects. Raises `UserError` for a wrapper that has hooks.

    >>> from torch import nn
    >>> from rayfed.models.wrappers import unwrap
    >>> list(unwrap(nn.DataParallel(nn.Linear(2, 2))).state_dict())
    ['weight', 'bias']
    """
    return _unwrap(model, lambda undo: None)


@contextmanager
def unwrapped(model: nn.Module) -> Iterator[nn.Module]:
    """Remove the wrappers from a model in the block (see `unwrap`), and restore them afterwards."""
    with ExitStack() as stack:
        yield _unwrap(model, stack.callback)


def bare_name(name: str, known: Collection[str]) -> str:
    """Return the name in `known` of a wrapped module's tensor, without wrapper prefixes.

    Returns the name itself if `known` has no such name.
    """
    bare = name
    while bare not in known and (prefix := next((p for p in PREFIXES if bare.startswith(p)), None)):
        bare = bare.removeprefix(prefix)
    for prefix in PREFIXES:  # a submodule may have been wrapped
        bare = bare if bare in known else bare.replace(f".{prefix}", ".")
    return bare if bare in known else name


def is_wrapped(model: nn.Module) -> bool:
    """Return whether a model or one of its submodules is wrapped or compiled."""
    return any(_inner(module) is not None or any(_compiled(module)) for module in model.modules())


def _unwrap(model: nn.Module, to_undo: Callable[[Callable[[], Any]], Any]) -> nn.Module:
    """Unwrap a model, and pass functions that undo the changes to `to_undo`."""
    top = _innermost(model)
    if top is not model and losses.get_loss(model) is not losses.DEFAULT:
        losses.attach_loss(top, losses.get_loss(model))
    for module in list(top.modules()):
        for name, child in list(module._modules.items()):
            if child is not None and (inner := _innermost(child)) is not child:
                module._modules[name] = inner
                to_undo(partial(module._modules.update, {name: child}))
    for module in top.modules():
        own = vars(module)
        for name, plain in list(_compiled(module)):
            to_undo(partial(own.update, {name: own[name]}) if name in own else partial(own.pop, name))
            own[name] = plain
    return top


def _innermost(module: nn.Module) -> nn.Module:
    while (inner := _inner(module)) is not None:
        if module._forward_hooks or module._forward_pre_hooks:
            raise UserError(
                f"forward hooks on {type(module).__name__} would be lost, because rayfed uses only the module that it "
                f"wraps: register them on the inner {type(inner).__name__}"
            )
        module = inner
    return module


def _inner(module: nn.Module) -> nn.Module | None:
    """Return the module in a wrapper; None if this is not a wrapper."""
    kinds = [kind.__name__ for kind in type(module).__mro__]  # by name: importing torch._dynamo takes seconds
    if "OptimizedModule" in kinds:
        return module._modules.get("_orig_mod")
    if any(kind.endswith("DataParallel") for kind in kinds):  # PyTorch's two, and those of other packages
        return module._modules.get("module")
    return None


def _compiled(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a module that `torch.compile` created, with their original values."""
    if module._compiled_call_impl is not None:  # by `module.compile()`
        yield "_compiled_call_impl", None
    for name, value in vars(module).items():
        if name != "_compiled_call_impl" and _ORIGINAL in getattr(value, "__dict__", {}):
            yield name, getattr(value, _ORIGINAL)
    kind: Any = type(module)
    for name, function in _compiled_methods(kind):
        if name not in vars(module):
            yield name, MethodType(function, module)


@cache
def _compiled_methods(kind: Any) -> list[tuple[str, Any]]:
    """Return the methods of a class that `torch.compile` created, with their original functions."""
    methods = {name: value for base in reversed(kind.__mro__) for name, value in vars(base).items()}
    compiled = {name: value for name, value in methods.items() if _ORIGINAL in getattr(value, "__dict__", {})}
    return [(name, getattr(value, _ORIGINAL)) for name, value in compiled.items()]
