"""The server's part of a run: global weights, and merging of a round's partial results into one step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rayfed.aggregation.base import Aggregation
from rayfed.aggregation.server_optimiser import ServerOptimiser
from rayfed.questions import Memory
from rayfed.update import Named


class TreeFold:
    """Merge numbered partial results in a binary tree fixed by their numbers, in any order of arrival.

    None is the result of a cohort in which every client failed, and changes nothing.

    Floating-point sums depend on the order of summation, and the tree keeps this order fixed. It holds at most a number
    of results that is logarithmic in `count`, per gap in the numbers received so far.
    """

    def __init__(self, aggregation: Aggregation[Any, Any, Any], count: int) -> None:
        self._aggregation, self._count = aggregation, count
        self._nodes: dict[tuple[int, int], Any] = {}

    @property
    def nodes(self) -> dict[tuple[int, int], Any]:
        """Partial results so far by (level, index); adding these to another fold adds all results that they contain."""
        return self._nodes

    def add(self, index: int, partial: Any, level: int = 0) -> None:
        """Add partial result number `index` (0 .. count - 1) once; at a `level` above 0 it contains 2^level results."""
        while (level, index ^ 1) in self._nodes:
            sibling = self._nodes.pop((level, index ^ 1))
            left, right = (sibling, partial) if index & 1 else (partial, sibling)
            partial = self._merged(left, right)
            level, index = level + 1, index >> 1
        self._nodes[level, index] = partial

    def total(self) -> Any:
        """Return the merged result, None if all parts are None; raise `ValueError` before all parts are added.

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
        """Take one optimiser step, and replace the given buffers, keeping the precision of the old ones."""
        self.weights, self.state = self.optimiser.step(self.weights, step, self.state)
        self.buffers = {**self.buffers, **{n: b.to(self.buffers[n].dtype) for n, b in buffers.items()}}
