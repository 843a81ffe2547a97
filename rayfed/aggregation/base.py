"""The contract of an aggregation: how many updates become one step of the server.

It is written as a fold, so that updates are reduced where they are made and the server never holds more than a few
partial results: `partial` turns one cohort's updates into a partial result (on a client actor), `merge` joins
two of them (on the server, always in the same tree order, so the result does not depend on what arrived first), and
`combine` turns the last one into the step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from rayfed.update import Named, Update


class Aggregation:
    """Base of every aggregation rule."""

    def partial(self, updates: Iterable[Update]) -> Any:
        """Reduce the updates of one cohort; what it returns is sent to the server and must be picklable."""
        raise NotImplementedError

    def merge(self, left: Any, right: Any) -> Any:
        """Join two partial results; the order of the arguments is the order of the cohorts."""
        raise NotImplementedError

    def combine(self, total: Any, generator: torch.Generator) -> tuple[Named, Named]:
        """The step that the server optimiser takes (same sign as a gradient), and the averaged float buffers.

        `generator` is the server's only source of randomness.
        """
        raise NotImplementedError

    def idle(self, weights: Named, generator: torch.Generator) -> Named:
        """The step after a round in which no client was drawn: none."""
        return {name: torch.zeros_like(w) for name, w in weights.items()}
