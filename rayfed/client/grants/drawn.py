"""How many random numbers a defence draws from the randomness that it is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class Drawn(TorchFunctionMode):
    """Counts the numbers that operations draw from one generator."""

    def __init__(self) -> None:
        super().__init__()
        self.generator: torch.Generator | None = None
        self.numbers = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation; what it makes with the generator counts."""
        given = kwargs or {}
        output = func(*args, **given)
        if self.generator is not None and any(one is self.generator for one in (*args, *given.values())):
            self.numbers += output.numel() if isinstance(output, Tensor) else 1
        return output
