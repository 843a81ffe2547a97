"""Reservation of room on a shared cluster for one actor of each kind, so that several runs cannot block each other.

A run that holds some of its actors and waits for others could wait forever for a run that does the same. Therefore each
run reserves the room of its smallest set of actors in one step, as a placement group, before it starts any. More actors
start when there is room, and end when another run waits for its reservation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from time import monotonic
from uuid import uuid4

from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from actors.cluster import Allotment, alive, fits
from actors.process import ResourceShare
from actors.workers import START_TIMEOUT
from rayfed.errors import ResourceError

_PREFIX = "rayfed-run-"
"""Start of the names of the placement groups of runs, after which a random part follows."""
_WAITING = {"PENDING", "RESCHEDULING"}
"""States of placement groups without a place on the cluster."""
_LOOK = 2
"""Seconds between checks of the cluster while a run waits for its reservation."""


@dataclass(frozen=True)
class Reservation:
    """Shares of a run's first actors, with their places in a placement group; None for a kind without a place."""

    client: ResourceShare | None = None
    server: ResourceShare | None = None
    attacker: ResourceShare | None = None


@contextmanager
def reserving(allotment: Allotment, note: Callable[[str], None]) -> Iterator[Reservation]:
    """Reserve room for a client actor, an attacker and the server during the block, and wait until there is room.

    Raises `ResourceError` if the cluster does not grow to the room of these actors within `START_TIMEOUT` seconds.
    """
    kinds = {"client": allotment.client, "server": allotment.server}
    if allotment.attackers:
        kinds["attacker"] = allotment.attacker
    shares = {kind: share for kind, share in kinds.items() if share.resources}
    if not shares:
        yield Reservation()
        return
    group = placement_group(
        [share.resources for share in shares.values()],
        name=f"{_PREFIX}{uuid4().hex}",
        bundle_label_selector=[dict(share.labels) for share in shares.values()],
    )
    try:
        _wait(group, list(shares.values()), note)
        placed = {kind: replace(share, place=(group, n)) for n, (kind, share) in enumerate(shares.items())}
        yield Reservation(**placed)
    finally:
        with suppress(Exception):  # the cluster may be gone; then the error of the block is more useful
            remove_placement_group(group)


def is_awaited() -> bool:
    """Return whether a run on this cluster waits for its reservation."""
    groups = placement_group_table().values()
    return any(group["state"] in _WAITING and group["name"].startswith(_PREFIX) for group in groups)


def _wait(group: PlacementGroup, shares: list[ResourceShare], note: Callable[[str], None]) -> None:
    """Wait until a placement group has its place. Other runs may hold the room as long as they last."""
    deadline, noted = monotonic() + START_TIMEOUT, False
    while not group.wait(_LOOK):
        if fits(list(alive().values()), [(share, 1) for share in shares]):
            deadline = monotonic() + START_TIMEOUT
            if not noted:
                note("the cluster is busy: the run waits for room for its first actors (see `ray status`)")
                noted = True
        elif monotonic() > deadline:
            raise ResourceError(
                f"the cluster had no room for the first actors of the run within {START_TIMEOUT:g} s: see `ray "
                "status`, or request fewer CPUs and GPUs in `resources`"
            )
