"""Ray clusters: connect to one or start it, and compute how many actors fit on it."""

from __future__ import annotations

import signal
import sys
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from math import ceil
from types import MappingProxyType
from typing import NamedTuple

import ray

from actors import local_ray, raylet
from actors.process import ResourceShare
from actors.ray_errors import in_words_for_people
from actors.shipping import runtime_env
from rayfed.errors import ResourceError
from rayfed.scenario import Actors, Scenario
from rayfed.scenario.sections import Resources

_ROUNDING = 1e-6
"""Tolerance of sums of shares: three thirds are one."""
_NODE_ID = "ray.io/node-id"
"""Label that Ray gives to each node."""
_AUTO = "resources.clients.num_gpus: auto is for runs; Ray Tune places the trials of a sweep: give a number"
_TMPDIR_LENGTH = 35
"""Of a socket's 107 bytes, what Ray's own names leave."""


@contextmanager
def connected(address: str | None, scenario: Scenario) -> Iterator[None]:
    """Connect to Ray during the block: to the connected one, the cluster at `address`, or a local one.

    Nodes of a cluster are sent the user's own modules; to a local Ray that would cost seconds.
    """
    on_sigterm = signal.getsignal(signal.SIGTERM)
    with _explaining_start(address):
        begun = local_ray.is_up()
        there = begun or ray.is_initialized()
        if address and not there:
            local_ray.connect(address=address, runtime_env=runtime_env(scenario))
        elif not there:
            local_ray.start()
    if begun or signal.getsignal(signal.SIGTERM) is not on_sigterm:  # begun elsewhere, it sets one that Python sees not
        signal.signal(signal.SIGTERM, on_sigterm)  # Ray's own would end the run as if it had failed
    with nullcontext() if there else local_ray.ending(), in_words_for_people(), raylet.watched():
        yield


@contextmanager
def _explaining_start(address: str | None) -> Iterator[None]:
    """Turn errors while starting or connecting to Ray into a `ResourceError`."""
    try:
        yield
    except Exception as error:
        if address:
            raise ResourceError(
                f"no Ray cluster at '{address}': {error}; start one with `ray start --head`, or leave --address out. "
                f"A cluster that asks for a token needs RAY_AUTH_MODE=token here too."
            ) from error
        if isinstance(error, OSError) and not isinstance(error, ConnectionError | TimeoutError):
            raise ResourceError(
                f"Ray cannot use its temporary folder: {error}; name one with RAY_TMPDIR that can be written and whose "
                f"path is short (no more than about {_TMPDIR_LENGTH} characters)"
            ) from error
        raise ResourceError(
            f"Ray did not start on this machine: {error}; it may be too busy: try again, or play the run in one "
            f"process with --executor local"
        ) from error


@dataclass(frozen=True)
class Allotment:
    """Numbers of actors that a run starts, by kind, and what each may use."""

    clients: int
    client: ResourceShare
    server: ResourceShare
    attackers: int
    attacker: ResourceShare
    nodes: frozenset[str] = frozenset()
    """Ray's numbers of the nodes that the cluster had; empty where the numbers of actors are fixed."""

    def describe(self) -> str:
        """Describe in words how many actors have which share."""
        kinds = [(self.clients, "client actor", self.client), (self.attackers, "attacker", self.attacker)]
        return ", ".join(f"{n} {what}{'s' * (n > 1)} of {share} each" for n, what, share in kinds if n)

    def environment(self, server_in_driver: bool = False) -> dict[str, object]:
        """Return the cluster's part of environment.json: its resources, and how much of them the actors use."""
        have = ray.cluster_resources()
        clients, attackers = f"{self.clients} clients ({self.client})", f"{self.attackers} attackers ({self.attacker})"
        server = "the server in the driver's process" if server_in_driver else f"1 server ({self.server})"
        return {
            "cpus": have.get("CPU", 0),
            "gpus": have.get("GPU", 0),
            "nodes": len(ray.nodes()),
            "actors": f"{clients}, {attackers}, {server}",
        }


def allot(scenario: Scenario, client_calls: int, attack_calls: int) -> Allotment:
    """Divide the cluster's present resources among the run's actors, at most one for each concurrent call.

    The server is where the driver is: other nodes may be lent ones that go, and a run ends with its driver anyway.
    """
    nodes = alive()
    allotment = divide(list(nodes.values()), scenario, client_calls, attack_calls)
    server = replace(allotment.server, node=ray.get_runtime_context().get_node_id())
    return replace(allotment, server=server, nodes=frozenset(nodes))


class Node(NamedTuple):
    """The resources of one node that actors can use."""

    cpus: float
    gpus: float
    labels: Mapping[str, str] = MappingProxyType({})


def alive() -> dict[str, Node]:
    """Return the living nodes of the cluster, by Ray's identifier."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    return {
        node["NodeID"]: Node(node["Resources"].get("CPU", 0.0), node["Resources"].get("GPU", 0.0), node["Labels"])
        for node in nodes
    }


def wanted(scenario: Scenario, client_calls: int, attack_calls: int) -> Allotment:
    """Return the largest number of actors that a run can use: one for each concurrent call.

    Clients and attackers take turns, so a core that holds one of each is never asked for two cores' work. They do not
    where they are on unlike nodes.
    """
    r = scenario.resources
    turns = 2 if attack_calls and r.clients.labels == r.attackers.labels else 1
    client, attacker = (_share(r, kind, default_cpus=1 / turns) for kind in (r.clients, r.attackers))
    server = _share(r, r.server, default_cpus=0)
    if attack_calls:
        client = replace(client, labels=client.labels or _without(attacker.labels))
        attacker = replace(attacker, labels=attacker.labels or _without(client.labels))
    attackers = (r.attackers.actors or attack_calls) if attack_calls else 0
    return Allotment(r.clients.actors or max(client_calls, 1), client, server, attackers, attacker)


def divide(nodes: Sequence[Node], scenario: Scenario, client_calls: int, attack_calls: int) -> Allotment:
    """Divide nodes among the run's actors, at least one of each kind; see `allot`."""
    r, most = scenario.resources, wanted(scenario, client_calls, attack_calls)
    client, attacker = [most.client], [most.attacker] * bool(most.attackers)

    def slots(kind: list[ResourceShare], *others: ResourceShare) -> int:
        """Return how many actors of a kind fit beside the others, at least one."""
        numbers = range(1, max(client_calls, attack_calls, 1) + 1)
        return max(1, bisect_left(numbers, True, key=lambda n: not fits(nodes, [most.server, *others, *kind * n])))

    if most.client.labels == most.attacker.labels:
        clients = attackers = slots(client + attacker)
    else:
        attackers = slots(attacker, *client)
        clients = slots(client, *attacker * min(attackers, most.attackers))
    clients = most.clients if r.clients.actors else min(clients, most.clients)
    attackers = most.attackers if r.attackers.actors else min(attackers, most.attackers)
    return replace(most, clients=clients, attackers=attackers)


def _without(labels: Sequence[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """Return the label selector that keeps actors off the nodes that others request by these labels."""
    return tuple((name, f"!{value}") for name, value in labels)


def allot_trial(scenario: Scenario) -> Allotment:
    """Return the allotment of one run of a sweep.

    Trials go on side by side, so each has one actor of a kind unless the scenario asks for more.
    """
    r = scenario.resources
    if r.clients.labels or r.attackers.labels:
        raise ResourceError("resources: labels are for runs; Ray Tune places the trials of a sweep: leave labels out")
    turns = 2 if scenario.attacks else 1
    return Allotment(
        r.clients.actors or 1,
        _share(r, r.clients, default_cpus=1 / turns),
        _share(r, r.server, default_cpus=0),
        (r.attackers.actors or 1) if scenario.attacks else 0,
        _share(r, r.attackers, default_cpus=1 / turns),
    )


def check(allotment: Allotment, nodes: Sequence[Node]) -> None:
    """Raise `ResourceError` if nodes cannot hold all actors of an allotment; a cluster without CPUs may grow."""
    if not any(node.cpus for node in nodes):
        return
    _check_node("server", allotment.server, nodes)
    _check_node("clients", allotment.client, nodes)
    if allotment.attackers:
        _check_node("attackers", allotment.attacker, nodes)
    _check_total(allotment, nodes)


def fits(nodes: Sequence[Node], shares: Sequence[ResourceShare]) -> bool:
    """Return whether actors with these shares fit, each on one node, and each fraction of a GPU on one GPU.

    Those that ask for labels are placed first, then the largest.
    """
    free = [_Free(node.cpus, [1.0] * int(node.gpus), node.labels) for node in nodes]
    ordered = sorted(shares, key=lambda share: (bool(share.labels), share.num_gpus, share.num_cpus), reverse=True)
    return all(any(node.take(share) for node in free) for share in ordered)


@dataclass
class _Free:
    """Free resources of a node."""

    cpus: float
    gpus: list[float]
    labels: Mapping[str, str]

    def take(self, share: ResourceShare) -> bool:
        """Take a share from the node if it is free; return whether it was."""
        each = min(share.num_gpus, 1.0)
        able = [i for i, left in enumerate(self.gpus) if left > each - _ROUNDING][: ceil(share.num_gpus)]
        if share.num_cpus > self.cpus + _ROUNDING or len(able) < ceil(share.num_gpus):
            return False
        if not share.may_be_on(self.labels):
            return False
        self.cpus -= share.num_cpus
        for i in able:
            self.gpus[i] -= each
        return True


def _share(all_kinds: Resources, kind: Actors, default_cpus: float) -> ResourceShare:
    cpus = default_cpus if kind.num_cpus is None else kind.num_cpus
    if kind.num_gpus == "auto":
        raise ResourceError(_AUTO)
    labels = tuple(sorted(kind.labels.items()))
    return ResourceShare(cpus, kind.num_gpus, tuple(sys.path), all_kinds.deterministic, all_kinds.tf32, labels=labels)


def _check_node(what: str, share: ResourceShare, nodes: Sequence[Node]) -> None:
    """Raise `ResourceError` if no node has room for one actor."""
    if fits(nodes, [share]):
        return
    able = [node for node in nodes if share.may_be_on(node.labels)]
    if not able:
        raise ResourceError(_no_label(what, share, nodes))
    cpus, gpus = max(node.cpus for node in able), max(node.gpus for node in able)
    raise ResourceError(
        f"resources.{what}: one actor asks for {share}, but no node has more than {cpus:g} CPU and "
        f"{gpus:g} GPU: lower num_cpus or num_gpus, or give --address of a larger cluster"
    )


def _no_label(what: str, share: ResourceShare, nodes: Sequence[Node]) -> str:
    """Return an error message if no node has the requested labels, else None."""
    if any(value.startswith("!") for _, value in share.labels):
        kept = " or ".join(f"{name}={value[1:]}" for name, value in share.labels)
        return (
            f"resources.{what}: every node has {kept}, by which `resources` keeps it for others: give {what} labels of "
            f"their own, the same ones perhaps, or add nodes without"
        )
    asked = ",".join(f"{name}={value}" for name, value in share.labels)
    own = sorted({f"{name}={value}" for node in nodes for name, value in node.labels.items() if name != _NODE_ID})
    return (
        f"resources.{what}.labels: no node has {asked} (nodes have {', '.join(own) or 'no labels'}): start one with "
        f"`ray start --labels {asked}`, name the labels of its kind in cluster.yaml, or leave them out"
    )


def _check_total(a: Allotment, nodes: Sequence[Node]) -> None:
    shares = [a.server] + [a.client] * a.clients + [a.attacker] * a.attackers
    if not fits(nodes, shares):
        cpus, gpus = sum(node.cpus for node in nodes), sum(node.gpus for node in nodes)
        raise ResourceError(
            f"resources: {a.clients} client actors ({a.client} each), {a.attackers} attackers ({a.attacker} each) and "
            f"the server ({a.server}) ask for {sum(s.num_cpus for s in shares):g} CPU and "
            f"{sum(s.num_gpus for s in shares):g} GPU together, each on one node and a part of a GPU on one GPU, but "
            f"the cluster has {cpus:g} CPU and {gpus:g} GPU on {len(nodes)} node{'s' * (len(nodes) != 1)}: ask for "
            f"fewer actors or smaller shares"
        )
