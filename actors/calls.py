"""Pending and running calls to actors, and their deadlines."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from time import monotonic
from typing import Any

import ray
from ray.actor import ActorHandle

from rayfed.engine.executor import Call


@dataclass(frozen=True)
class Started:
    """A call that has been given to an actor."""

    slot: int
    """Number of the actor, which no other has had."""
    actor: ActorHandle[Any]
    call: Call
    losses: int
    """Number of actors that the call has ended before."""
    rest: list[ray.ObjectRef[Any]]
    """References to the call's results but the first."""


class Waiting:
    """Queue of calls not yet given to an actor, with a queue of its own for each preferred node."""

    def __init__(self, calls: Iterable[Call]) -> None:
        self._queues: defaultdict[str, deque[tuple[Call, int]]] = defaultdict(deque)
        for call in calls:
            self._queues[call.node].append((call, 0))

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def put_back(self, call: Call, losses: int) -> None:
        """Put a call back at the front of the queue, with the number of actors that it has ended."""
        self._queues[call.node].appendleft((call, losses))

    def take(self, node: str, idle: bool) -> tuple[Call, int] | None:
        """Remove and return the next call for an actor on a node; None if the call should wait for another node.

        An `idle` one takes from the node with most calls left where its own, and those for any, are done.
        """
        queue = self._queues[node] or self._queues[""]
        if not queue and idle:
            queue = max(self._queues.values(), key=len)
        return queue.popleft() if queue else None


class Running:
    """The calls that actors are running, by the reference to their first result.

    An actor works at the first of its calls: the time of the next one begins when that has ended.
    """

    def __init__(self) -> None:
        self._calls: dict[ray.ObjectRef[Any], Started] = {}
        self._began: dict[int, float] = {}
        self.queued: defaultdict[int, int] = defaultdict(int)
        """Number of calls that each actor has been handed."""

    def __iter__(self) -> Iterator[ray.ObjectRef[Any]]:
        return iter(self._calls)

    def __bool__(self) -> bool:
        return bool(self._calls)

    def add(self, done: ray.ObjectRef[Any], started: Started) -> None:
        """Add a call that has been given to an actor."""
        if not self.queued[started.slot]:
            self._began[started.slot] = monotonic()
        self._calls[done] = started
        self.queued[started.slot] += 1

    def pop(self, done: ray.ObjectRef[Any]) -> Started:
        """Remove and return a call that has ended or is about to be ended."""
        ended = self._calls.pop(done)
        self._began[ended.slot] = monotonic()
        self.queued[ended.slot] -= 1
        return ended

    def head(self, done: ray.ObjectRef[Any]) -> ray.ObjectRef[Any]:
        """Return the reference to the oldest call of the actor that runs this one; an unknown reference unchanged.

        An actor does its calls in order: where it died, this is the one that it was at.
        """
        if done not in self._calls:
            return done
        slot = self._calls[done].slot
        return next(first for first, started in self._calls.items() if started.slot == slot)

    def behind(self, slot: int) -> list[Started]:
        """Remove and return the calls queued on an actor behind the one that is being ended."""
        return [self.pop(done) for done in [d for d, started in self._calls.items() if started.slot == slot]]

    @property
    def worked_at(self) -> Iterator[tuple[ray.ObjectRef[Any], Call]]:
        """The calls that actors are executing now, without those queued behind them."""
        return ((done, self._calls[done].call) for done in self._heads.values())

    @property
    def _heads(self) -> dict[int, ray.ObjectRef[Any]]:
        heads: dict[int, ray.ObjectRef[Any]] = {}
        for done, started in self._calls.items():
            heads.setdefault(started.slot, done)
        return heads

    def next_end(self) -> tuple[float, ray.ObjectRef[Any]] | None:
        """Return the earliest deadline of the executing calls, with its call; None if none has a limit."""
        limits = [(done, self._began[slot], self._calls[done].call.limit) for slot, done in self._heads.items()]
        ends = [(began + limit, done) for done, began, limit in limits if limit is not None]
        return min(ends, key=lambda end: end[0], default=None)
