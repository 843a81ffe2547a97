"""Pool of actors that runs calls: yields results as they finish, and repeats calls if an actor dies.

Every call is a pure function of its arguments, so a call can be repeated when its actor is lost.
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
from actors.process import ResourceShare
from actors.ray_errors import DEATHS, Loss, brief, loss_of, original
from actors.transport import Held
from rayfed.errors import ResourceError
from rayfed.simulation.executors.base import Call, Crashed, Done, Gone, Hear, Overdue

START_TIMEOUT = 900.0
"""Seconds that actors may take to start. An autoscaling cluster needs minutes for a new node."""

LISTENING = 1.0
"""Seconds between reads of the progress of searches."""

OTHERS = 10.0
"""Seconds that a run with reserved room waits for its next actor before it begins with those that have started."""

PATIENCE = 30.0
"""Seconds after which a pool without actors asks another pool to make room."""


class ActorsLost(ResourceError):
    """Error if several actors died during the same call, or while starting."""


class Workers:
    """Pool of equal actors that run calls. Dead actors are replaced, and the pool grows and shrinks with the cluster.

    If Ray ends actors because memory is short, only half as many work at once. If a call fails even on a single actor,
    it is the cause, and all actors are started again.
    """

    RETRIES = 3
    """Maximum number of actors that may die during one call, or in sequence while starting."""

    def __init__(
        self,
        actor_pool: ActorPool,
        size: int,
        *made_of: Any,
        make_room: Callable[[], None] = lambda: None,
        look: Callable[[bool], None] = lambda lost: None,
        reserved: ResourceShare | None = None,
    ) -> None:
        """Start `size` actors; `made_of` are the arguments of `ActorPool.acquire`.

        One of the actors has the share `reserved`, if given. The others may have to wait for room until another run
        ends, so nothing waits for them.

        `make_room` is called if actors have died and none starts. `look` is called repeatedly while calls run, with
        True if an actor was lost. It may call `resize`.
        """
        self._actor_pool, self._size, self._made_of, self._make_room = actor_pool, size, made_of, make_room
        self._look, self._reserved = look, reserved
        self._holder: int | None = None
        """The actor with the reserved share, which is ended last."""
        self._numbers = count()
        self._actors: dict[int, ActorHandle[Any]] = {}
        self._starting: dict[ray.ObjectRef[Any], int] = {}
        """Actors that are still starting, by the reference to their `Arrival`. They get no calls."""
        self._nodes: dict[int, str] = {}
        """Nodes of the actors that have started."""
        self._alive: Collection[str] = ()
        """Nodes of the cluster at the last `resize`."""
        self.losses = 0
        """Number of actors that have died so far."""
        self.halvings = 0
        """Number of times that the number of working actors was halved because memory was short."""
        self._lent = 0
        """Number of actors that the pool does not start, because another run needs room."""
        self._failed_starts = 0
        self._ahead = Running(())
        """Calls of the last `run` with `ahead` whose results were not read yet."""
        self._fill()

    @property
    def abreast(self) -> int:
        """Return how many actors of the pool may work at once.

        The number is halved each time memory runs short, and smaller while another run needs room (`lend`).
        """
        return max(1, min(self._size - self._lent, self._size >> self.halvings))

    def resize(self, size: int, nodes: Collection[str]) -> None:
        """Change the pool to `size` actors, and note the cluster's present `nodes`.

        Surplus actors end, those of lost nodes first. Their calls are repeated.
        """
        self._alive = nodes
        if size != self._size:
            self._size = size
            self._fill()

    def lend(self, awaited: bool) -> None:
        """End one more started actor, and all that wait for room, if another run needs room; otherwise start all.

        The actor with the reserved share stays. Calls of ended actors are repeated.
        """
        if awaited:
            missing = self._size - len(self._up())
            self._lent = min(self._size - 1, max(self._lent, missing) + 1)
        elif self._lent:
            self._lent = 0
        else:
            return
        self._fill()

    def wait(self) -> None:
        """Wait until all actors have started. Raises `ResourceError` if no actor starts within `START_TIMEOUT`.

        With a reserved share, wait for the others only as long as one of them starts every `OTHERS` seconds. An actor
        that dies while starting is replaced. An error while starting is raised.
        """
        while self._starting:
            if not (self._reserved and self._up()):
                self._started(self._first_start())
                continue
            there, _ = ray.wait([*self._starting], num_returns=1, timeout=OTHERS)
            if not there:
                return
            self._started(there[0])

    def run(self, calls: Sequence[Call], hear: Hear | None = None, ahead: bool = False) -> Iterator[Done]:
        """Run calls on the actors, and return an iterator over finished calls, each with its result.

        Each item has the call's first result, and references to the other results.

        An actor gets its next call before it has finished the last one, as long as more calls wait than there are
        actors. So an actor does not wait for the driver, and at most one call per actor waits for a slow one. Actors
        prefer calls of their own node. With `ahead`, all calls are sent to the started actors at once, and run while
        the caller does other work.

        Instead of a result, `Overdue` is returned for a call past its limit, `Crashed` for a call whose actors died too
        often (`Call.crashes`), and `Gone` for a `losable` call whose arguments were lost. Calls queued after it are
        moved to other actors.

        The iterator raises the exception of a call, and these errors:

        - `RayActorError` if the actor that made an argument has died;
        - `ObjectLostError` if an argument or a result was lost with its node;
        - `ActorsLost` if actors keep dying during another call;
        - `ResourceError` if no actor is left and none starts.
        """
        for slot in self._ahead.busy & self._actors.keys():  # the round is repeated, and new calls would wait for them
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
        """Yield calls as they end, and send waiting calls to actors."""
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
            except RayTaskError as error:  # first, as it may also be an instance of the classes below
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
        """Send calls to started actors: one to idle actors, a second one while many wait, and with `ahead` all."""
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
        """Put calls back whose actor has ended, so that other actors run them."""
        for other in behind:
            waiting.put_back(other.call, other.losses)

    def _lost(self, ended: Started, error: Exception, waiting: Waiting, running: Running) -> Crashed | None:
        """Replace the lost actor of a call, and queue its calls again.

        The loss counts for the executing call only, and not if the node died or if memory was short while other actors
        worked. Returns `Crashed` if the call is not repeated.
        """
        self._move(running.behind(ended.slot), waiting)
        if ended.slot not in self._actors:  # ended by this pool, to have fewer actors
            waiting.put_back(ended.call, ended.losses)
            return None
        alone = self.abreast == 1
        loss = self._mourn(ended.slot, error)
        losses = ended.losses + (loss is Loss.PROCESS or (loss is Loss.MEMORY and alone))
        if losses <= (self.RETRIES if ended.call.crashes is None else ended.call.crashes):
            waiting.put_back(ended.call, losses)
            return None
        if loss is Loss.MEMORY:
            self.halvings = 0  # the cause is the call, not the number of actors
            self._fill()
        if ended.call.crashes is None:
            raise ActorsLost(f"{losses} actors died in sequence during the call `{ended.call.method}`: {brief(error)}")
        return Crashed(memory=loss is Loss.MEMORY)

    def _mourn(self, slot: int, error: Exception) -> Loss:
        """Replace a dead actor, unless the pool shrinks, and return the cause of its death."""
        self.losses += 1
        self._end(slot)
        self._look(True)
        gone = self._alive and slot in self._nodes and self._nodes[slot] not in self._alive
        loss = Loss.NODE if gone else loss_of(error)  # not all of Ray's errors name the node's death
        if loss is Loss.MEMORY and self.abreast > 1:
            self.halvings += 1
        self._fill()
        return loss

    def _first(self, running: Running, hear: Hear | None = None) -> tuple[ray.ObjectRef[Any], bool]:
        """Return the reference of the next event, and whether it is a timeout.

        Events are: an actor has started, a call has ended, or a call is overdue. Passes the progress of searches to
        `hear`. Waits without limit if a call executes, because an actor ends its call or dies.
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
                if hear:
                    hear(worked_at, standings.look(call))

    def _first_start(self) -> ray.ObjectRef[Any]:
        """Wait until one of the starting actors has started. Raises `ResourceError` after `START_TIMEOUT`."""
        deadline = monotonic() + START_TIMEOUT
        while (left := deadline - monotonic()) > 0:
            done, _ = ray.wait([*self._starting], num_returns=1, timeout=min(left, PATIENCE))
            if done:
                return done[0]
            if len(self._starting) == len(self._actors):  # no actor has started
                self._look(True)
            if self.losses:
                self._make_room()
        raise _not_started(len(self._starting), len(self._actors))

    def _meet(self) -> None:
        """Note all actors that have started, and wait for the first one if none has."""
        while self._starting:
            there = [self._first_start()] if not self._up() else ray.wait([*self._starting], timeout=0)[0]
            if not there:
                return
            self._started(there[0])

    def _started(self, ready: ray.ObjectRef[Any]) -> None:
        """Note that an actor has started, or replace it if it died while starting.

        Raises `ActorsLost` after repeated deaths.
        """
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
                    f"{self._failed_starts} actors died in sequence while starting: {brief(error)}"
                ) from error
        else:
            self._failed_starts = 0

    def nodes(self) -> dict[str, int]:
        """Return the number of actors that have started on each node."""
        return dict(Counter(self._nodes[slot] for slot in self._up()))

    def give_place(self) -> bool:
        """End one of several started actors, and all actors that are still starting, to make room for another pool.

        Returns whether any was ended. The next `run` starts them again.
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
        """Start missing actors and end surplus ones. Calls of ended actors are repeated.

        Actors that are still starting end first, then those whose node is gone.
        """
        starting = set(self._starting.values())
        best = sorted(
            self._actors,
            key=lambda n: (n != self._holder, n in starting, self._nodes.get(n) not in self._alive, n),
        )
        for slot in best[self.abreast :]:
            self._end(slot)
        while len(self._actors) < self.abreast:
            slot, made_of = next(self._numbers), self._made_of
            if self._reserved and self._holder not in self._actors:
                kind, _, *arguments = made_of
                self._holder, made_of = slot, (kind, self._reserved, *arguments)
            self._actors[slot], ready = self._actor_pool.acquire(*made_of)
            self._starting[ready] = slot

    def _end(self, slot: int) -> None:
        self._actor_pool.release(self._actors.pop(slot), keep=False)
        self._starting = {ready: other for ready, other in self._starting.items() if other != slot}

    def close(self, keep: bool = False) -> None:
        """Release all actors to the actor pool, which keeps the actors if `keep` is true, and else ends them."""
        for actor in self._actors.values():
            self._actor_pool.release(actor, keep)


def wait_for(starting: list[ray.ObjectRef[Any]]) -> None:
    """Wait until all actors in `starting` have started. Raises `ResourceError` after `START_TIMEOUT` seconds."""
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
        f"see `ray status`, or request fewer CPUs and GPUs in `resources`"
    )
