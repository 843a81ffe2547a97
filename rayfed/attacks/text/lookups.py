"""Find the parameter rows that a model looks up for its tokens, by recording a forward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from rayfed.attacks.forward_probe import buffers_for, without_tracking
from rayfed.update import Named, Observation

_TEXTS_AT_ONCE = 512


class Lookup(NamedTuple):
    """Rows of a parameter that a forward pass looks up for a text's tokens."""

    parameter: str
    rows: int
    """Total number of rows."""
    numbers: Tensor
    """Indices of the rows looked up."""


class _Recorder(TorchDispatchMode):
    """Records which rows of some tensors are looked up."""

    def __init__(self, state: Named) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = {tensor.untyped_storage().data_ptr(): name for name, tensor in state.items()}
        self.found: dict[str, Lookup] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS:
            name = self._names.get(args[0].untyped_storage().data_ptr())
            if name is not None and args[0].is_contiguous():
                rows, numbers = _READS[func](*args)
                self.found[name] = Lookup(name, rows, numbers)
        return func(*args, **(kwargs or {}))


def _by_numbers(table: Tensor, numbers: Tensor, *_: Any) -> tuple[int, Tensor]:
    return len(table), numbers


def _selected(table: Tensor, dimension: int, numbers: Tensor) -> tuple[int, Tensor]:
    return len(table), numbers if dimension == 0 else numbers[:0]


def _indexed(table: Tensor, indices: Sequence[Tensor | None]) -> tuple[int, Tensor]:
    """Return row counts and indices over all indexed leading dimensions."""
    numbers = torch.zeros((), dtype=torch.int64, device=table.device)
    for size, index in zip(table.shape, indices, strict=False):
        if index is None or index.dtype != torch.int64:
            return 0, numbers
        numbers = numbers * size + index
    return prod(table.shape[: len(indices)]), numbers


_READS: dict[Any, Callable[..., tuple[int, Tensor]]] = {
    torch.ops.aten.embedding.default: _by_numbers,
    torch.ops.aten.index_select.default: _selected,
    torch.ops.aten.index.Tensor: _indexed,
}
"""Operations that look up rows -> function that returns the number of rows and the indices."""


def rows_of_places(observation: Observation, model: nn.Module) -> Lookup | None:
    """Return the rows (V, L) that each token looks up at each position, in a parameter where all rows differ, or None.

    Returns None if tokens share rows between positions, or if no gradient of such a parameter is observed.
    """
    length, vocabulary = observation.sample.shape[0], observation.sample.largest + 1
    everywhere = torch.arange(vocabulary)[:, None].expand(-1, length)
    for name, (_, _, numbers) in _read(observation, model, everywhere[-2:]).items():
        if numbers.shape == (2, length) and len(numbers.unique()) == numbers.numel():
            parts = [_read(observation, model, some)[name] for some in everywhere.split(_TEXTS_AT_ONCE)]
            return parts[0]._replace(numbers=torch.cat([part.numbers for part in parts]))
    return None


def _read(observation: Observation, model: nn.Module, texts: Tensor) -> dict[str, Lookup]:
    """Return the rows that texts (n, L) look up, by parameter."""
    device = next(iter(observation.weights.values())).device
    network = without_tracking(model).to(device)
    state = {name: t.contiguous() for name, t in {**observation.weights, **buffers_for(network, observation)}.items()}
    recorder = _Recorder({name: state[name] for name in observation.update})
    with torch.no_grad(), recorder:
        functional_call(network, state, (texts.to(device),))
    return recorder.found
