"""Actors for one run after another: an actor that a run leaves is told to start again, which spares a torch import."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, TypeAlias

import ray
from ray.actor import ActorHandle

from actors.process import ResourceShare

Acquired: TypeAlias = "tuple[ActorHandle[Any], ray.ObjectRef[Any]]"
"""An actor, and what is there once it is up."""


class ActorPool:
    """Makes actors, and keeps those that are released for the next run of this process."""

    def __init__(self) -> None:
        self._idle: dict[tuple[str, ResourceShare], list[ActorHandle[Any]]] = defaultdict(list)
        self._kinds: dict[ActorHandle[Any], tuple[str, ResourceShare]] = {}

    def acquire(self, kind: type, share: ResourceShare, *arguments: Any) -> Acquired:
        """An actor made with its share and these arguments."""
        key = kind.__name__, share
        if self._idle[key]:
            actor = self._idle[key].pop()
            return actor, actor.renew.remote(share, *arguments)
        remote: Any = ray.remote(kind)
        actor = remote.options(num_cpus=share.num_cpus, num_gpus=share.num_gpus).remote(share, *arguments)
        self._kinds[actor] = key
        return actor, actor.__ray_ready__.remote()

    def release(self, actor: ActorHandle[Any], keep: bool) -> None:
        """Keep an actor that has done its work for a later `acquire`, or end it and what it may be doing."""
        key = self._kinds[actor]
        if keep:
            self._idle[key].append(actor)
        else:
            del self._kinds[actor]
            ray.kill(actor)
