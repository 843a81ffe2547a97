"""The cluster: connect to it or start one, and find how many actors it can hold."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import floor, inf

import ray

from actors.process import Share
from rayfed.errors import ResourceError
from rayfed.scenario import Actors, Scenario


@contextmanager
def connected(address: str | None) -> Iterator[None]:
    """A connection to Ray for the time of a run: the one that is there, the cluster at `address`, or a local one."""
    if ray.is_initialized():
        yield
        return
    # Ray's own lines (where it runs, deprecations of its own making) are not about the user's run
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(
            address=address or "local",
            include_dashboard=None if address else False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except Exception as error:
        if not address:
            raise ResourceError(f"Ray did not start on this machine: {error}; it may be too busy, try again") from error
        raise ResourceError(
            f"no Ray cluster at '{address}': {error}; start one with `ray start --head`, or leave --address out. "
            f"A cluster that asks for a token needs RAY_AUTH_MODE=token here too."
        ) from error
    if signal.getsignal(signal.SIGTERM) is not on_sigterm:
        signal.signal(signal.SIGTERM, on_sigterm)  # Ray's own would end the run as if it had failed
    try:
        yield
    finally:
        ray.shutdown()


@dataclass(frozen=True)
class Allotment:
    """How many actors of each kind a run starts, and what each may use."""

    clients: int
    client: Share
    server: Share
    attackers: int
    attacker: Share


def allot(scenario: Scenario, client_calls: int, attack_calls: int) -> Allotment:
    """Divide the cluster among the run's actors, never more of them than calls that can go on at once.

    Clients and attackers take turns, so a core that holds one of each is never asked for two cores' work. Raises
    `ResourceError` for a request that the cluster cannot satisfy.
    """
    r = scenario.resources
    turns = 2 if attack_calls else 1
    client, attacker = (_share(kind, default_cpus=1 / turns) for kind in (r.clients, r.attackers))
    server = _share(r.server, default_cpus=0)
    have = ray.cluster_resources()
    cpus, gpus = have.get("CPU", 0.0) - server.num_cpus, have.get("GPU", 0.0) - server.num_gpus
    for what, share in (("server", server), ("clients", client), ("attackers", attacker)):
        _check_node(what, share)
    pair = Share(client.num_cpus + attacker.num_cpus, client.num_gpus + attacker.num_gpus) if attack_calls else client
    slots = max(1, int(min(_fit(cpus, pair.num_cpus), _fit(gpus, pair.num_gpus), 1024)))
    clients = r.clients.actors or min(slots, max(client_calls, 1))
    attackers = (r.attackers.actors or min(slots, attack_calls)) if attack_calls else 0
    allotment = Allotment(clients, client, server, attackers, attacker)
    _check_total(allotment, have)
    return allotment


def _share(kind: Actors, default_cpus: float) -> Share:
    return Share(default_cpus if kind.num_cpus is None else kind.num_cpus, kind.num_gpus, tuple(sys.path))


def _fit(available: float, each: float) -> float:
    return floor(available / each + 1e-9) if each else inf


def _check_node(what: str, share: Share) -> None:
    """One actor lives on one node."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if any(n.get("CPU", 0) >= share.num_cpus and n.get("GPU", 0) >= share.num_gpus for n in nodes):
        return
    largest = Share(max(n.get("CPU", 0) for n in nodes), max(n.get("GPU", 0) for n in nodes))
    raise ResourceError(
        f"resources.{what}: one actor asks for {share}, but no node has more than {largest.num_cpus:g} CPU and "
        f"{largest.num_gpus:g} GPU: lower num_cpus or num_gpus, or give --address of a larger cluster"
    )


def _check_total(a: Allotment, have: dict[str, float]) -> None:
    cpus = a.clients * a.client.num_cpus + a.attackers * a.attacker.num_cpus + a.server.num_cpus
    gpus = a.clients * a.client.num_gpus + a.attackers * a.attacker.num_gpus + a.server.num_gpus
    if cpus > have.get("CPU", 0) + 1e-6 or gpus > have.get("GPU", 0) + 1e-6:
        raise ResourceError(
            f"resources: {a.clients} client actors ({a.client} each), {a.attackers} attackers ({a.attacker} each) and "
            f"the server ({a.server}) ask for {cpus:g} CPU and {gpus:g} GPU together, but the cluster has "
            f"{have.get('CPU', 0):g} CPU and {have.get('GPU', 0):g} GPU: ask for fewer actors or smaller shares"
        )
