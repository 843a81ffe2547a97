"""Convert the states that users give (arrays or tensors, by name or in order) to tensors by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from rayfed.errors import UserError
from rayfed.update import Named

Values: TypeAlias = "Tensor | np.ndarray | np.generic | Sequence[Any] | float"
Arrays: TypeAlias = "Mapping[str, Values] | Sequence[Values]"
"""Tensors or arrays by name, or in the order of `model.state_dict()`, as Flower's `NumPyClient` returns them."""
_COUNTER = "num_batches_tracked"
_EXTRA = "_extra_state"
"""Key of a state dict under which a module stores objects that are not tensors."""
_NO_BATCH = torch.zeros((), dtype=torch.int64)


def is_counter(name: str) -> bool:
    """Return whether a tensor's name is that of a batch norm's counter of batches, which affects no output."""
    return name.endswith(_COUNTER)


def is_count(value: Any) -> bool:
    """Return whether a value is a positive integer."""
    return isinstance(value, int | np.integer) and bool(value >= 1)


def to_tensor(what: str, value: Any) -> Tensor:
    """Convert a tensor, an array, a number or nested lists of numbers to a tensor without autograd history.

    Raises `UserError` for anything else; `what` names the value in the message.
    """
    if isinstance(value, Tensor):
        return value.detach()
    try:
        array = np.asarray(value)
        if array.dtype.kind not in "biufc":
            raise TypeError(f"its type is {array.dtype}")
        return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=True))
    except (TypeError, ValueError) as error:
        said = " ".join(str(error).split())
        raise UserError(f"{what}: found a {type(value).__name__}; expected a tensor or numbers ({said})") from error


def name_arrays(what: str, given: Arrays, model: nn.Module) -> Named:
    """Convert a model's state or gradient, given by name or in order, to a dictionary of tensors by name.

    A sequence has the order of `model.state_dict()`, with or without counters, or of `model.parameters()`. Counters of
    batch norms that have another shape, as `torch.Tensor(array)` makes them, are replaced by the model's.
    Raises `UserError` for values that are not numbers, and for a sequence with another length or other shapes than the
    model's.

    >>> import torch
    >>> from rayfed.core.arrays import name_arrays
    >>> model = torch.nn.Linear(3, 2)
    >>> list(name_arrays("sent", [tensor.numpy() for tensor in model.state_dict().values()], model))
    ['weight', 'bias']
    """
    own = {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}
    named = given if isinstance(given, Mapping) else _in_order(what, given, own, model)
    tensors = {}
    for key, value in named.items():
        name = str(key)
        if name.endswith(_EXTRA) and not isinstance(value, Tensor):
            continue
        if isinstance(value, Mapping):
            raise UserError(f"{what}: '{name}' is a mapping, not a tensor: give the state dict that it contains")
        tensor = to_tensor(f"{what}: '{name}'", value)
        tensors[name] = _counter(tensor, own.get(name, _NO_BATCH)) if is_counter(name) else tensor
    return tensors


def _counter(given: Tensor, own: Tensor) -> Tensor:
    """Return a counter as an integer without dimensions; the model's `own` if the given tensor is not a number."""
    return given.long() if given.ndim == 0 and given.isfinite() else own.detach().clone()


def _in_order(what: str, given: Any, own: Named, model: nn.Module) -> dict[str, Any]:
    """Map the names of the model's tensors to arrays given in their order."""
    one_array = isinstance(given, Tensor) or (isinstance(given, np.ndarray) and given.dtype != object)
    if one_array or isinstance(given, nn.Module | str) or not hasattr(given, "__iter__"):
        raise UserError(
            f"{what}: found a {type(given).__name__}; give a state dict, or a list of arrays in the order of "
            f"model.state_dict()"
        )
    values, whole = list(given), list(own)
    parameters = [name for name, _ in model.named_parameters() if name in own]
    orders = whole, [name for name in whole if not is_counter(name)], parameters
    names = next((order for order in orders if len(order) == len(values)), whole)
    for place, (name, value) in enumerate(zip_longest(names, values)):
        found = None if place >= len(values) else tuple(to_tensor(f"{what}: array {place}", value).shape)
        expected = None if name is None else tuple(own[name].shape)
        if found != expected and not (name and found is not None and is_counter(name)):
            has = "no array" if found is None else f"an array of shape {found}"
            wants = "no tensor" if name is None else f"'{name}' of shape {expected}"
            raise UserError(
                f"{what}: {len(values)} arrays for the model's {len(own)} tensors. At index {place} the model has "
                f"{wants}, and the list has {has}: give all arrays in the order of model.state_dict()"
            )
    return dict(zip(names, values, strict=True))
