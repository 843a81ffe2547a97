"""Find products of a model's activations with its weights, by recording a forward pass.

For y = x W, with the vectors of positions as rows of x, the gradient of W is x^T times that of y. Its columns lie in
the span of the rows of x. Module names, storing W or W^T, and packing several layers into one parameter do not matter.
The factor of a product is a view of a parameter, and the same view of the parameter's gradient is the factor's
gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from rayfed.attacks.forward_probe import buffers_for, without_tracking
from rayfed.update import Named, Observation

_OF_TWO = {torch.ops.aten.mm.default: 0, torch.ops.aten.bmm.default: 0, torch.ops.aten.addmm.default: 1}
"""Matrix multiplications -> index of their first factor."""


@dataclass(frozen=True)
class Factor:
    """Weight matrix (in, out) that multiplies activations: a view of a parameter."""

    name: str
    size: tuple[int, int]
    stride: tuple[int, int]
    offset: int

    @classmethod
    def of(cls, name: str, view: Tensor) -> Factor:
        """Return the weight matrix for a view of the parameter `name`."""
        stride, offset = view.stride(), int(view.storage_offset())
        return cls(name, (view.shape[0], view.shape[1]), (stride[0], stride[1]), offset)

    def gradient(self, update: Named) -> Tensor:
        """Return the weight matrix's gradient (in, out) from the gradients of the parameters."""
        return update[self.name].contiguous().as_strided(self.size, self.stride, self.offset)


Runs = list[tuple[Tensor, Factor]]
"""Products in a forward pass: activations in rows, and the factor that multiplies them."""


class _Reached(Exception):
    """Raised to end a forward pass at a product."""


class _Recorder(TorchDispatchMode):
    """Records the products with some tensors in a forward pass, and ends it after product number `last`."""

    def __init__(self, state: Named, last: int | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = {tensor.untyped_storage().data_ptr(): name for name, tensor in state.items()}
        self._last = last
        self.found: Runs = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _OF_TWO:
            first = _OF_TWO[func]
            self._note(*args[first : first + 2])
            if self._last is not None and len(self.found) > self._last:
                raise _Reached
        return func(*args, **(kwargs or {}))

    def _note(self, left: Tensor, right: Tensor) -> None:
        """Record the products of two matrices, or of two equally long stacks, if one factor is a weight."""
        names = [self._names.get(matrix.untyped_storage().data_ptr()) for matrix in (left, right)]
        if names[0] is not None and names[1] is None:
            left, right, names = right.mT, left.mT, names[::-1]  # (W x)^T = x^T W^T
        name = names[1]
        if name is None or names[0] is not None:
            return
        if right.ndim == 3 and (len(right) == 1 or right.stride(0) == 0):  # one weight for the whole stack
            left, right = left.flatten(0, 1), right[0]
        pairs = [(left, right)] if right.ndim == 2 else zip(left, right, strict=True)
        self.found += [(rows, Factor.of(name, weight)) for rows, weight in pairs]


@dataclass(frozen=True)
class Entrance:
    """Product of weight matrices with an input vector for each position, or for each text."""

    factors: tuple[Factor, ...]
    inputs: Callable[[Tensor], Tensor]
    """Function from token numbers (n, L) to the input vectors, (n, L, in), or (n, 1, in) for whole texts."""

    @property
    def names(self) -> frozenset[str]:
        """Return the names of the parameters that hold the weight matrices."""
        return frozenset(factor.name for factor in self.factors)

    def gradient(self, update: Named) -> Tensor:
        """Return the gradients of all weight matrices, concatenated along the outputs, (in, out)."""
        return torch.cat([factor.gradient(update) for factor in self.factors], 1)

    def is_by_place(self, text: Tensor) -> bool:
        """Return whether the input vector at each position of a text (L,) depends only on the token at the position."""
        alone = torch.stack([self.inputs(token.expand(1, len(text)))[0, at] for at, token in enumerate(text)])
        return torch.allclose(self.inputs(text[None])[0], alone, rtol=1e-4, atol=1e-5)


def entrances(observation: Observation, model: nn.Module, whole: bool = False) -> list[Entrance]:
    """Return the model's products with weights whose gradients are observed, in the order of the forward pass.

    Their inputs have a vector for each position, or one for each text if `whole`.
    """
    device = next(iter(observation.weights.values())).device
    network = without_tracking(model).to(device)
    state = {name: t.contiguous() for name, t in {**observation.weights, **buffers_for(network, observation)}.items()}
    length = 1 if whole else observation.sample.shape[0]
    seen = {name: state[name] for name in observation.update}

    def run(numbers: Tensor, last: int | None = None) -> Runs:
        recorder = _Recorder(seen, last)
        with torch.no_grad(), _unfused(), recorder, suppress(_Reached):
            functional_call(network, state, (numbers.to(device),))
        return recorder.found

    def entering(last: int, transposed: bool, numbers: Tensor) -> Tensor:
        rows = run(numbers, last)[last][0]
        order = (length, len(numbers)) if transposed else (len(numbers), length)
        vectors: Tensor = rows.unflatten(0, order)
        return vectors.transpose(0, 1) if transposed else vectors

    probe = observation.sample.noise(2, torch.Generator().manual_seed(0))
    found = _grouped(run(probe), [run(text[None]) for text in probe], length)
    return [Entrance(factors, partial(entering, first, transposed)) for first, transposed, factors in found]


def _grouped(both: Runs, alone: list[Runs], length: int) -> Iterator[tuple[int, bool, tuple[Factor, ...]]]:
    """Yield the first product for each input with a row per position, its row order (see `_transposed`), and factors.

    `both` are the products of two texts together, `alone` those of each text by itself.
    """
    places: dict[int, tuple[bool, list[Factor]]] = {}
    for index, (rows, factor) in enumerate(both):
        known = next((first for first in places if _equal(both[first][0], rows)), None)
        if known is not None:
            places[known][1].append(factor)
        elif (transposed := _transposed(rows, [one[index][0] for one in alone], length)) is not None:
            places[index] = transposed, [factor]
    for first, (transposed, factors) in places.items():
        yield first, transposed, tuple(factors)


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)


def _transposed(rows: Tensor, alone: list[Tensor], length: int) -> bool | None:
    """Return whether rows of two texts are ordered by position, not by text, or None if they are not per position.

    `alone` are the rows of each text by itself.
    """
    if len(rows) != 2 * length or any(len(own) != length for own in alone):
        return None
    for transposed, parts in ((False, rows.unflatten(0, (2, length))), (True, rows.unflatten(0, (length, 2)))):
        texts = parts.unbind(1 if transposed else 0)
        if all(torch.allclose(text, own, rtol=1e-4, atol=1e-5) for text, own in zip(texts, alone, strict=True)):
            return transposed
    return None


@contextmanager
def _unfused() -> Iterator[None]:
    """Make attention compute its products one by one in the block."""
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
