"""Calls to a fixed number of actors, results as they finish, repeated elsewhere when an actor dies.

Every call is a pure function of its arguments, so a call that was lost with its actor is simply made again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from time import monotonic
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, ObjectLostError, RayActorError, RayTaskError

from actors.actor_pool import ActorPool
from actors.calls import Running, Started
from rayfed.engine.executor import Call, Done, Overdue
from rayfed.errors import ResourceError, UserError

START_TIMEOUT = 900.0
"""Seconds that actors may take to start; an autoscaling cluster needs minutes for a new node."""

PATIENCE = 30.0
"""Seconds after which a pool that has lost all its actors asks for the place of another's."""


class ActorsLost(RuntimeError):
    """A call ended several actors, one after another."""


class Workers:
    """A fixed number of equal actors that do calls; dead ones are replaced."""

    RETRIES = 3
    """Actors that one call may lose before the fault is taken to be the call's own."""

    def __init__(
        self, actor_pool: ActorPool, size: int, *made_of: Any, make_room: Callable[[], None] = lambda: None
    ) -> None:
        """Start `size` actors from what `ActorPool.acquire` takes, `made_of`.

        `make_room` is called where all have died and no new one comes up.
        """
        self._actor_pool, self._size, self._made_of, self._make_room = actor_pool, size, made_of, make_room
        self._actors: dict[int, ActorHandle[Any]] = {}
        self._starting: dict[ray.ObjectRef[Any], int] = {}
        """Actors that are not up yet, by the reference that says when they are; they are given no call."""
        self.losses = 0
        """Number of actors that have died so far."""
        self._fill()

    def wait(self) -> None:
        """Wait until all actors are up; raises `ResourceError` when that takes longer than `START_TIMEOUT`.

        One that dies as it starts is replaced; one that raises then raises its own error, for it would again.
        """
        for again in range(self.RETRIES, -1, -1):
            try:
                wait_for(list(self._starting))
            except RayActorError as error:
                if error.actor_init_failed or not again:
                    raise
                for ready, slot in list(self._starting.items()):
                    if _died(ready):
                        del self._starting[ready]
                        self.losses += self._replace(slot, self._actors[slot])
            else:
                break
        self._starting.clear()

    def run(self, calls: Sequence[Call]) -> Iterator[Done]:
        """Yield each call with its first result and references to the others, in the order in which they finish.

        An actor is handed its next call before it has finished the last, so that it need not wait for the driver, while
        more calls are left than there are actors. So at the end at most one call an actor waits behind a slow one while
        others are idle. A call past its limit comes as `Overdue`; what waits behind it is moved elsewhere. Raises the
        call's own exception when it fails, `RayActorError` when the maker of one of its arguments has died,
        `ObjectLostError` when an argument or a result was lost with its node, `ActorsLost` when it keeps killing
        actors, and `ResourceError` when no actor is left and none comes up within `START_TIMEOUT`.
        """
        self._fill()
        waiting = deque((call, 0) for call in calls)
        running = Running(self._size)
        while waiting or running:
            while waiting and (slot := self._open(running.queued, len(waiting))) is not None:
                call, losses = waiting.popleft()
                done, *rest = self._start(self._actors[slot], call)
                running.add(done, Started(slot, self._actors[slot], call, losses, rest))
            first, overdue = self._first(running)
            if self._starting.pop(first, None) is not None:
                continue  # up, or dead as it started, which its first call will find out
            ended = running.pop(first)
            if overdue:
                waiting.extendleft((other.call, other.losses) for other in running.behind(ended.slot))
                self._replace(ended.slot, ended.actor)
                yield Done(ended.call, Overdue(), [])
                continue
            try:
                result = ray.get(first)
            except RayTaskError as error:  # before RayActorError, which it is too when an argument's maker has died
                raise _original(error) from None
            except RayActorError as error:
                self.losses += self._replace(ended.slot, ended.actor)
                losses = ended.losses + 1
                if losses > self.RETRIES:
                    raise ActorsLost(f"{ended.call.method} lost {losses} actors in a row: {error}") from error
                waiting.appendleft((ended.call, losses))
                continue
            yield Done(ended.call, result, ended.rest)

    def _first(self, running: Running) -> tuple[ray.ObjectRef[Any], bool]:
        """Return the first event, an actor that is up or the end of a call, and False; or an overdue call and True.

        Without a limit the end always comes, for an actor that is up ends its call or dies; a start does not where
        there is no place.
        """
        if not running:
            return self._first_start(), False
        end = running.next_end()
        timeout = None if end is None else max(0.0, end[0] - monotonic())
        done, _ = ray.wait([*self._starting, *running], num_returns=1, timeout=timeout)
        if done:
            return done[0], False
        assert end is not None
        return end[1], True

    def _first_start(self) -> ray.ObjectRef[Any]:
        """Wait for the first actor that comes up, where there is none."""
        deadline = monotonic() + START_TIMEOUT
        while (left := deadline - monotonic()) > 0:
            done, _ = ray.wait([*self._starting], num_returns=1, timeout=min(left, PATIENCE))
            if done:
                return done[0]
            if self.losses:
                self._make_room()
        raise _not_started(len(self._starting), len(self._actors))

    def give_place(self) -> bool:
        """End one of several actors, and those not up yet, for an actor of another pool; return whether any was ended.

        The next `run` starts them again, to come up once there is room.
        """
        up = sorted(set(self._actors) - set(self._starting.values()))
        kept = up[:-1] or up
        given = [slot for slot in self._actors if slot not in kept]
        for slot in given:
            self._actor_pool.release(self._actors.pop(slot), keep=False)
        self._starting.clear()
        return bool(given)

    def _open(self, queued: Sequence[int], waiting: int) -> int | None:
        """Return the actor for the next call: an idle one, or while many calls wait one with a single call."""
        up = set(self._actors) - set(self._starting.values())
        slot = min(sorted(up), key=queued.__getitem__, default=None)
        return slot if slot is not None and queued[slot] < (2 if waiting > len(queued) else 1) else None

    @staticmethod
    def _start(actor: ActorHandle[Any], call: Call) -> list[ray.ObjectRef[Any]]:
        refs = getattr(actor, call.method).options(num_returns=call.returns).remote(*call.args)
        return refs if call.returns > 1 else [refs]

    def _replace(self, slot: int, dead: ActorHandle[Any]) -> bool:
        """Replace an actor that is dead or to be ended; False where that was done before, for another of its calls."""
        if self._actors[slot] is not dead:
            return False
        self._actor_pool.release(dead, keep=False)
        self._start_actor(slot)
        return True

    def _fill(self) -> None:
        for slot in sorted(set(range(self._size)) - set(self._actors)):
            self._start_actor(slot)

    def _start_actor(self, slot: int) -> None:
        self._actors[slot], ready = self._actor_pool.acquire(*self._made_of)
        self._starting[ready] = slot

    def close(self, keep: bool = False) -> None:
        """Release all actors to the actor pool, which keeps or ends them."""
        for actor in self._actors.values():
            self._actor_pool.release(actor, keep)


def wait_for(starting: list[ray.ObjectRef[Any]]) -> None:
    """Wait for references that say that actors are up; raises `ResourceError` after `START_TIMEOUT`."""
    ready, missing = ray.wait(starting, num_returns=len(starting), timeout=START_TIMEOUT)
    try:
        ray.get(ready)
    except RayTaskError as error:
        raise _original(error) from None
    if missing:
        raise _not_started(len(missing), len(starting))


def _died(starting: ray.ObjectRef[Any]) -> bool:
    """Return whether an actor that was being started is dead."""
    try:
        ray.get(starting, timeout=0)
    except GetTimeoutError:
        return False
    except RayActorError:
        return True
    return False


def _not_started(missing: int, actors: int) -> ResourceError:
    return ResourceError(
        f"{missing} of {actors} actors did not start within {START_TIMEOUT:g} s: the cluster is busy or too small; "
        f"look at `ray status`, or ask for less under `resources`"
    )


def _original(error: RayTaskError) -> Exception:
    """Return the user's own error, or a lost argument's; anything else with the actor's traceback."""
    return error.cause if isinstance(error.cause, UserError | RayActorError | ObjectLostError) else error
