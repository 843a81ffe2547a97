"""Selection of a model's trainable part: all layers, chosen layers, or adapters of frozen layers.

A parameter is trainable if its `requires_grad` is true. Frozen parameters are those of the public checkpoint, which
clients, server and attackers have, so they are never sent. A module with a true attribute `held` keeps its buffers
unchanged: a batch norm with frozen scale and shift stays in evaluation mode, with the checkpoint's statistics, and does
not send them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from rayfed.errors import UserError, nearest

Adapt = Callable[[nn.Module], frozenset[str]]
"""Function that adds adapters or a prompt to a model, in place, and returns the names of their parameters."""
WORDS = ("head", "last N blocks", "bias", "norms")
"""Keywords that select parameters, in addition to glob patterns of their names."""
_LAST = re.compile(r"last (\d+ )?blocks?")
_SHOWN = 12


def head_names(model: nn.Module) -> frozenset[str]:
    """Return the names of the parameters of a model's head.

    For a Hugging Face model these are the parameters outside its base model, or the token table if only that computes
    the outputs (tied embeddings). For other models they are those of the last layer with a matrix.
    """
    names = [name for name, _ in model.named_parameters()]
    base, outputs = getattr(model, "base_model_prefix", ""), getattr(model, "get_output_embeddings", None)
    if isinstance(base, str) and isinstance(getattr(model, base or "-", None), nn.Module):
        outside = frozenset(name for name in names if not name.startswith(f"{base}."))
        tied: Any = outputs() if callable(outputs) else None
        if outside or tied is not None:
            return outside or frozenset(name for name, p in model.named_parameters() if p is tied.weight)
    layers = [
        path for path, module in model.named_modules() if any(p.ndim > 1 for p in module.parameters(recurse=False))
    ]
    return frozenset(name for name in names if layers and name.startswith(f"{layers[-1]}."))


def blocks_of(model: nn.Module) -> list[str]:
    """Return the paths of a model's blocks in order: the repeated kind of module with the most parameters."""
    stacks = nn.Sequential | nn.ModuleList | nn.ModuleDict
    found = [
        (f"{path}.{name}".lstrip("."), child)
        for path, stack in model.named_modules()
        if isinstance(stack, stacks)
        for name, child in stack.named_children()
        if not isinstance(child, stacks) and any(True for _ in child.children())
    ]
    kinds = Counter(type(child) for _, child in found)
    sizes: Counter[type[nn.Module]] = Counter()
    for _, child in found:
        if kinds[type(child)] > 1:
            sizes[type(child)] += sum(p.numel() for p in child.parameters())
    return [path for path, child in found if sizes and type(child) is max(sizes, key=lambda kind: sizes[kind])]


def parameters_of(model: nn.Module, layers: Sequence[str]) -> frozenset[str]:
    """Return the names of the parameters that patterns and keywords (`WORDS`) select.

    A pattern matches the name of a parameter, or of a module and thereby its parameters. Raises `UserError` for a
    pattern that matches nothing.
    """
    found: frozenset[str] = frozenset().union(*(_chosen(model, written) for written in layers))
    return found


def choose(model: nn.Module, layers: Sequence[str], adapting: Sequence[Adapt] = ()) -> None:
    """Make only the chosen layers of a model trainable (see `parameters_of`), in place.

    All other parameters are frozen, with the buffers of frozen parts. Adapters and prompts that `adapting` adds are
    trainable, too.
    """
    names = parameters_of(model, layers)
    chosen = [p for name, p in model.named_parameters() if name in names]
    added = [name for adapt in adapting for name in adapt(model)]
    model.requires_grad_(False)
    for parameter in (*chosen, *(model.get_parameter(name) for name in added)):
        parameter.requires_grad_(True)
    _hold(model, held=False)


def hold_still(model: nn.Module) -> None:
    """Set batch norms with frozen statistics to evaluation mode."""
    for module in model.modules():
        if isinstance(module, _NormBase) and getattr(module, "held", False):
            module.eval()


def frozen_names(model: nn.Module) -> frozenset[str]:
    """Return the names of a model's frozen parameters and buffers, which are never trained or sent."""
    parameters = (name for name, p in model.named_parameters() if not p.requires_grad)
    buffers = (
        f"{path}.{name}".lstrip(".")
        for path, module in model.named_modules()
        if getattr(module, "held", False)
        for name, _ in module.named_buffers(recurse=False)
    )
    return frozenset((*parameters, *buffers))


def _hold(module: nn.Module, held: bool) -> None:
    """Freeze the buffers of the untrained parts of a module."""
    own = list(module.parameters())
    held = not any(p.requires_grad for p in own) if own else held
    if held:
        module.held = True  # type: ignore[assignment]
    for child in module.children():
        _hold(child, held)


def _chosen(model: nn.Module, written: str) -> frozenset[str]:
    names = [name for name, _ in model.named_parameters()]
    if written == "head":
        found = head_names(model)
    elif last := _LAST.fullmatch(written):
        found = _last_blocks(model, int(last[1] or 1), names)
    elif written == "bias":
        found = frozenset(name for name in names if name.rpartition(".")[2] == "bias")
    elif written == "norms":
        found = frozenset(
            f"{path}.{name}".lstrip(".")
            for path, module in model.named_modules()
            if "norm" in type(module).__name__.lower()
            for name, _ in module.named_parameters(recurse=False)
        )
    else:
        found = frozenset(name for name in names if any(fnmatchcase(part, written) for part in _parts(name)))
    if not found:
        raise UserError(
            f"model.train.layers: '{written}' matches no parameter: use patterns of parameters' names, such as "
            f"'encoder.*', or one of {', '.join(WORDS)}; {nearest(written, _modules(names))}"
        )
    return found


def _last_blocks(model: nn.Module, count: int, names: Sequence[str]) -> frozenset[str]:
    """Return all parameters from the first of the last `count` blocks on."""
    blocks = blocks_of(model)
    if not 0 < count <= len(blocks):
        has = len(blocks) or "no stack of blocks: select layers by patterns"
        raise UserError(f"model.train.layers: 'last {count} blocks' cannot be selected: the model has {has}")
    first = next(place for place, name in enumerate(names) if name.startswith(f"{blocks[-count]}."))
    return frozenset(names[first:])


def _parts(name: str) -> list[str]:
    """Return a parameter's name and the names of the modules that contain it."""
    pieces = name.split(".")
    return [".".join(pieces[:count]) for count in range(1, len(pieces) + 1)]


def _modules(names: Sequence[str]) -> list[str]:
    """Return a limited number of names of modules two levels deep that have parameters."""
    return list(dict.fromkeys(".".join(name.split(".")[:2]) for name in names))[:_SHOWN]
