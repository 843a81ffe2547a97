"""Connection to a Ray cluster, and computation of how many actors fit on the cluster's nodes."""

from __future__ import annotations

import signal
import sys
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from math import floor
from types import MappingProxyType
from typing import NamedTuple
from urllib.parse import urlsplit

import ray

from actors import local_ray, raylet
from actors.process import ResourceShare
from actors.ray_errors import in_words_for_people
from actors.shipping import runtime_env
from rayfed.errors import ResourceError, UserError
from rayfed.scenario import Actors, Scenario
from rayfed.scenario.sections import Resources
from rayfed.simulation.gpus import KINDS, gpus_here, with_devices

_ROUNDING = 1e-6
"""Tolerance of sums of shares, so that three thirds count as one."""
_NODE_ID = "ray.io/node-id"
"""Label that Ray gives to each node."""
_TMPDIR_LENGTH = 35
"""Number of bytes that remain for the folder in the 107 bytes of a socket's path."""


@contextmanager
def connected(address: str | None, scenario: Scenario) -> Iterator[None]:
    """Connect to Ray during the block: use the present connection, the cluster at `address`, or a new local Ray.

    A cluster receives the user's own modules. A local Ray does not need them, and copying would take seconds.
    """
    on_sigterm = signal.getsignal(signal.SIGTERM)
    with _explaining_start(address):
        begun = local_ray.is_up()
        there = begun or ray.is_initialized()
        if address and not there:
            local_ray.connect(address=address, runtime_env=runtime_env(scenario))
        elif not there:
            local_ray.start()
    # A Ray that was started in another thread sets a handler that `getsignal` does not show.
    if begun or signal.getsignal(signal.SIGTERM) is not on_sigterm:
        signal.signal(signal.SIGTERM, on_sigterm)  # with Ray's handler, a killed run would count as failed
    with nullcontext() if there else local_ray.ending(), in_words_for_people(), raylet.watched():
        yield


def check_address(address: str | None) -> None:
    """Raise `UserError` for an address of Ray's client (`ray://`), which connects to no node of the cluster.

    The driver needs the object store and the raylet of its node.
    """
    if address and urlsplit(address).scheme == "ray":
        raise UserError(
            f"--address {address}: the driver has to run on a node of the cluster, and Ray's client (ray://) has no "
            "node: start rayfed on a node with `--address auto`, or submit it from here with `ray job submit`"
        )


def available_gpus(address: str | None, scenario: Scenario) -> dict[str, int]:
    """Return the number of GPUs that each kind of actor may use, in the cluster or on this machine.

    Ray counts the GPUs. On this machine PyTorch must find them, too, so the smaller number holds. Without
    `num_gpus: auto` nothing depends on the number, so it is 0, and no cluster is asked.
    """
    if all(getattr(scenario.resources, kind).num_gpus != "auto" for kind in KINDS):
        return dict.fromkeys(KINDS, 0)
    here = gpus_here() if not address and (local_ray.is_own() or not ray.is_initialized()) else None
    if here and not any(here.values()):
        return here  # Ray, which may still be starting, has nothing to add
    with connected(address, scenario):
        nodes = list(alive().values())
    most = wanted(with_devices(scenario, dict.fromkeys(KINDS, 0)), 1, len(scenario.attacks))
    shares = {"clients": most.client, "attackers": most.attacker}
    gpus = {kind: gpus_for(share, nodes) for kind, share in shares.items()}
    return {kind: min(number, here[kind]) for kind, number in gpus.items()} if here else gpus


def gpus_for(share: ResourceShare, nodes: Sequence[Node]) -> int:
    """Return the number of GPUs on the nodes where such an actor may be, and that have the CPUs for it."""
    usable = [node for node in nodes if share.may_be_on(node.labels) and node.cpus >= share.num_cpus]
    return sum(int(node.gpus) for node in usable)


@contextmanager
def _explaining_start(address: str | None) -> Iterator[None]:
    """Convert errors while starting or connecting to Ray into a `ResourceError`."""
    try:
        yield
    except Exception as error:
        if address:
            raise ResourceError(
                f"no Ray cluster at '{address}': {error}; start one with `ray start --head`, or omit --address. "
                f"If the cluster needs a token, set RAY_AUTH_MODE=token on this machine, too."
            ) from error
        if isinstance(error, OSError) and not isinstance(error, ConnectionError | TimeoutError):
            raise ResourceError(
                f"Ray cannot use its temporary folder: {error}; set RAY_TMPDIR to a writable folder with a short path "
                f"(at most about {_TMPDIR_LENGTH} characters)"
            ) from error
        raise ResourceError(
            f"Ray did not start on this machine: {error}; the machine may be too busy: try again, or use one process "
            f"with --executor local"
        ) from error


@dataclass(frozen=True)
class Allotment:
    """Number of actors of each kind that a run starts, and the share of a node for one actor of each kind."""

    clients: int
    client: ResourceShare
    server: ResourceShare
    attackers: int
    attacker: ResourceShare
    nodes: frozenset[str] = frozenset()
    """Ray's identifiers of the cluster's nodes. Empty if the numbers of actors are fixed."""

    @property
    def apart(self) -> bool:
        """Return whether no attacker shares a core or a GPU with a client."""
        shares = self.client, self.attacker
        one_gpu = all(0 < share.num_gpus < 1 for share in shares)
        return not one_gpu and all(share.num_cpus >= 1 for share in shares)

    def describe(self) -> str:
        """Return a text with the numbers of client actors and attackers, and the actors' shares of a node."""
        kinds = [(self.clients, "client actor", self.client), (self.attackers, "attacker", self.attacker)]
        return ", ".join(f"{n} {what}{'s' * (n > 1)} of {share} each" for n, what, share in kinds if n)

    def environment(self, server_in_driver: bool = False) -> dict[str, object]:
        """Return the cluster's part of environment.json: the cluster's resources, and the shares of the actors."""
        have = ray.cluster_resources()
        clients, attackers = f"{self.clients} clients ({self.client})", f"{self.attackers} attackers ({self.attacker})"
        server = "the server in the driver's process" if server_in_driver else f"1 server ({self.server})"
        return {
            "cpus": have.get("CPU", 0),
            "gpus": have.get("GPU", 0),
            "nodes": len(ray.nodes()),
            "actors": f"{clients}, {attackers}, {server}",
        }


def allot(scenario: Scenario, client_calls: int, attack_calls: int, before: Allotment | None = None) -> Allotment:
    """Divide the cluster's present resources among a run's actors, at most one actor for each concurrent call.

    The server is on the driver's node, because other nodes may be removed and a run ends with its driver anyway.
    `before` is the run's last allotment, which is returned if the nodes are the same.
    """
    nodes = alive()
    if before and before.nodes == nodes.keys():
        return before
    allotment = divide(list(nodes.values()), scenario, client_calls, attack_calls)
    server = replace(allotment.server, node=ray.get_runtime_context().get_node_id())
    return replace(allotment, server=server, nodes=frozenset(nodes))


class Node(NamedTuple):
    """Resources of one cluster node that actors can use."""

    cpus: float
    gpus: float
    labels: Mapping[str, str] = MappingProxyType({})


def alive() -> dict[str, Node]:
    """Return the resources of the cluster's living nodes, by Ray's identifier of the node."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    return {
        node["NodeID"]: Node(node["Resources"].get("CPU", 0.0), node["Resources"].get("GPU", 0.0), node["Labels"])
        for node in nodes
    }


def wanted(scenario: Scenario, client_calls: int, attack_calls: int) -> Allotment:
    """Return the largest allotment that a run can use: one actor for each concurrent call.

    Clients and attackers on nodes with the same labels take turns, so one of each shares a core.
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
    """Divide the resources of nodes among a run's actors, with at least one actor of each kind."""
    r, most = scenario.resources, wanted(scenario, client_calls, attack_calls)
    client, attacker = [most.client], [most.attacker] * bool(most.attackers)

    def slots(kinds: Sequence[ResourceShare], *others: Alike) -> int:
        """Return how many actors of each kind in `kinds` fit in addition to the actors `others`; at least one."""

        def too_many(n: int) -> bool:
            return not fits(nodes, [(most.server, 1), *others, *((kind, n) for kind in kinds)])

        return max(1, bisect_left(range(1, max(client_calls, attack_calls, 1) + 1), True, key=too_many))

    if most.client.labels == most.attacker.labels:
        clients = attackers = slots(client + attacker)
    else:
        attackers = slots(attacker, (most.client, 1))
        clients = slots(client, (most.attacker, min(attackers, most.attackers)))
    clients = most.clients if r.clients.actors else min(clients, most.clients)
    attackers = most.attackers if r.attackers.actors else min(attackers, most.attackers)
    return replace(most, clients=clients, attackers=attackers)


def _without(labels: Sequence[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """Return the label selector that excludes nodes with these labels."""
    return tuple((name, f"!{value}") for name, value in labels)


def allot_trial(scenario: Scenario) -> Allotment:
    """Return the allotment of one trial of a sweep: the trial's actors, and each actor's share of a node.

    Trials run in parallel, so each has one actor per kind unless the scenario asks for more.
    """
    r = scenario.resources
    if r.clients.labels or r.attackers.labels:
        raise ResourceError("resources: labels do not work for sweeps, whose trials Ray Tune places: remove the labels")
    turns = 2 if scenario.attacks else 1
    return Allotment(
        r.clients.actors or 1,
        _share(r, r.clients, default_cpus=1 / turns),
        _share(r, r.server, default_cpus=0),
        (r.attackers.actors or 1) if scenario.attacks else 0,
        _share(r, r.attackers, default_cpus=1 / turns),
    )


def check(allotment: Allotment, nodes: Sequence[Node]) -> None:
    """Raise `ResourceError` if the allotted actors do not fit on the nodes, unless no node has a CPU yet."""
    if not any(node.cpus for node in nodes):
        return
    _check_node("server", allotment.server, nodes)
    _check_node("clients", allotment.client, nodes)
    if allotment.attackers:
        _check_node("attackers", allotment.attacker, nodes)
    _check_total(allotment, nodes)


Alike = tuple[ResourceShare, int]
"""A share, and the number of actors with it."""


def fits(nodes: Sequence[Node], actors: Sequence[Alike]) -> bool:
    """Return whether the actors fit on the nodes: each actor on one node, and each fraction of a GPU on one GPU.

    Actors that need labels are placed first, then the largest, each on the first node with room. Equal actors are
    placed together, which is fast for many actors.
    """
    free = [_Free(node.cpus, [1.0] * int(node.gpus), node.labels) for node in nodes]
    for share, left in sorted(actors, key=lambda one: _rank(one[0]), reverse=True):
        for node in free:
            if not left:
                break
            left -= node.take(share, left)
        if left:
            return False
    return True


def _rank(share: ResourceShare) -> tuple[bool, float, float]:
    """Return the sort key for placing actors, in descending order."""
    return bool(share.labels), share.num_gpus, share.num_cpus


@dataclass
class _Free:
    """Free resources of a node."""

    cpus: float
    gpus: list[float]
    labels: Mapping[str, str]

    def take(self, share: ResourceShare, most: int) -> int:
        """Take a share from the free resources up to `most` times, and return how many times the share fitted."""
        if not share.may_be_on(self.labels):
            return 0
        taken = most
        if share.num_cpus:
            taken = min(taken, _times(self.cpus, share.num_cpus))
        if share.num_gpus:
            rooms = [_times(left, share.num_gpus) for left in self.gpus]
            taken = min(taken, sum(rooms))
            parts = taken
            for i, room in enumerate(rooms):
                self.gpus[i] -= min(room, parts) * share.num_gpus
                parts -= min(room, parts)
        self.cpus -= taken * share.num_cpus
        return taken


def _times(free: float, each: float) -> int:
    """Return how often a share fits into the free amount."""
    return max(0, floor((free + _ROUNDING) / each))


def _share(all_kinds: Resources, kind: Actors, default_cpus: float) -> ResourceShare:
    cpus = default_cpus if kind.num_cpus is None else kind.num_cpus
    if kind.num_gpus == "auto":
        raise AssertionError("num_gpus: auto is replaced by a number before actors are placed")
    labels = tuple(sorted(kind.labels.items()))
    tf32 = all_kinds.tf32 and kind is not all_kinds.attackers
    return ResourceShare(cpus, kind.num_gpus, tuple(sys.path), all_kinds.deterministic, tf32, labels=labels)


def _check_node(what: str, share: ResourceShare, nodes: Sequence[Node]) -> None:
    """Raise `ResourceError` if no node has room for one such actor."""
    if fits(nodes, [(share, 1)]):
        return
    able = [node for node in nodes if share.may_be_on(node.labels)]
    if not able:
        raise ResourceError(_no_label(what, share, nodes))
    cpus, gpus = max(node.cpus for node in able), max(node.gpus for node in able)
    raise ResourceError(
        f"resources.{what}: one actor asks for {share}, but no node has more than {cpus:g} CPU and "
        f"{gpus:g} GPU: lower num_cpus or num_gpus, or give the --address of a larger cluster"
    )


def _no_label(what: str, share: ResourceShare, nodes: Sequence[Node]) -> str:
    """Return the error message if no node has the requested labels."""
    if any(value.startswith("!") for _, value in share.labels):
        kept = " or ".join(f"{name}={value[1:]}" for name, value in share.labels)
        return (
            f"resources.{what}: every node has {kept} and is reserved for other actors by `resources`: give {what} "
            f"labels too, for example the same ones, or add nodes without these labels"
        )
    asked = ",".join(f"{name}={value}" for name, value in share.labels)
    own = sorted({f"{name}={value}" for node in nodes for name, value in node.labels.items() if name != _NODE_ID})
    return (
        f"resources.{what}.labels: no node has {asked} (nodes have {', '.join(own) or 'no labels'}): start one with "
        f"`ray start --labels {asked}`, add the labels to a node type in cluster.yaml, or remove the field"
    )


def _check_total(a: Allotment, nodes: Sequence[Node]) -> None:
    actors = [(a.server, 1), (a.client, a.clients), (a.attacker, a.attackers)]
    if not fits(nodes, actors):
        cpus, gpus = sum(node.cpus for node in nodes), sum(node.gpus for node in nodes)
        raise ResourceError(
            f"resources: {a.clients} client actors ({a.client} each), {a.attackers} attackers ({a.attacker} each) and "
            f"the server ({a.server}) ask for {sum(n * share.num_cpus for share, n in actors):g} CPU and "
            f"{sum(n * share.num_gpus for share, n in actors):g} GPU together, with each actor on one node and each "
            f"fraction of a GPU on one GPU. The cluster has {cpus:g} CPU and {gpus:g} GPU on {len(nodes)} "
            f"node{'s' * (len(nodes) != 1)}: ask for fewer actors or smaller shares"
        )
