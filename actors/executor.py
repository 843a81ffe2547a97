"""Execution of runs on Ray: client workers, attackers and the server are actors, which are replaced if they die."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any, Literal

import ray
import torch
from ray.exceptions import RayTaskError

from actors import local_ray, transport
from actors.actor_pool import ActorPool
from actors.attacker import AttackerActor
from actors.autoscaling import asking
from actors.client import ClientActor
from actors.cluster import Allotment, alive, allot, available_gpus, check, check_address, connected, wanted
from actors.packing import with_shares
from actors.process import ResourceShare
from actors.ray_errors import original, telling_losses
from actors.reservation import Reservation, is_awaited, reserving
from actors.servers import InDriver, OnActor, Serving, only_adds
from actors.workers import Workers, wait_for
from rayfed.core.memory import explain_memory_errors
from rayfed.data.partitions.base import Parts
from rayfed.errors import ClientError, OverdueError, UserError
from rayfed.scenario import Scenario
from rayfed.simulation.executors.base import Call, Done, Hear, Ref
from rayfed.simulation.gpus import KINDS
from rayfed.simulation.inputs import Inputs
from rayfed.simulation.machine import Machine, this_machine
from rayfed.simulation.progress import Progress
from rayfed.simulation.rounds.round import count_calls
from rayfed.simulation.server import ArmState, ServerRole


@dataclass(frozen=True)
class RayExecution:
    """Function object that opens executors on Ray: a connected cluster, the one at `address`, or a new local Ray."""

    address: str | None = None

    def num_gpus(self, scenario: Scenario) -> dict[str, int]:
        """Return the number of GPUs that each kind of actor may use, in the cluster or on this machine."""
        return available_gpus(self.address, scenario)

    @contextmanager
    def __call__(self, inputs: Inputs, progress: Progress) -> Iterator[RayExecutor]:
        """Open an executor with as many actors as the run can use and the cluster has room for."""
        scenario = inputs.scenario
        with connected(self.address, scenario):
            calls = count_calls(scenario, len(inputs.data.test_labels))
            scenario = with_shares(inputs, progress.note)
            room, in_driver = partial(allot, scenario, *calls), not self.address and only_adds(inputs)
            first = room(None)
            check(first, list(alive().values()))
            # no other run uses a Ray that this process has started
            reservation = nullcontext(None) if local_ray.is_own() else reserving(first, progress.note)
            with (
                asking(wanted(scenario, *calls)) if self.address else nullcontext(),
                reservation as reserved,
                _closing(RayExecutor(room, ActorPool(), progress.note, in_driver, reserved), keep=False) as executor,
            ):
                yield executor


def on_ray(address: str | None = None) -> RayExecution:
    """Return a function that opens executors on Ray: a connected cluster, the one at `address`, or a new local Ray.

    Raises `UserError` for an address of Ray's client.
    """
    check_address(address)
    return RayExecution(address)


@dataclass(frozen=True)
class TrialExecution:
    """Function object that opens executors for the trials of a sweep, with one allotment and the actors of one pool."""

    allotment: Allotment
    actor_pool: ActorPool

    def num_gpus(self, scenario: Scenario) -> dict[str, int]:
        """Return 0 GPUs for each kind of actor, because the allotment already contains the actors' GPUs."""
        return dict.fromkeys(KINDS, 0)

    @contextmanager
    def __call__(self, inputs: Inputs, progress: Progress) -> Iterator[RayExecutor]:
        """Open an executor for one trial, and keep the executor's actors for the next trial."""
        executor = RayExecutor(lambda _: self.allotment, self.actor_pool, progress.note)
        with connected(None, inputs.scenario), _closing(executor, keep=True):
            yield executor


@contextmanager
def _closing(executor: RayExecutor, keep: bool) -> Iterator[RayExecutor]:
    """Close an executor when the block ends. With `keep`, keep the actors, unless an error may come from them.

    An unfinished call does no harm, because a kept actor is initialised again after it.
    """
    try:
        yield executor
    except (ClientError, OverdueError):
        executor.close()  # another client or the server may hang in an actor
        raise
    except (UserError, SystemExit):
        executor.close(keep)
        raise
    except BaseException:
        executor.close()
        raise
    executor.close(keep)


LOOK = 2.0
"""Seconds between checks of the cluster while calls run."""


class RayExecutor:
    """Executor that runs calls in parallel on Ray actors (`rayfed.simulation.executors.base.Executor`).

    The number of actors changes when the cluster grows or shrinks.
    """

    def __init__(
        self,
        room: Callable[[Allotment | None], Allotment],
        actor_pool: ActorPool,
        note: Callable[[str], None],
        in_driver: bool = False,
        reservation: Reservation | None = None,
    ) -> None:
        """Initialise with the allotment that `room` returns; the actors start later.

        `room` is called with the last allotment when the cluster may have changed. With `in_driver`, the server is in
        this process instead of an actor. With a reservation, other runs may use the cluster, too.
        """
        transport.register()
        self._room, self._actor_pool, self._note = room, actor_pool, note
        self._allotment, self._looked = room(None), monotonic()
        self._in_driver, self._shared = in_driver, reservation is not None
        self._reserved = reservation or Reservation()
        self._server: Serving | None = None
        self._clients: Workers | None = None
        self._attackers: Workers | None = None
        self._attackers_made_of: tuple[Any, ...] = ()

    @property
    def clients(self) -> int:
        """Return the number of client actors, which is the number of concurrent client calls."""
        return self._allotment.clients

    def nodes(self) -> dict[str, int]:
        """Return the number of started client actors on each node."""
        return self._clients.nodes() if self._clients else {}

    def describe(self) -> str:
        """Describe the numbers of actors and their shares in words."""
        return self._allotment.describe()

    def environment(self) -> dict[str, object]:
        """Return the cluster's part of environment.json: its resources, and the shares of the actors."""
        return self._allotment.environment(self._in_driver)

    def machines(self) -> list[Machine]:
        """Return the machines of the driver and of all actors that have started so far."""
        return [this_machine("driver", torch.device("cpu")), *self._actor_pool.machines()]

    def start(self, inputs: Inputs, roles: dict[str, ServerRole], saved: dict[str, ArmState]) -> None:
        """Start the actors, and wait for the client actors, so that the first round does not include the start."""
        data = inputs.data
        self._attackers_made_of = data.sample.published(), len(data.classes)
        shared = [
            ray.put(value) for value in (data, Parts.from_indices(inputs.parts), Parts.from_indices(inputs.validation))
        ]
        self.restart_server(roles, saved)
        self._clients = self._workers(
            ClientActor,
            self._allotment.clients,
            self._allotment.client,
            (inputs.scenario, *shared),
            self._free_attacker,
            self._reserved.client,
        )
        self._clients.wait()
        if self._clients.losses:
            self._note(f"{self._clients.losses} client actor(s) died while starting and were replaced")
        if self._allotment.attackers and (self._allotment.attacker.num_gpus or self._allotment.apart):
            self._started_attackers().wait()  # raises before training if a GPU is missing

    def check_server(self) -> None:
        """Wait until the server has started. Raises `Lost` if the server died."""
        assert self._server is not None
        if ready := self._server.ready():
            with telling_losses():
                wait_for([ready])

    def restart_server(self, roles: dict[str, ServerRole], saved: dict[str, ArmState]) -> None:
        """Replace the server, which may hold the sums of an unfinished round, by a new server."""
        if self._server:
            self._server.close(keep=False)
        if self._in_driver:
            self._server = InDriver(self._allotment.server.threads, roles, saved)
        else:
            share = self._reserved.server or self._allotment.server
            self._server = OnActor(self._actor_pool, share, roles, saved)

    def run_clients(self, calls: Sequence[Call]) -> Iterator[Done]:
        """Run calls on client actors, and yield each result as the call ends."""
        assert self._clients is not None
        return self._noting_losses(self._clients, partial(self._clients.run, calls), "clients", "client actor")

    @property
    def attackers_apart(self) -> bool:
        """Return whether attackers share neither cores nor a GPU with clients."""
        return self._allotment.apart

    def run_attackers(self, calls: Sequence[Call], hear: Hear | None = None, ahead: bool = False) -> Iterator[Done]:
        """Run calls on attackers, and yield each result as the call ends. Attackers start on first use."""
        if not calls:
            return iter(())  # most rounds have no attacks, and starting an actor slows down the others for seconds
        attackers = self._started_attackers()
        begin = partial(attackers.run, calls, hear, ahead)
        if ahead:
            with telling_losses(), explain_memory_errors("attackers"):
                begun = begin()
            begin = partial(iter, begun)
        return self._noting_losses(attackers, begin, "attackers", "attacker")

    def serve(self, method: str, *args: Any, returns: int = 1) -> Any:
        """Call a method of the server, and return references to the results. Calls run in order, not in parallel."""
        assert self._server is not None
        return self._server.serve(method, args, returns)

    def get(self, refs: Sequence[Ref], limit: float | None = None) -> list[Any]:
        """Return the values of references, from this process or from Ray's object store."""
        with telling_losses():
            if limit is not None and len(ray.wait(list(refs), num_returns=len(refs), timeout=limit)[0]) < len(refs):
                raise OverdueError("the server", limit)
            try:
                return transport.fetched(refs)
            except RayTaskError as error:
                raise original(error) from None

    def close(self, keep: bool = False) -> None:
        """End all actors or, with `keep`, release all actors to the actor pool for the next run."""
        for pool in (self._clients, self._attackers):
            if pool:
                pool.close(keep)
        if self._server:
            self._server.close(keep)

    def _started_attackers(self) -> Workers:
        if self._attackers is None:
            self._attackers = self._workers(
                AttackerActor,
                self._allotment.attackers,
                self._allotment.attacker,
                self._attackers_made_of,
                self._free_client,
                self._reserved.attacker,
            )
        return self._attackers

    def _workers(
        self,
        kind: type,
        size: int,
        share: ResourceShare,
        args: tuple[Any, ...],
        make_room: Callable[[], None],
        reserved: ResourceShare | None,
    ) -> Workers:
        made_of = kind, share, *args
        return Workers(self._actor_pool, size, *made_of, make_room=make_room, look=self._look, reserved=reserved)

    def _look(self, lost: bool) -> None:
        """Adapt the number of actors to the cluster, periodically and after a loss."""
        if not lost and monotonic() < self._looked + LOOK:
            return
        before, self._allotment = self._allotment, self._room(self._allotment)
        self._looked, after = monotonic(), self._allotment  # the check itself may take long
        if (before.clients, before.attackers) != (after.clients, after.attackers):
            self._note(f"the cluster has changed: {after.describe()}")
        for pool, size in ((self._clients, after.clients), (self._attackers, after.attackers)):
            if pool:
                pool.resize(size, after.nodes)
        if self._shared:
            awaited = is_awaited()
            for pool in filter(None, (self._clients, self._attackers)):
                pool.lend(awaited)

    def _free_attacker(self) -> None:
        self._make_room(self._attackers, "attacker")

    def _free_client(self) -> None:
        self._make_room(self._clients, "client actor")

    def _make_room(self, giver: Workers | None, what: str) -> None:
        """End an actor of the other kind if a node died and the other nodes have no room for this kind."""
        if giver and giver.give_place():
            self._note(f"the cluster has no room for a lost actor: one {what} is ended to make room")

    def _noting_losses(
        self,
        pool: Workers,
        begin: Callable[[], Iterator[Done]],
        kind: Literal["clients", "attackers"],
        what: str,
    ) -> Iterator[Done]:
        known, halvings = pool.losses, pool.halvings
        with telling_losses(), explain_memory_errors(kind):
            for done in begin():
                if pool.losses > known:
                    lost = pool.losses - known
                    self._note(f"{lost} {what}{'s' * (lost > 1)} died; another actor repeats the work")
                    known = pool.losses
                if pool.halvings > halvings:
                    self._note(f"memory is short: at most {pool.abreast} {what}s run at once (resources)")
                halvings = pool.halvings
                yield done
