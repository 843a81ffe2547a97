"""Pending and running calls to actors, and their deadlines."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
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
        self._number = 0
        for call in calls:
            self._queues[call.node].append((call, 0))
            self._number += 1

    def __len__(self) -> int:
        return self._number

    def put_back(self, call: Call, losses: int) -> None:
        """Put a call back at the front of the queue, with the number of actors that it has ended."""
        self._queues[call.node].appendleft((call, losses))
        self._number += 1

    def take(self, node: str, idle: bool) -> tuple[Call, int] | None:
        """Remove and return the next call for an actor on a node; None if the call should wait for another node.

        An `idle` one takes from the node with most calls left where its own, and those for any, are done.
        """
        queue = self._queues[node] or self._queues[""]
        if not queue and idle:
            queue = max(self._queues.values(), key=len)
        if not queue:
            return None
        self._number -= 1
        return queue.popleft()


class Running:
    """The calls that actors are running, by the reference to their first result, and the actors that can take more.

    An actor does its calls in order, so the first of each is the only one that is waited for; where an actor died, it
    is the one that the actor was at. The time of the next one begins when it has ended. There may be thousands of
    actors: only an iteration goes through all of them.
    """

    def __init__(self, slots: Iterable[int]) -> None:
        """Begin with the numbers of the actors that are up."""
        self._queues: defaultdict[int, deque[tuple[ray.ObjectRef[Any], Started]]] = defaultdict(deque)
        self._worked_at: dict[ray.ObjectRef[Any], Started] = {}
        self._ends: list[tuple[float, int, ray.ObjectRef[Any]]] = []
        """Heap of deadlines, numbered as calls began; that of a call which has ended stays until it is the earliest."""
        self._numbers = count()
        self._free: list[tuple[int, int]] = []
        """Heap of how many calls an actor had at some time, and its number; what is no longer true stays likewise."""
        for slot in slots:
            self.up(slot)

    def __iter__(self) -> Iterator[ray.ObjectRef[Any]]:
        """Yield the references of the calls that actors are executing now, in the order in which these began."""
        return iter(self._worked_at)

    def __bool__(self) -> bool:
        return bool(self._worked_at)

    @property
    def busy(self) -> set[int]:
        """Numbers of the actors that have calls."""
        return {started.slot for started in self._worked_at.values()}

    def up(self, slot: int) -> None:
        """Note that an actor can be given calls, with the number that it has."""
        heappush(self._free, (len(self._queues[slot]), slot))

    def freest(self, slots: Container[int]) -> tuple[int, int] | None:
        """Return the fewest calls that an actor has, and its number, the lowest; None if there is none.

        `slots` are the actors that are left: others have ended, and do not come again.
        """
        while self._free:
            queued, slot = self._free[0]
            if slot in slots and queued == len(self._queues[slot]):
                return queued, slot
            heappop(self._free)
        return None

    def pass_over(self) -> None:
        """Leave out the actor that is the freest, and has a call, until that has ended."""
        heappop(self._free)

    def add(self, done: ray.ObjectRef[Any], started: Started) -> None:
        """Add a call that has been given to an actor."""
        self._queues[started.slot].append((done, started))
        if len(self._queues[started.slot]) == 1:
            self._begin(done, started)
        self.up(started.slot)

    def pop(self, done: ray.ObjectRef[Any]) -> Started:
        """Remove and return a call that was executed and has ended or is about to be ended."""
        ended = self._worked_at.pop(done)
        queue = self._queues[ended.slot]
        queue.popleft()
        if queue:
            self._begin(*queue[0])
        self.up(ended.slot)
        return ended

    def _begin(self, done: ray.ObjectRef[Any], started: Started) -> None:
        self._worked_at[done] = started
        if started.call.limit is not None:
            heappush(self._ends, (monotonic() + started.call.limit, next(self._numbers), done))

    def behind(self, slot: int) -> list[Started]:
        """Remove and return the calls queued on an actor behind the one that is being ended."""
        queue = self._queues[slot]
        return [self.pop(queue[0][0]) for _ in range(len(queue))]

    @property
    def worked_at(self) -> Iterator[tuple[ray.ObjectRef[Any], Call]]:
        """The calls that actors are executing now, without those queued behind them."""
        return ((done, started.call) for done, started in self._worked_at.items())

    def next_end(self) -> tuple[float, ray.ObjectRef[Any]] | None:
        """Return the earliest deadline of the executing calls, with its call; None if none has a limit."""
        while self._ends:
            end, _, done = self._ends[0]
            if done in self._worked_at:
                return end, done
            heappop(self._ends)
        return None
