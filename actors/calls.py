"""Queues of pending and running calls to actors, with the calls' deadlines."""

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

from rayfed.simulation.executors.base import Call


@dataclass(frozen=True)
class Started:
    """Call that was sent to an actor."""

    slot: int
    """Number of the actor. Numbers are never reused."""
    actor: ActorHandle[Any]
    call: Call
    losses: int
    """Number of actors that died during this call before."""
    rest: list[ray.ObjectRef[Any]]
    """References to the call's results, without the first."""


class Waiting:
    """Calls that were not sent to an actor yet, in one queue per preferred node."""

    def __init__(self, calls: Iterable[Call]) -> None:
        self._queues: defaultdict[str, deque[tuple[Call, int]]] = defaultdict(deque)
        self._number = 0
        for call in calls:
            self._queues[call.node].append((call, 0))
            self._number += 1

    def __len__(self) -> int:
        return self._number

    def put_back(self, call: Call, losses: int) -> None:
        """Put a call back at the front of its queue; `losses` is the number of actors that died during the call."""
        self._queues[call.node].appendleft((call, losses))
        self._number += 1

    def take(self, node: str, idle: bool) -> tuple[Call, int] | None:
        """Remove and return the next call for an actor on `node`; None if the waiting calls should go to other nodes.

        An `idle` actor also takes calls of other nodes, from the longest queue.
        """
        queue = self._queues[node] or self._queues[""]
        if not queue and idle:
            queue = max(self._queues.values(), key=len)
        if not queue:
            return None
        self._number -= 1
        return queue.popleft()


class Running:
    """Calls that were sent to actors, by the reference to a call's first result, and actors that can take more calls.

    An actor runs its calls in order, so only the first call of each actor is executing and has a deadline. If an actor
    dies, it died during this call. Methods except the iteration are fast for thousands of actors.
    """

    def __init__(self, slots: Iterable[int]) -> None:
        """Initialise without calls; `slots` are the numbers of the actors that have started."""
        self._queues: defaultdict[int, deque[tuple[ray.ObjectRef[Any], Started]]] = defaultdict(deque)
        self._worked_at: dict[ray.ObjectRef[Any], Started] = {}
        self._ends: list[tuple[float, int, ray.ObjectRef[Any]]] = []
        """Heap of deadlines, in the order of starts. Deadlines of ended calls are removed when they come first."""
        self._numbers = count()
        self._free: list[tuple[int, int]] = []
        """Heap of (number of calls, actor). Outdated entries are removed when they come first."""
        for slot in slots:
            self.up(slot)

    def __iter__(self) -> Iterator[ray.ObjectRef[Any]]:
        """Yield the result references of the executing calls, in the order in which the calls started."""
        return iter(self._worked_at)

    def __bool__(self) -> bool:
        return bool(self._worked_at)

    @property
    def busy(self) -> set[int]:
        """Return the numbers of the actors that are executing a call."""
        return {started.slot for started in self._worked_at.values()}

    def up(self, slot: int) -> None:
        """Register that an actor can take calls, with the actor's present number of calls."""
        heappush(self._free, (len(self._queues[slot]), slot))

    def freest(self, slots: Container[int]) -> tuple[int, int] | None:
        """Return the actor with the fewest calls, as (number of calls, actor's number); None if there is no actor.

        `slots` are the actors that have not ended. Among equal actors, the lowest number is returned.
        """
        while self._free:
            queued, slot = self._free[0]
            if slot in slots and queued == len(self._queues[slot]):
                return queued, slot
            heappop(self._free)
        return None

    def pass_over(self) -> None:
        """Skip the actor that `freest` returned until the actor's present call has ended."""
        heappop(self._free)

    def add(self, done: ray.ObjectRef[Any], started: Started) -> None:
        """Add a call that was sent to an actor; `done` is the reference to the call's first result."""
        self._queues[started.slot].append((done, started))
        if len(self._queues[started.slot]) == 1:
            self._begin(done, started)
        self.up(started.slot)

    def pop(self, done: ray.ObjectRef[Any]) -> Started:
        """Remove and return an executing call that has ended or whose actor will be ended."""
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
        """Remove and return the calls that are queued on an actor after the call that `pop` removed."""
        queue = self._queues[slot]
        return [self.pop(queue[0][0]) for _ in range(len(queue))]

    @property
    def worked_at(self) -> Iterator[tuple[ray.ObjectRef[Any], Call]]:
        """Return the executing calls with the references to their first results, without queued calls."""
        return ((done, started.call) for done, started in self._worked_at.items())

    def next_end(self) -> tuple[float, ray.ObjectRef[Any]] | None:
        """Return the earliest deadline of the executing calls, and the call's reference; None if no call has one."""
        while self._ends:
            end, _, done = self._ends[0]
            if done in self._worked_at:
                return end, done
            heappop(self._ends)
        return None
