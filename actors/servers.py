"""Server of a run on Ray: on an actor, or in the driver's process if the server only adds updates.

An actor costs an import of PyTorch and three calls per round. It is needed for timeouts, for a driver that survives a
crash of the server, and for separate memory.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from ray.exceptions import RayTaskError

from actors.actor_pool import ActorPool
from actors.cluster import alive
from actors.process import ResourceShare
from actors.ray_errors import original, telling_losses
from actors.server import ServerActor
from actors.transport import Held, fetched
from rayfed.simulation.client.arm import aggregation_of
from rayfed.simulation.executors.base import Ref
from rayfed.simulation.inputs import Inputs
from rayfed.simulation.server import ArmState, Server, ServerRole

LIGHT = 16 << 20
"""Maximum size in bytes of all arms' weights for a server in the driver. With more, actors would wait for calls."""


def only_adds(inputs: Inputs) -> bool:
    """Return whether the server can run in the driver, because it only adds updates of a small model."""
    scenario, resources = inputs.scenario, inputs.scenario.resources
    if scenario.privacy.secure or resources.timeout is not None or resources.server.num_cpus is not None:
        return False
    arms = [account.arm for account in inputs.accounts]
    rules = [aggregation_of(arm.spec) for arm in arms]
    if any(arm.spec.protection for arm in arms) or any(rule.gathers for rule in rules):
        return False
    if not all(type(rule).__module__.startswith("rayfed.") for rule in rules):
        return False
    light = sum(w.numel() * w.element_size() for arm in arms for w in arm.weights.values()) <= LIGHT
    return light and len(alive()) == 1


class Serving(Protocol):
    """Interface through which the executor calls the server."""

    def serve(self, method: str, args: tuple[Any, ...], returns: int) -> Any:
        """Call a method of the server, and return a reference to each result. Calls run in order."""

    def ready(self) -> Ref | None:
        """Return a reference that is ready when the server has started; None if the server has already started."""

    def close(self, keep: bool) -> None:
        """End the server or, with `keep`, keep the server's actor for another run."""


class OnActor:
    """Server that runs on a separate Ray actor."""

    def __init__(
        self, pool: ActorPool, share: ResourceShare, roles: dict[str, ServerRole], saved: dict[str, ArmState]
    ) -> None:
        self._pool = pool
        self.actor, _ = pool.acquire(ServerActor, share, roles, saved)

    def serve(self, method: str, args: tuple[Any, ...], returns: int) -> Any:
        """Send a call to the server's actor, and return references. Errors are raised when a result is fetched."""
        return getattr(self.actor, method).options(num_returns=returns).remote(*args)

    def ready(self) -> Ref | None:
        """Return a reference that is ready when the server's actor has started."""
        ready: Ref = self.actor.__ray_ready__.remote()
        return ready

    def close(self, keep: bool) -> None:
        """Release the server's actor to the actor pool, which keeps the actor if `keep` is true, and else ends it."""
        self._pool.release(self.actor, keep)


class InDriver:
    """Server in the driver's process. Results stay in this process until a call needs them."""

    def __init__(self, threads: int, roles: dict[str, ServerRole], saved: dict[str, ArmState]) -> None:
        self._threads, self._server = threads, Server(roles, saved)

    def serve(self, method: str, args: tuple[Any, ...], returns: int) -> Any:
        """Run a server call in this process, with the number of threads of the server's share."""
        before = torch.get_num_threads()
        with telling_losses():
            try:
                values = fetched(args)
            except RayTaskError as error:
                raise original(error) from None
        torch.set_num_threads(self._threads)
        try:
            result = getattr(self._server, method)(*values)
        finally:
            torch.set_num_threads(before)
        return Held(result) if returns == 1 else [Held(one) for one in result]

    def ready(self) -> Ref | None:
        """Return None, because a server in this process is always ready."""
        return None

    def close(self, keep: bool) -> None:
        """Do nothing, because a server in this process has no actor to release."""
