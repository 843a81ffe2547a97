"""Server side of a run: the global weights, and the merging of a round's partial results into one step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rayfed.aggregation.base import Aggregation
from rayfed.aggregation.server_optimiser import ServerOptimiser
from rayfed.core.questions import Memory
from rayfed.update import Named


class TreeFold:
    """Binary tree that merges numbered partial results. The result does not depend on the order of arrival.

    None is the result of a cohort in which every client failed, and changes nothing.

    Floating-point sums depend on the order of summation, and the tree keeps this order fixed. It holds at most a number
    of results that is logarithmic in `count`, per gap in the numbers received so far.
    """

    def __init__(self, aggregation: Aggregation[Any, Any, Any], count: int) -> None:
        self._aggregation, self._count = aggregation, count
        self._nodes: dict[tuple[int, int], Any] = {}

    @property
    def nodes(self) -> dict[tuple[int, int], Any]:
        """Return the partial results so far, by (level, index). Another `TreeFold` can add them."""
        return self._nodes

    def add(self, index: int, partial: Any, level: int = 0) -> None:
        """Add the partial result with number `index`. A result at a `level` above 0 merges 2^level results."""
        while (level, index ^ 1) in self._nodes:
            sibling = self._nodes.pop((level, index ^ 1))
            left, right = (sibling, partial) if index & 1 else (partial, sibling)
            partial = self._merged(left, right)
            level, index = level + 1, index >> 1
        self._nodes[level, index] = partial

    def total(self) -> Any:
        """Return the merged result of all partial results; None if all are None. Raises `ValueError` if one is missing.

        Subtrees of an uneven count are joined from the left.
        """
        if sum(1 << level for level, _ in self._nodes) < self._count:
            raise ValueError(f"not all of the {self._count} partial results have been added")
        ordered = sorted(self._nodes, key=lambda node: node[1] << node[0])
        total = self._nodes[ordered[0]]
        for node in ordered[1:]:
            total = self._merged(total, self._nodes[node])
        return total

    def _merged(self, left: Any, right: Any) -> Any:
        if left is None or right is None:
            return right if left is None else left
        return self._aggregation.merge(left, right)


@dataclass
class GlobalModel:
    """Global weights of one arm, the optimiser that updates them, and the server's state."""

    weights: Named
    buffers: Named
    optimiser: ServerOptimiser
    state: dict[str, Named] = field(default_factory=dict)
    """State of the optimiser."""
    memory: Memory = field(default_factory=dict)
    """State of the aggregation rule."""

    def apply(self, step: Named, buffers: Named) -> None:
        """Take one step of the optimiser, and replace the given buffers in the precision of the model's buffers."""
        self.weights, self.state = self.optimiser.step(self.weights, step, self.state)
        self.buffers = {**self.buffers, **{n: b.to(self.buffers[n].dtype) for n, b in buffers.items()}}
