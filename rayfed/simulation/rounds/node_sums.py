"""Sums of a round's partial results on the cluster's nodes, before the sums are sent to the server.

A node has consecutive cohorts, so that its partial results belong to one part of the server's tree. The assignment to
nodes does not change any bit of the sum, because the tree depends only on the numbers of the cohorts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from rayfed.simulation.executors.base import Call, Gone, Lost, Ref, Run
from rayfed.simulation.executors.stragglers import Partials, Portion, Result

FAN_IN = 8
"""Maximum number of partial results that one call adds; an actor holds all of them at once."""
LEAST = 100_000
"""Minimum bytes of a model for sums on nodes. Partial results of smaller models are sent with the reports, because
adding them at the server costs less than further calls."""
_RETRIES = 3
"""Number of times that cohorts of lost nodes are trained again, before the round is rerun."""


def assign_homes(weights: Sequence[float], nodes: Mapping[str, int]) -> list[str]:
    """Assign each portion of work to a node, given the portions' weights and the number of actors by node.

    Each node has consecutive portions, with a weight in proportion to its actors.
    """
    each, names = np.array(weights, float), sorted(nodes)
    if not len(each):
        return []
    shares = np.cumsum([nodes[name] for name in names])
    middles = (each.cumsum() - each / 2) * shares[-1] / max(each.sum(), 1e-9)
    return [names[place] for place in np.minimum(np.searchsorted(shares, middles, side="right"), len(names) - 1)]


@dataclass(frozen=True, eq=False)
class _Held:
    """Partial results that stay on the worker that computed them."""

    node: str
    partials: Partials
    portions: tuple[Portion, ...]
    """Portions that are included in the sums."""

    @property
    def arm(self) -> str:
        """Name of the arm."""
        return self.portions[0][0].arm.name

    @property
    def place(self) -> tuple[str, int]:
        """Arm and number of the first cohort."""
        return self.arm, min(portion[0].index for portion in self.portions)


@dataclass
class NodeSums:
    """Sums of a round's partial results, computed first within each node and then between nodes."""

    run: Run
    """Run calls on client workers."""
    again: Callable[[Sequence[Portion]], Iterator[Result]]
    """Train portions again whose partial results are lost."""
    sent: Mapping[str, Ref]
    """Message of the server to the clients of the round, by arm."""
    count: Mapping[str, int]
    """Number of cohorts of each arm."""
    _held: list[_Held] = field(default_factory=list)

    def add(self, result: Result) -> None:
        """Register the partial results of a portion of work, which stay on the node that computed them."""
        self._held.append(_Held(result.node, result.partials, (result.portion,)))

    def merge(self) -> Iterator[tuple[str, Partials]]:
        """Add up partial results on the nodes, and yield each arm's remaining sums for the server as (arm, sum).

        Partial results are added on their node first; then up to `FAN_IN` nodes send their sums to one of them. Cohorts
        whose results are lost with a node are trained again. Raises `Lost` after too many losses.
        """
        losses = 0
        while groups := self._groups():
            lost: list[Portion] = []
            for call, result, [*partials], node in self.run([self._call(group) for group in groups]):
                group = call.tag
                self._held = [one for one in self._held if one not in group]
                portions = tuple(portion for one in group for portion in one.portions)
                if isinstance(result, Gone):
                    lost += portions
                else:
                    self._held.append(_Held(node, partials[0], portions))
            losses += bool(lost)
            if losses > _RETRIES:
                raise Lost("sums of updates were lost", f"nodes that held sums died {losses} times")
            for again in self.again(lost) if lost else ():
                self.add(again)
        yield from ((one.arm, one.partials) for one in self._held)

    def _groups(self) -> list[list[_Held]]:
        """Return the next groups to add, one call each; empty if the server can add the rest."""
        by_node = sorted(self._held, key=lambda one: (one.arm, one.node, one.place))
        on_nodes = [list(own) for _, own in groupby(by_node, key=lambda one: (one.arm, one.node))]
        groups = [group for own in on_nodes for group in _chunks(own)]
        if groups:
            return groups
        nodes = sorted((own[0] for own in on_nodes), key=lambda one: one.place)
        arms = [list(own) for _, own in groupby(nodes, key=lambda one: one.arm)]
        return [group for own in arms if len(own) > FAN_IN for group in _chunks(own)]

    def _call(self, group: list[_Held]) -> Call:
        arm, node = group[0].arm, group[0].node
        arguments = arm, self.sent[arm], self.count[arm], *(one.partials for one in group)
        return Call("fold", arguments, group, returns=2, node=node, losable=True)


def _chunks(held: list[_Held]) -> list[list[_Held]]:
    """Return parts of at most `FAN_IN` items, without parts of one item."""
    parts = (held[i : i + FAN_IN] for i in range(0, len(held), FAN_IN))
    return [part for part in parts if len(part) > 1]
