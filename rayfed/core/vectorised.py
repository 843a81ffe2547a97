"""Apply a function of a model to each sample of a batch, in one `torch.func.vmap` call or in a loop.

vmap does not support branches on values, `.item()`, some recurrent layers, writes of a sample's values into buffers,
and autograd functions without a vmap rule. The loop gives the same results up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from textwrap import shorten
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.utils._python_dispatch import _disable_current_modes

from rayfed.core import seeds
from rayfed.errors import UserError

_LONGEST = 140
"""Maximum number of characters of a quoted error message."""
_REFUSALS: WeakKeyDictionary[nn.Module, dict[Hashable, str]] = WeakKeyDictionary()
"""Error message of each trial of a model; empty if it raised none."""


def find_refusal(model: nn.Module, case: Hashable, trial: Callable[[], object]) -> str:
    """Return the first words of the error that the function `trial` raises; empty if no error is raised.

    The result is cached per model, training mode and `case`, so that all batches are computed in the same way. The
    trial must depend only on the model and the case. It does not change random generators, and counters of operations
    ignore it. Raises the trial's `UserError` and `torch.OutOfMemoryError`.
    """
    key = case, tuple(module.training for module in model.modules())
    known = _REFUSALS.setdefault(model, {})
    if key not in known:
        with seeds.global_stream("trial", cuda=torch.cuda.is_initialized()), _disable_current_modes():
            known[key] = _raised(trial)
    return known[key]


def _raised(trial: Callable[[], object]) -> str:
    try:
        trial()
    except (UserError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # errors of vmap and of the user's model have many types
        return shorten(f"{type(error).__name__}: {error}".partition("\n")[0], _LONGEST, placeholder=" ...")
    return ""


def map_over_samples(one: Callable[..., Any], together: bool) -> Callable[..., Any]:
    """Return a function that applies `one` to each row (first dimension) of tensors and dictionaries of tensors.

    Runs one vmap call if `together`, with different random numbers per sample, or else a loop.
    """
    return vmap(one, randomness="different") if together else map_in_turn(one)


def map_in_turn(one: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that applies `one` to each row of its arguments in a loop and stacks the results.

    Arguments are tensors and dictionaries of tensors; results may also be tuples of these.

    >>> import torch
    >>> from rayfed.core.vectorised import map_in_turn
    >>> map_in_turn(lambda row: {"sum": row.sum()})(torch.ones(2, 3))
    {'sum': tensor([3., 3.])}
    """

    def many(*arguments: Any) -> Any:
        count = len(next(a for a in arguments if isinstance(a, Tensor)))
        return _stacked([one(*(_row(a, i) for a in arguments)) for i in range(count)])

    return many


def _row(argument: Any, index: int) -> Any:
    if isinstance(argument, dict):
        return {name: tensor[index] for name, tensor in argument.items()}
    return argument[index]


def _stacked(results: Sequence[Any]) -> Any:
    first = results[0]
    if isinstance(first, dict):
        return {name: _stacked([result[name] for result in results]) for name in first}
    if isinstance(first, tuple):
        return tuple(_stacked(parts) for parts in zip(*results, strict=True))
    return torch.stack(list(results)) if len(results) > 1 else first[None]
