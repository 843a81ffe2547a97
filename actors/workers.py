"""Dispatch of calls to a pool of actors: results as they finish, calls repeated elsewhere when an actor dies.

Every call is a pure function of its arguments, so a call that was lost with its actor is made again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import count
from math import inf
from time import monotonic
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import ObjectLostError, RayTaskError

from actors import standings
from actors.actor_pool import ActorPool
from actors.calls import Running, Started, Waiting
from actors.ray_errors import DEATHS, Loss, brief, loss_of, original
from actors.transport import Held
from rayfed.engine.executor import Call, Crashed, Done, Gone, Hear, Overdue
from rayfed.errors import ResourceError

START_TIMEOUT = 900.0
"""Seconds that actors may take to start; an autoscaling cluster needs minutes for a new node."""

LISTENING = 1.0
"""Seconds between looks at how far searches are."""

PATIENCE = 30.0
"""Seconds after which a pool that has lost all its actors asks for the place of another's."""


class ActorsLost(ResourceError):
    """Error for one call that has ended several actors, and that cannot be divided to find the cause."""


class Workers:
    """Pool of equal actors that run calls; dead ones are replaced, and their number follows the cluster.

    Where Ray ends some because a machine has too little memory, half as many go on. A call that is too large even for
    one alone is the cause, and the others come back.
    """

    RETRIES = 3
    """Actors that one call may lose, or that may die one after another as they start."""

    def __init__(
        self,
        actor_pool: ActorPool,
        size: int,
        *made_of: Any,
        make_room: Callable[[], None] = lambda: None,
        look: Callable[[bool], None] = lambda lost: None,
    ) -> None:
        """Start `size` actors; `made_of` are the arguments of `ActorPool.acquire`.

        `make_room` is called where all have died and no new one comes up. `look` is called again and again while calls
        are done, with whether an actor was lost: it may `resize`.
        """
        self._actor_pool, self._size, self._made_of, self._make_room = actor_pool, size, made_of, make_room
        self._look = look
        self._numbers = count()
        self._actors: dict[int, ActorHandle[Any]] = {}
        self._starting: dict[ray.ObjectRef[Any], int] = {}
        """Actors that are not up yet, by the reference that says when they are; they are given no call."""
        self._nodes: dict[int, str] = {}
        """Nodes of the actors that have come up."""
        self._alive: Collection[str] = ()
        """Nodes of the cluster as it was last; empty where nobody looks."""
        self.losses = 0
        """Number of actors that have died so far."""
        self.halvings = 0
        """Times that fewer go on at once, half as many each, because memory is short."""
        self._failed_starts = 0
        self._ahead = Running(())
        """What was handed out ahead at last, as far as nobody has heard of its end."""
        self._fill()

    @property
    def abreast(self) -> int:
        """Return the number of actors that work at once."""
        return max(1, self._size >> self.halvings)

    def resize(self, size: int, nodes: Collection[str]) -> None:
        """Change to `size` actors on these nodes; surplus actors end, those of lost nodes first.

        What these were at is made again.
        """
        self._alive = nodes
        if size != self._size:
            self._size = size
            self._fill()

    def wait(self) -> None:
        """Wait until all actors have started; raises `ResourceError` if none does within `START_TIMEOUT`.

        One that dies as it starts is replaced; one that raises then raises its own error, for it would again.
        """
        while self._starting:
            self._started(self._first_start())

    def run(self, calls: Sequence[Call], hear: Hear | None = None, ahead: bool = False) -> Iterator[Done]:
        """Return an iterator over calls, each with its first result and references to the others, as they finish.

        An actor is handed its next call before it has finished the last, so that it need not wait for the driver, while
        more calls are left than there are actors. So at the end at most one call an actor waits behind a slow one while
        others are idle. With `ahead` actors that have started are handed all calls at once, before the first result is
        asked for, and work at them while the caller does something else. An actor takes calls of its own node first. A
        call past its limit comes as `Overdue`, one that ends its actors as `Crashed` where `Call.crashes` says so, and
        one whose arguments are lost as `Gone` where it is `losable`; what waits behind it is moved elsewhere. The
        iterator raises the call's own exception when it fails, `RayActorError` when the maker of one of its arguments
        has died, `ObjectLostError` when an argument or a result was lost with its node, `ActorsLost` when any other
        call keeps killing actors, and `ResourceError` when no actor is left and none comes up.
        """
        for slot in self._ahead.busy & self._actors.keys():  # whose round is played again: new calls would wait for it
            self._end(slot)
        self._fill()
        if ahead:
            self._meet()
        waiting = Waiting(calls)
        running = Running(self._up())
        if ahead:
            self._hand_out(waiting, running, ahead)
        self._ahead = running if ahead else Running(())
        return self._ended(waiting, running, hear)

    def _ended(self, waiting: Waiting, running: Running, hear: Hear | None) -> Iterator[Done]:
        """Yield calls as they end, and hand out those that wait."""
        while waiting or running:
            self._look(False)
            self._hand_out(waiting, running)
            first, overdue = self._first(running, hear)
            if first in self._starting:
                running.up(self._starting[first])
                self._started(first)
                continue
            ended = running.pop(first)
            if hear:
                standings.forget(first)
            if overdue:
                self._move(running.behind(ended.slot), waiting)
                self._end(ended.slot)
                self._fill()
                yield Done(ended.call, Overdue(), [])
                continue
            try:
                result = ray.get(first)
            except RayTaskError as error:  # before the others, which it is too when an argument's maker has died
                cause = original(error)
                if not (ended.call.losable and isinstance(cause, ObjectLostError)):
                    raise cause from None
                yield Done(ended.call, Gone(), [])
                continue
            except DEATHS as error:
                if crashed := self._lost(ended, error, waiting, running):
                    yield Done(ended.call, crashed, [])
                continue
            yield Done(ended.call, result, ended.rest, self._nodes.get(ended.slot, ""))

    def _hand_out(self, waiting: Waiting, running: Running, ahead: bool = False) -> None:
        """Give calls to started actors: to idle ones, and a second call to busy ones while many wait; `ahead` all."""
        while waiting and (freest := running.freest(self._actors)):
            queued, slot = freest
            if not ahead and queued >= (2 if len(waiting) > self.abreast else 1):
                return
            taken = waiting.take(self._nodes.get(slot, ""), idle=not queued)
            if not taken:
                running.pass_over()
                continue
            call, losses = taken
            done, *rest = self._start(self._actors[slot], call)
            running.add(done, Started(slot, self._actors[slot], call, losses, rest))

    @staticmethod
    def _move(behind: Sequence[Started], waiting: Waiting) -> None:
        """Give the calls queued behind one that ended its actor to other actors."""
        for other in behind:
            waiting.put_back(other.call, other.losses)

    def _lost(self, ended: Started, error: Exception, waiting: Waiting, running: Running) -> Crashed | None:
        """Replace the actor that a call was lost with, and queue its calls again.

        The one that it was at is blamed, those behind it are not; nor is it where the machine died, or where memory
        was short while other actors went on. Returns what comes in place of the result of one that is not made again.
        """
        self._move(running.behind(ended.slot), waiting)
        if ended.slot not in self._actors:  # ended here, for fewer to go on
            waiting.put_back(ended.call, ended.losses)
            return None
        alone = self.abreast == 1
        loss = self._mourn(ended.slot, error)
        losses = ended.losses + (loss is Loss.PROCESS or (loss is Loss.MEMORY and alone))
        if losses <= (self.RETRIES if ended.call.crashes is None else ended.call.crashes):
            waiting.put_back(ended.call, losses)
            return None
        if loss is Loss.MEMORY:
            self.halvings = 0  # the cause is the call, and not their number
            self._fill()
        if ended.call.crashes is None:
            raise ActorsLost(f"the call `{ended.call.method}` ended {losses} actors, one after another: {brief(error)}")
        return Crashed(memory=loss is Loss.MEMORY)

    def _mourn(self, slot: int, error: Exception) -> Loss:
        """Replace a dead actor, unless the pool is shrinking; return the cause of its death."""
        self.losses += 1
        self._end(slot)
        self._look(True)
        gone = self._alive and slot in self._nodes and self._nodes[slot] not in self._alive
        loss = Loss.NODE if gone else loss_of(error)  # not all of Ray's errors say so
        if loss is Loss.MEMORY and self.abreast > 1:
            self.halvings += 1
        self._fill()
        return loss

    def _first(self, running: Running, hear: Hear | None = None) -> tuple[ray.ObjectRef[Any], bool]:
        """Return the next event and whether it is a timeout: an actor started, a call ended, or a call is overdue.

        Without a limit the end always comes, for an actor that is up ends its call or dies; a start does not where
        there is no place. `hear` is told how far searches are.
        """
        if not running:
            return self._first_start(), False
        end = running.next_end()
        while True:
            left = inf if end is None else max(0.0, end[0] - monotonic())
            patience = min(left, LISTENING if hear else inf)
            timeout = None if patience == inf else patience
            done, _ = ray.wait([*self._starting, *running], num_returns=1, timeout=timeout)
            if done:
                return done[0], False
            if end is not None and monotonic() >= end[0]:
                return end[1], True
            for call, worked_at in running.worked_at if hear else ():
                if hear and (standing := standings.look(call)):
                    hear(worked_at, standing)

    def _first_start(self) -> ray.ObjectRef[Any]:
        """Wait until the first actor has started, if none has."""
        deadline = monotonic() + START_TIMEOUT
        while (left := deadline - monotonic()) > 0:
            done, _ = ray.wait([*self._starting], num_returns=1, timeout=min(left, PATIENCE))
            if done:
                return done[0]
            if len(self._starting) == len(self._actors):  # else those that are up will do
                self._look(True)
            if self.losses:
                self._make_room()
        raise _not_started(len(self._starting), len(self._actors))

    def _meet(self) -> None:
        """Note all actors that have started; wait for one where none has, and for no other: it may have no place."""
        while self._starting:
            there = [self._first_start()] if not self._up() else ray.wait([*self._starting], timeout=0)[0]
            if not there:
                return
            self._started(there[0])

    def _started(self, ready: ray.ObjectRef[Any]) -> None:
        """Note that an actor has started, or replace it if it died while starting; raises after repeated deaths."""
        slot = self._starting.pop(ready)
        try:
            self._nodes[slot] = ray.get(ready).node
        except RayTaskError as error:
            raise original(error) from None
        except DEATHS as error:
            if getattr(error, "actor_init_failed", False):
                raise
            self._failed_starts += self._mourn(slot, error) is not Loss.NODE
            if self._failed_starts > self.RETRIES:
                raise ActorsLost(
                    f"{self._failed_starts} actors died as they started, one after another: {brief(error)}"
                ) from error
        else:
            self._failed_starts = 0

    def nodes(self) -> dict[str, int]:
        """Return the nodes of the started actors, with their number on each."""
        return dict(Counter(self._nodes[slot] for slot in self._up()))

    def give_place(self) -> bool:
        """End one of several actors, or those still starting, for another pool's actor; return whether any was ended.

        The next `run` starts them again, to come up once there is room.
        """
        up = sorted(self._up())
        kept = up[:-1] or up
        given = [slot for slot in self._actors if slot not in kept]
        for slot in given:
            self._actor_pool.release(self._actors.pop(slot), keep=False)
        self._starting.clear()
        return bool(given)

    def _up(self) -> set[int]:
        """Return the numbers of the actors that have started."""
        return set(self._actors) - set(self._starting.values())

    @staticmethod
    def _start(actor: ActorHandle[Any], call: Call) -> list[ray.ObjectRef[Any]]:
        args = [arg.argument if isinstance(arg, Held) else arg for arg in call.args]
        refs = getattr(actor, call.method).options(num_returns=call.returns).remote(*args)
        return refs if call.returns > 1 else [refs]

    def _fill(self) -> None:
        """Start missing actors and end surplus ones; calls of ended actors are repeated.

        Those that are not up end first, then those whose node is gone.
        """
        starting = set(self._starting.values())
        best = sorted(self._actors, key=lambda n: (n in starting, self._nodes.get(n) not in self._alive, n))
        for slot in best[self.abreast :]:
            self._end(slot)
        while len(self._actors) < self.abreast:
            slot = next(self._numbers)
            self._actors[slot], ready = self._actor_pool.acquire(*self._made_of)
            self._starting[ready] = slot

    def _end(self, slot: int) -> None:
        self._actor_pool.release(self._actors.pop(slot), keep=False)
        self._starting = {ready: other for ready, other in self._starting.items() if other != slot}

    def close(self, keep: bool = False) -> None:
        """Release all actors to the actor pool, which keeps or ends them."""
        for actor in self._actors.values():
            self._actor_pool.release(actor, keep)


def wait_for(starting: list[ray.ObjectRef[Any]]) -> None:
    """Wait until these actors have started; raises `ResourceError` after `START_TIMEOUT`."""
    ready, missing = ray.wait(starting, num_returns=len(starting), timeout=START_TIMEOUT)
    try:
        ray.get(ready)
    except RayTaskError as error:
        raise original(error) from None
    if missing:
        raise _not_started(len(missing), len(starting))


def _not_started(missing: int, actors: int) -> ResourceError:
    return ResourceError(
        f"{missing} of {actors} actors did not start within {START_TIMEOUT:g} s: the cluster is busy or too small; "
        f"look at `ray status`, or ask for less under `resources`"
    )
