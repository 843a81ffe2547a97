"""How many client actors share a GPU, by the memory that one of them took (`num_gpus: auto`)."""

from __future__ import annotations

from collections.abc import Callable
from math import floor

from actors.actor_pool import ActorPool
from actors.client import ClientActor
from actors.cluster import alive, check, divide
from actors.workers import Workers
from rayfed.data.partitions.base import Parts
from rayfed.engine.executor import Call
from rayfed.engine.inputs import Inputs
from rayfed.errors import ResourceError
from rayfed.memory import CONTEXT, Peak, explaining
from rayfed.scenario import Scenario

_GIB = 2**30
_UNITS = 10_000
"""Parts of a GPU that Ray counts."""


def with_shares(inputs: Inputs, note: Callable[[str], None]) -> Scenario:
    """Return the scenario with a number for `resources.clients.num_gpus: auto`, and tell `note` of it.

    The work of each arm's first cohort is done for it by one actor with a GPU of its own. Raises `ResourceError` where
    the cluster has no GPU or one has too little memory.
    """
    scenario = inputs.scenario
    if scenario.resources.clients.num_gpus != "auto":
        return scenario
    alone = with_gpus(scenario, 1.0, actors=1)
    allotment = divide(list(alive().values()), alone, 1, 0)
    check(allotment, list(alive().values()))
    parts = inputs.data, Parts.of(inputs.parts), Parts.of(inputs.validation)
    one = Workers(ActorPool(), 1, ClientActor, allotment.client, scenario, *parts)
    try:
        one.wait()
        with explaining("clients"):
            [done] = one.run([Call("first_work", ())])
    finally:
        one.close()
    share, told = share_of(done.result)
    note(told)
    return with_gpus(scenario, share, scenario.resources.clients.actors)


def share_of(peak: Peak) -> tuple[float, str]:
    """Return the share of a GPU for one client actor with this peak of memory, and a note on it."""
    took, others, total = (size / _GIB for size in (peak.took, peak.others, peak.total))
    beside = f", of which other processes have {others:.1f}" if others else ""
    if not peak.together:
        raise ResourceError(
            f"resources.clients.num_gpus: auto: a client actor took {took:.1f} GiB, more than there is on its GPU of "
            f"{total:.1f} GiB{beside}: lower training.batch_size or federation.cohort_size"
        )
    told = (
        f"num_gpus: auto: a client actor took {took:.2f} GiB, with {CONTEXT / _GIB:.2f} for "
        f"CUDA's own: {peak.together} share a GPU of {total:.1f} GiB{beside}"
    )
    return floor(_UNITS / peak.together) / _UNITS, told


def with_gpus(scenario: Scenario, num_gpus: float, actors: int | None) -> Scenario:
    """Return the scenario with this share of a GPU for each client actor, and this number of them."""
    clients = scenario.resources.clients.model_copy(update={"num_gpus": num_gpus, "actors": actors})
    resources = scenario.resources.model_copy(update={"clients": clients})
    return scenario.model_copy(update={"resources": resources})
