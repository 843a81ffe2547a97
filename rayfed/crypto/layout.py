"""Layout of an update as one vector of numbers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from rayfed.number_types import check_types
from rayfed.update import Named, Shapes, Update


@dataclass(frozen=True)
class Layout:
    """Positions of an update's values in its vector: parameters first, then buffers."""

    tensors: Shapes
    buffers: Shapes

    @classmethod
    def of(cls, update: Update) -> Layout:
        """Return the layout of an update's vector."""
        return cls(_shapes(update.tensors), _shapes(update.buffers))

    @property
    def size(self) -> int:
        """Length D of the vector."""
        return _size(self.tensors) + _size(self.buffers)

    def bounds(self, clip: float, clip_buffers: float) -> np.ndarray:
        """Return each value's clip bound, (D,)."""
        return np.repeat([clip, clip_buffers], [_size(self.tensors), _size(self.buffers)])

    def named(self, values: np.ndarray) -> tuple[Named, Named]:
        """Return a vector's parameters and buffers by name, in the vector's precision."""
        split = _size(self.tensors)
        return _named(values[:split], self.tensors), _named(values[split:], self.buffers)


def flat(update: Update) -> np.ndarray:
    """Return the values of an update, (D,) float64; raise `UserError` for types other than float32 and float64."""
    check_types(update.tensors | update.buffers, "encryption")
    parts = [*update.tensors.values(), *update.buffers.values()]
    return np.concatenate([t.detach().cpu().numpy().ravel() for t in parts]).astype(np.float64)


def single(tensors: Named) -> Named:
    """Return tensors in single precision, the parameters' precision."""
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
