"""Layout of an update as one vector of numbers, as needed for encryption and masking."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import filter as filter_names

import numpy as np
import torch

from rayfed.core.number_types import check_types
from rayfed.errors import UserError, nearest
from rayfed.update import Named, Shapes, Update

LayerBounds = tuple[tuple[str, float], ...]
"""Patterns (`fnmatch`) of tensors' names, and the clip bound of each."""


@dataclass(frozen=True)
class UpdateLayout:
    """Positions of an update's values in its vector: parameters first, then buffers."""

    tensors: Shapes
    buffers: Shapes

    @classmethod
    def from_update(cls, update: Update) -> UpdateLayout:
        """Return the layout of the vector of an update's values."""
        return cls(_shapes(update.tensors), _shapes(update.buffers))

    @property
    def size(self) -> int:
        """Return the length D of the vector."""
        return _size(self.tensors) + _size(self.buffers)

    def bounds(self, clip: float, clip_buffers: float, clip_layers: LayerBounds = ()) -> np.ndarray:
        """Return the clip bound of each value of the vector, (D,): that of the last pattern that matches its tensor.

        Raises `UserError` for a pattern in `clip_layers` that matches no tensor.
        """
        names = [name for name, _ in self.tensors]
        by_name = dict.fromkeys(names, clip)
        for pattern, bound in clip_layers:
            matching = filter_names(names, pattern)
            if not matching:
                raise UserError(f"clip_layers: no tensor matches '{pattern}': {nearest(pattern, names)}")
            by_name |= dict.fromkeys(matching, bound)
        sizes = [_size((shape,)) for shape in self.tensors]
        return np.repeat([*by_name.values(), clip_buffers], [*sizes, _size(self.buffers)])

    def split_by_name(self, values: np.ndarray) -> tuple[Named, Named]:
        """Split a vector into parameters and buffers by name, in the vector's precision."""
        split = _size(self.tensors)
        return _named(values[:split], self.tensors), _named(values[split:], self.buffers)


def flatten_update(update: Update) -> np.ndarray:
    """Return an update's values as a vector, (D,) float64. Raises `UserError` for types except float32 and float64."""
    check_types(update.tensors | update.buffers, "encryption")
    parts = [*update.tensors.values(), *update.buffers.values()]
    return np.concatenate([t.detach().cpu().numpy().ravel() for t in parts]).astype(np.float64)


def to_single(tensors: Named) -> Named:
    """Convert tensors to single precision, the precision of the model's parameters."""
    return {name: t.float() for name, t in tensors.items()}


def _shapes(tensors: Named) -> Shapes:
    return tuple((name, tuple(t.shape)) for name, t in tensors.items())


def _size(shapes: Shapes) -> int:
    return sum(int(np.prod(shape)) for _, shape in shapes)


def _named(values: np.ndarray, shapes: Shapes) -> Named:
    starts = np.cumsum([0, *(int(np.prod(shape)) for _, shape in shapes)])
    tensors = torch.from_numpy(values)
    return {
        name: tensors[low : low + int(np.prod(shape))].reshape(shape)
        for (name, shape), low in zip(shapes, starts, strict=False)
    }
