"""Pool of Ray actors that several runs of a process share, which saves importing PyTorch again."""

from __future__ import annotations

from collections import defaultdict
from contextlib import suppress
from typing import Any, TypeAlias

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from actors.process import Arrival, ResourceShare
from rayfed.simulation.machine import Machine

Acquired: TypeAlias = "tuple[ActorHandle[Any], ray.ObjectRef[Any]]"
"""An actor, and a reference to its `Arrival`, which is ready when the actor has started."""


class ActorPool:
    """Pool that creates Ray actors, and keeps released actors for the next run of this process."""

    def __init__(self) -> None:
        self._idle: dict[tuple[str, ResourceShare], list[ActorHandle[Any]]] = defaultdict(list)
        self._kinds: dict[ActorHandle[Any], tuple[str, ResourceShare]] = {}
        self._asked: list[ray.ObjectRef[Arrival]] = []
        self._machines: dict[Machine, None] = {}

    def acquire(self, kind: type, share: ResourceShare, *arguments: Any) -> Acquired:
        """Return a released or new actor of class `kind`, with a share of a node and constructor arguments."""
        key = kind.__name__, share
        if self._idle[key]:
            actor = self._idle[key].pop()
            return actor, actor.renew.remote(share, *arguments)
        remote: Any = ray.remote(kind)
        actor = remote.options(**_options(share)).remote(share, *arguments)
        self._kinds[actor] = key
        self._asked.append(actor.arrive.remote(share))
        return actor, self._asked[-1]

    def machines(self) -> list[Machine]:
        """Return the machines of all actors that have started so far, without duplicates."""
        up, self._asked = ray.wait(self._asked, num_returns=len(self._asked), timeout=0) if self._asked else ([], [])
        for told in up:
            with suppress(RayError):  # the actor died, or its error reaches the caller that waits for it
                self._machines[ray.get(told).machine] = None
        return list(self._machines)

    def release(self, actor: ActorHandle[Any], keep: bool) -> None:
        """Keep an idle actor for a later `acquire` if `keep` is true, or else end the actor and its pending calls."""
        key = self._kinds[actor]
        if keep:
            self._idle[key].append(actor)
        else:
            del self._kinds[actor]
            ray.kill(actor)


def _options(share: ResourceShare) -> dict[str, Any]:
    """Return Ray's options of an actor: its resources, and where it may be."""
    options: dict[str, Any] = {"num_cpus": share.num_cpus, "num_gpus": share.num_gpus, "scheduling_strategy": None}
    if share.place:
        group, bundle = share.place
        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group, bundle)
        return options  # the bundle has the labels
    if share.node:
        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(share.node, soft=True)
    if share.labels:
        options["label_selector"] = dict(share.labels)
    return options
