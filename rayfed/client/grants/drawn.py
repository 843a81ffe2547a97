"""Recorder of the random numbers that a defence samples, and of its reads of the client's samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_NORMAL = {"randn", "normal", "normal_"}
_OF_FORM = {"size", "dim", "numel", "__len__", "is_floating_point", "new_zeros", "new_ones", "new_empty", "__get__"}
"""Operations that do not read the values of a tensor; `__get__` reads attributes such as `shape`."""
_OF_VALUES = {"T", "data", "grad", "mT", "H", "mH", "real", "imag"}
"""Attributes that contain values."""


class Drawn(TorchFunctionMode):
    """Recorder of the random numbers from one generator, and of reads of the watched tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0
        """Number of random numbers."""
        self.normal: list[Tensor] = []
        """Normal random numbers, one tensor per operation."""
        self.reseeded = False
        """Whether the generator was seeded again."""
        self.read = False
        """Whether a watched tensor was read."""
        self._generator: torch.Generator | None = None
        self._seed = 0
        self._watched: list[Tensor] = []

    def watch(self, generator: torch.Generator, tensors: Iterable[Tensor]) -> None:
        """Start to watch a random generator and the given tensors."""
        self._generator, self._seed, self._watched = generator, generator.initial_seed(), list(tensors)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a PyTorch operation, and record random numbers and reads of watched tensors."""
        given = kwargs or {}
        output = func(*args, **given)
        every = [*args, *given.values()]
        name = getattr(func, "__name__", "")
        if self._generator is not None and any(one is self._generator for one in every):
            self.reseeded = self.reseeded or self._generator.initial_seed() != self._seed
            self.numbers += output.numel() if isinstance(output, Tensor) else 1
            if isinstance(output, Tensor) and name in _NORMAL:
                self.normal.append(output.detach().clone())
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        if name not in _OF_FORM or attribute in _OF_VALUES:
            self.read = self.read or self._reads(every)
        return output

    def _reads(self, given: Iterable[Any]) -> bool:
        """Return whether the arguments, or lists in them, contain a watched tensor."""
        return any(
            any(one is tensor for tensor in self._watched)
            if isinstance(one, Tensor)
            else isinstance(one, list | tuple) and self._reads(one)
            for one in given
        )
